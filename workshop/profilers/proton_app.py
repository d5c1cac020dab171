"""A program as Python would run it, for Proton to run: `proton proton_app.py SCRIPT ARGUMENTS...`

Up to Triton 3.6 Proton runs a script's text inside its own program: sys.modules["__main__"] is
then Proton itself, and a script that ends with sys.exit, as most do, ends Proton before it has
written its profile.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs the program that sys.argv names, with the arguments after it; raises its SystemExit
    only where that is a failure."""
    del sys.argv[0]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
