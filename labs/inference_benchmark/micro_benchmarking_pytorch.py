"""Benchmarks vision networks: throughput, latency and memory, of inference or training.

request.py has its flags, modes.py what makes a network fast, measure.py the clock, gate.py the
check that the timed iterations did the work.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs.inference_benchmark import request, single
from workshop import errors
from workshop.arguments import parse
from workshop.run import deterministic


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark from the command line; returns the exit status."""
    arguments = parse(request.build_parser(), argv)
    if arguments.deterministic:
        deterministic.switch_on()
    work = single.run
    if arguments.profile_steps:
        from labs.inference_benchmark import profiling

        work = profiling.run
    elif request.is_study(arguments):
        from labs.inference_benchmark import studies

        work = studies.run
    return errors.exit_status(
        lambda: work(arguments), interrupted="interrupted before an iteration was complete"
    )


if __name__ == "__main__":
    sys.exit(main())
