"""Continues prompts with a causal language model, and says what a token costs.

request.py has its flags, prompts.py reads and pads, models.py loads, engines.py has the loops,
proof.py what shows that the tokens are the model's, generate.py the rest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs.text_generation import generate, request
from workshop import errors


def main(argv: list[str] | None = None, engine: str = "hf") -> int:
    """Generates from the command line; returns the exit status.

    Args:
        engine: the default one.
    """
    arguments = request.parse_words(request.build_parser(engine), argv)
    return errors.exit_status(
        lambda: generate.run(arguments), interrupted="interrupted before the first text was done"
    )


if __name__ == "__main__":
    sys.exit(main())
