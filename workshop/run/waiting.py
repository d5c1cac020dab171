"""How a process's threads wait: for each other, and for a processor that other programs use too.

It imports nothing but Python's own, for programs that call it before they import PyTorch.
"""

import contextlib
import os
from pathlib import Path

SPIN = {"GOMP_SPINCOUNT": "1000"}
"""How often a thread of PyTorch's OpenMP runtime looks whether the others have come before it
sleeps, and leaves its processor to them. As the runtime has it, a thread spins for milliseconds for
one that can't run meanwhile: on shared processors a step then takes ten times as long and more."""
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_TASKS = "/proc/{}/task"


def short_spin() -> dict[str, str]:
    """Additions to a process's environment for SPIN; none where the user has set what counts."""
    return {} if any(name in os.environ for name in _OF_THE_USER) else SPIN


def seconds_without_processor(process: int | str = "self") -> dict[str, float] | None:
    """For how long each thread of a process was ready to run and had no processor, by its id;
    None where the system doesn't count that."""
    found = {}
    for task in Path(_TASKS.format(process)).glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            if ran:  # a kernel that doesn't count writes zeros
                found[task.name] = waited / 1e9
    return found or None


def longest_wait(before: dict[str, float] | None, now: dict[str, float] | None) -> float | None:
    """The seconds in which the thread that waited longest had no processor, between two counts."""
    if before is None or now is None:
        return None
    return max(waited - before.get(thread, 0.0) for thread, waited in now.items())


def busy_seconds(session: int) -> float | None:
    """Processor time so far of this machine without that of this process and of a session's
    processes; None where the system doesn't count that."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq = map(int, words[1:8])
    except (OSError, ValueError):
        return None
    own = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended
            stat = (process / "stat").read_text()
            fields = stat.rpartition(")")[2].split()  # from the state on
            if int(fields[3]) == session or int(process.name) == os.getpid():
                own += sum(map(int, fields[11:15]))
    return (user + nice + system + irq + softirq - own) / os.sysconf("SC_CLK_TCK")


def longest_share(before: dict[str, float] | None, seconds: float) -> float | None:
    """The share of the last `seconds` in which the thread of this process that waited longest had
    no processor.

    Args:
        before: `seconds_without_processor` at their start.
    """
    waited = longest_wait(before, seconds_without_processor())
    return None if waited is None else waited / seconds
