"""Trains a version of Tiny-LLaMA in several processes: DDP, FSDP2 or DeepSpeed's ZeRO.

request.py has the flags, labs/group.py the processes, strategies.py the engines and the step,
loop.py the training, checkpoints.py the files, gate.py the gate and audit.py the audit, which show
that the processes train V1's model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs import group
from labs.scale_out import loop, request
from workshop import errors


def main(argv: list[str] | None = None) -> int:
    """Trains from the command line; returns the exit status."""
    interrupted = "interrupted: --resume continues from the newest checkpoint, which needs "
    return group.speak_as_one(
        lambda: errors.exit_status(
            lambda: loop.run(request.read(argv)), interrupted=f"{interrupted}--save-every N"
        )
    )


if __name__ == "__main__":
    sys.exit(main())
