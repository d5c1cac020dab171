#!/usr/bin/env python3
"""Copies V4's result files with a change planted in them, to see whether a regression check finds
it. What it writes is made up: keep it out of results/."""

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, records, results
from workshop.arguments import argument, option, run
from workshop.errors import WorkshopError
from workshop.results import RunResult

MOST_PERCENT = 10**6


@dataclasses.dataclass
class Options:
    source: Path = argument("a folder of result files", metavar="FROM")
    target: Path = argument("a folder for the changed ones", metavar="TO")
    percent: float = option("how much slower a step is (default 0)", 0.0)
    device: str | None = option("the name of another device", metavar="NAME")


def main(argv: list[str] | None = None) -> int:
    return run(Options, plant, argv, interrupted="interrupted", description=__doc__)


def plant(a: Options) -> int:
    """Writes the copies."""
    if not -100 < a.percent <= MOST_PERCENT:
        raise WorkshopError(f"--percent {a.percent}: it must be between -100 and {MOST_PERCENT:,}")
    runs = [one for one in records.load_folder(a.source, RunResult) if one.version == "v4"]
    if not runs:
        raise WorkshopError(f"{a.source}: no results of V4 in it")
    results.prepare_folder(a.target)
    for number, one in enumerate(runs):
        times = [time * (1 + a.percent / 100) for time in one.step_ms]
        device = one.device | ({"name": a.device} if a.device else {})
        changed = dataclasses.replace(one, step_ms=times, device=device)
        records.save(changed, a.target / f"planted_{number}.jsonl")
    print(f"Written: {len(runs)} results of V4 into {a.target}, with a change planted in them")
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
