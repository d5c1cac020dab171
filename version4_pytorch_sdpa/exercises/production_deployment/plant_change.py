#!/usr/bin/env python3
"""Copies V4's result files with a change planted in them, to see whether a regression check finds
it. What it writes is made up: keep it out of results/."""

import argparse
import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, records, results
from workshop.arguments import parse
from workshop.errors import WorkshopError
from workshop.results import RunResult

MOST_PERCENT = 10**6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split()))
    parser.add_argument("source", type=Path, metavar="FROM", help="a folder of result files")
    parser.add_argument("target", type=Path, metavar="TO", help="a folder for the changed ones")
    parser.add_argument(
        "--percent", type=float, default=0.0, help="how much slower a step is (default 0)"
    )
    parser.add_argument("--device", metavar="NAME", help="the name of another device")
    arguments = parse(parser, argv)
    return errors.exit_status(lambda: plant(arguments), interrupted="interrupted")


def plant(a: argparse.Namespace) -> int:
    """Writes the copies."""
    if not -100 < a.percent <= MOST_PERCENT:
        raise WorkshopError(f"--percent {a.percent}: it must be between -100 and {MOST_PERCENT:,}")
    runs = [run for run in records.load_folder(a.source, RunResult) if run.version == "v4"]
    if not runs:
        raise WorkshopError(f"{a.source}: no results of V4 in it")
    results.prepare_folder(a.target)
    for number, run in enumerate(runs):
        times = [time * (1 + a.percent / 100) for time in run.step_ms]
        device = run.device | ({"name": a.device} if a.device else {})
        changed = dataclasses.replace(run, step_ms=times, device=device)
        records.save(changed, a.target / f"planted_{number}.jsonl")
    print(f"Written: {len(runs)} results of V4 into {a.target}, with a change planted in them")
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
