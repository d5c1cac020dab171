"""Packages that a script needs, asked for before the script's own imports fail without them.

It imports nothing but Python's own at its top.
"""

import os
import sys

from workshop import errors
from workshop.run import waiting


def import_torch() -> None:
    """Imports PyTorch, which takes seconds, with `waiting.SPIN`: a program that `begin`s. Ends the
    process, in one line and with the status for it, if this Python has none."""
    errors.begin()
    os.environ.update(waiting.short_spin())
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        problem = f"PyTorch is missing in this Python ({sys.executable})"
        how = "run `make setup` and `source .venv/bin/activate`, or load your site's PyTorch module"
        print(f"error: {problem}: {how}", file=sys.stderr)
        sys.exit(errors.NOT_ON_THIS_MACHINE)
