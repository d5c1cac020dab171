"""Trains ResNet-18 or ResNet-34 on CIFAR-10, or marks one step of the training for a profiler.

data.py has the images, step.py the training step and its checkpoints, loop.py
flags and epochs, gate.py the check that the right network was trained.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs.cifar10_roofline import loop
from workshop import errors
from workshop.arguments import parse


def main(argv: list[str] | None = None) -> int:
    """Trains from the command line; returns the exit status."""
    arguments = parse(loop.build_parser(), argv)
    return errors.exit_status(
        lambda: loop.run(arguments),
        interrupted="interrupted: --resume FILE goes on from a checkpoint, if --out-dir has one",
    )


if __name__ == "__main__":
    sys.exit(main())
