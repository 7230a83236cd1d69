"""`python -m ptxkit` is the command `ptxkit`."""

from ptxkit.commands.cli import main

if __name__ == "__main__":
    main()
