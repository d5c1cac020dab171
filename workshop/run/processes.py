"""Processes that end when the program that started them does, however that ends."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

_WATCH = 'trap "" HUP INT TERM; read -r line; kill -s KILL -- "-$1"'
"""For a shell whose input is a pipe that the program holds: reading ends when the program does."""


@contextlib.contextmanager
def ended_with_us(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """Kills the process, and all that it has started, if this program ends within the block: by
    SIGKILL too, which no program can handle.

    Args:
        process: started with `start_new_session`, so that it is the head of a new group.
    """
    watch = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "sh", str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watch.kill()
        watch.communicate()


def stop(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """Ends a process by SIGTERM, on which it may save what it has; by SIGKILL if it is not gone
    after `patience_s` or at a second Ctrl-C."""
    process.terminate()
    try:
        process.wait(timeout=patience_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """Ends at once what is left of a process, and of all that it has started.

    Args:
        process: started with `start_new_session`.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
