"""What FLA does once kda is registered in it: `python -m kda.tools.commands.probe_fla` prints {"version", "asked"}.

`asked` has the backends that FLA asks for each of its functions that kda can serve, the first first.
"""

from __future__ import annotations

import json


def main() -> None:
    import fla

    import kda.fla

    print("\n" + json.dumps({"version": getattr(fla, "__version__", ""), "asked": kda.fla.asked()}))


if __name__ == "__main__":
    main()
