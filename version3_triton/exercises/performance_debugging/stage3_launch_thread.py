#!/usr/bin/env python3
"""Stage 3: V3, whose steps are launched by another thread.

The main thread hands a step over and is free at once: for the next batch, for logging. A GPU's
queue works in this way already; here it is the same without one.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from debug_harness import Runner, main

# isort: split

import tiny_llama_v3 as v3


def timed_steps(runner: Runner, steps: int) -> list[float]:
    """Trains `steps` steps; the time of each in ms."""
    step_ms = []
    with ThreadPoolExecutor(max_workers=1) as launcher:
        for _ in range(steps):
            start = time.perf_counter()
            launcher.submit(runner.advance)
            step_ms.append((time.perf_counter() - start) * 1e3)
    return step_ms


if __name__ == "__main__":
    sys.exit(main(__file__, v3.TinyLlama, timed_steps=timed_steps))
