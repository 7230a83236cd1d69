"""`python -m kda` is the `kda` command."""

from kda.cli import main

if __name__ == "__main__":
    main()
