"""Sorts a trace of torch.profiler into the rows of a picture of one training step, much as
Perfetto shows it; picture.py draws them.

Threads of the host are above the streams of the GPU, on one axis of time. Perfetto stacks a
thread's slices by nesting alone; here they are also sorted by kind: marker ranges, then operators,
then calls of the CUDA or HIP runtime.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers import names, reading
from workshop.profilers import trace as traces
from workshop.profilers.trace import Event, Trace, Track

RANGES, OPERATORS, CALLS, KERNELS = "ranges", "operators", "runtime calls", "kernels"
"""Kinds of slices, in the order of their rows."""
RANGE, CALL, SYNCHRONISATION = "marker range", "runtime call", "synchronisation"
"""In place of a category, where a slice is no operator and no kernel."""

_ROWS = {
    traces.ANNOTATION: RANGES,
    traces.GPU_ANNOTATION: RANGES,
    traces.OPERATOR: OPERATORS,
    **dict.fromkeys(traces.CALLS, CALLS),
    **dict.fromkeys(traces.ON_GPU, KERNELS),
}
_MOST_THREADS, _MOST_STREAMS = 3, 2
_STEP_NAMES = (re.compile(r"step\Z"), re.compile(r"ProfilerStep#\d+\Z"))
"""This workshop's ranges, and the profiler's own: the first that a trace has count."""
_WAITS = re.compile(r"Synchronize|^(?:cuda|hip)Memcpy(?!.*Async)")
_ROUNDING_MS = 2e-6  # a trace has its times to the nanosecond, or to the microsecond
_SHORTEST_MS = 1e-3
_LONGEST_TITLE = 60


class Slice(NamedTuple):
    """Something with a beginning and an end, in ms since the trace began."""

    start: float
    end: float
    name: str
    """Empty where short slices were merged."""
    category: str
    """One of categories.CATEGORIES, or of RANGE, CALL and SYNCHRONISATION."""
    correlation: int = 0
    """The number that a launch shares with the kernels that it launched; 0 for none."""


class Window(NamedTuple):
    """The stretch that is drawn, in ms since the trace began."""

    start: float
    end: float
    what: str
    """In words: "step 1 of 3"."""


@dataclass
class Lane:
    """All that one thread or stream did within the window."""

    title: str
    on_gpu: bool
    slices: dict[str, list[Slice]]
    """By kind, uncut and unmerged, sorted by their start."""


def read(path: Path) -> Trace:
    """Reads a trace that can be drawn; its warnings name what could not be read. Raises
    WorkshopError: it can't be read, is no trace, or there is nothing to draw in it."""
    if path.is_file() and not traces.recognises_json(reading.head(path)):
        raise WorkshopError(f"{path}: no trace of torch.profiler, the only one that can be drawn")
    trace, problems = traces.read(path)
    if not any(trace.events.values()):
        raise problems.error("ranges, operators or kernels")
    trace.warnings += problems.warnings()
    return trace


def choose_window(
    trace: Trace, step: int | None, start_ms: float | None, end_ms: float | None
) -> Window:
    """The stretch to draw: the arguments are those of `picture.draw`. Raises WorkshopError: there
    is no such step or stretch."""
    last = max(_ms(trace, event.end) for event in trace.of(*traces.KINDS))
    if start_ms is not None or end_ms is not None:
        if step is not None:
            raise WorkshopError("choose a step, or a stretch (--from, --to): not both")
        start = 0.0 if start_ms is None else start_ms
        end = last if end_ms is None else end_ms
        if not (start < end and start < last and end > 0):
            raise WorkshopError(
                f"{trace.path}: no stretch from {start:g} to {end:g} ms: it lasts from 0 to "
                f"{last:.3f} ms"
            )
        start, end = max(start, 0.0), min(end, last)
        return Window(start, end, f"{start:.2f} to {end:.2f} ms")
    steps, number = _steps(trace), 1 if step is None else step
    if 1 <= number <= len(steps):
        chosen, what = steps[number - 1], f"step {number} of {len(steps)}"
        start, end = _ms(trace, chosen.start), _ms(trace, _last_launched(trace, chosen))
    elif step is not None:
        raise WorkshopError(f"{trace.path}: no step {step}: it has {len(steps)} step ranges")
    else:
        start = min(_ms(trace, event.start) for event in trace.of(*traces.KINDS))
        end, what = last, "the whole trace"
    return Window(start, max(end, start + _SHORTEST_MS), what)


def _ms(trace: Trace, ns: float) -> float:
    return (ns - trace.begin) / 1e6


def _steps(trace: Trace) -> list[Event]:
    """The host's step ranges, by their start, in which it did anything: a profiler that is stopped
    after its last step leaves an empty one."""
    starts = sorted(event.start for event in trace.of(traces.OPERATOR, *traces.CALLS))
    ranges = sorted(
        event
        for event in trace.of(traces.ANNOTATION)
        if bisect_left(starts, event.start) < bisect_right(starts, event.end)
    )
    found = ([one for one in ranges if pattern.match(one.name)] for pattern in _STEP_NAMES)
    return next(filter(None, found), [])


def _last_launched(trace: Trace, step: Event) -> float:
    """The end of the step, and of the last kernel launched in it: the GPU may be far behind."""
    calls = trace.of(*traces.CALLS)
    launched = {call.correlation for call in calls if step.start <= call.start <= step.end}
    launched -= {traces.NO_CORRELATION}
    ends = (one.end for one in trace.of(*traces.ON_GPU) if one.correlation in launched)
    return max([step.end, *ends])


def arrange(trace: Trace, window: Window) -> list[Lane]:
    """The lanes in the window: first the threads of the host, the main thread before those that
    it set to work, then the streams of the GPUs. Of many only the busiest are kept, and the trace
    gets a warning. Raises WorkshopError: nothing happens in it."""
    inside: defaultdict[Track, dict[str, list[Slice]]] = defaultdict(dict)
    streams = {event.track for event in trace.of(*traces.ON_GPU, traces.GPU_ANNOTATION)}
    for event in trace.of(*traces.KINDS):
        start, end = _ms(trace, event.start), _ms(trace, event.end)
        if start < window.end and end > window.start:
            slices = inside[event.track].setdefault(_ROWS[event.kind], [])
            slices.append(Slice(start, end, event.name, _category(event), event.correlation))
    if not inside:
        raise WorkshopError(
            f"{trace.path}: nothing happens from {window.start:.3f} to {window.end:.3f} ms"
        )
    lanes = []
    for track, kinds in inside.items():
        on_gpu = track in streams
        by_start = {kind: sorted(slices) for kind, slices in kinds.items()}
        lanes.append(Lane(_title(trace, track, on_gpu), on_gpu, by_start))
    # The thread with the ranges comes first, even where it does little, as with a graph.
    lanes.sort(key=lambda lane: (RANGES not in lane.slices, -sum(map(len, lane.slices.values()))))
    threads = [lane for lane in lanes if not lane.on_gpu][:_MOST_THREADS]
    shown = [lane for lane in lanes if lane.on_gpu][:_MOST_STREAMS]
    if left_out := len(lanes) - len(threads) - len(shown):
        trace.warnings.append(f"{trace.path}: {left_out} less busy threads or streams not drawn")
    return sorted(threads, key=lambda lane: min(s[0].start for s in lane.slices.values())) + shown


def _category(event: Event) -> str:
    row = _ROWS[event.kind]
    if row == RANGES:
        return RANGE
    if row == CALLS:
        return SYNCHRONISATION if _WAITS.search(event.name) else CALL
    return traces.category(event.name, event.kind)


def _title(trace: Trace, track: Track, on_gpu: bool) -> str:
    """A thread's or a stream's."""
    process, thread = track
    title = trace.titles.get(track, f"{'stream' if on_gpu else 'thread'} {thread}")
    title = names.printable(title).strip()[:_LONGEST_TITLE]
    if on_gpu:
        name = trace.device_name(process if isinstance(process, int) else -1) or ""
        return f"GPU {process}{name and f' ({name[:_LONGEST_TITLE]})'}, {title}"
    if "autograd" in title:
        return f"autograd thread: {title}"
    return f"main thread: {title}" if thread == process else title


# --- rows ----------------------------------------------------------------------------------------


def nest(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Rows of slices by how many others each runs within, outermost first. No two in a row
    overlap, and each row is in order."""
    rows: list[list[Slice]] = []
    open_ends: list[float] = []
    for s in sorted(slices, key=lambda s: (s.start, -s.end)):
        while open_ends and open_ends[-1] <= s.start + _ROUNDING_MS:
            open_ends.pop()
        if len(open_ends) == len(rows):
            rows.append([])
        rows[len(open_ends)].append(s)
        open_ends.append(s.end)
    return rows


def merge(row: Iterable[Slice], pixel: float) -> list[Slice]:
    """A row in which all that is shorter than half a pixel, and lies within the length of one, has
    become one slice: without a name, and of the category that takes most of its time.

    Args:
        row: slices by their start.
        pixel: its length in ms.
    """
    groups: list[list[Slice]] = []
    open_group = False
    for s in row:
        is_short = s.end - s.start < pixel / 2
        if is_short and open_group and s.end - groups[-1][0].start <= pixel:
            groups[-1].append(s)
        else:
            groups.append([s])
        open_group = is_short
    return list(map(_union, groups))


def _union(slices: list[Slice]) -> Slice:
    if len(slices) == 1:
        return slices[0]
    by_category: defaultdict[str, float] = defaultdict(float)
    for s in slices:
        by_category[s.category] += s.end - s.start
    longest = max(by_category, key=by_category.__getitem__)
    return Slice(slices[0].start, slices[-1].end, "", longest)


def gaps(slices: Iterable[Slice], window: Window) -> Iterator[tuple[float, float]]:
    """(start, end) of each time in the window in which none of the slices, sorted by their start,
    runs."""
    reached = window.start
    for s in slices:
        if s.start > reached:
            yield reached, min(s.start, window.end)
        reached = max(reached, s.end)
    if reached < window.end:
        yield reached, window.end


def busy_shares(slices: Iterable[Slice], window: Window, bins: int) -> list[float]:
    """The share, from 0 to 1, of each of `bins` equal parts of the window in which at least one of
    the slices, sorted by their start, ran."""
    width = (window.end - window.start) / bins
    busy = [1.0] * bins
    for start, end in gaps(slices, window):
        index = min(int((start - window.start) / width), bins - 1)
        while start < end and index < bins:
            limit = end if index == bins - 1 else min(window.start + (index + 1) * width, end)
            busy[index] -= max(limit - start, 0.0) / width
            start, index = max(limit, start), index + 1
    return [min(max(share, 0.0), 1.0) for share in busy]


def flows(lanes: list[Lane], most: int) -> list[tuple[int, Slice, int, Slice]]:
    """(lane's index, launch, lane's index, first kernel that it launched) of at most `most`
    launches, spread evenly over those of the lanes."""
    kernels: dict[int, tuple[int, Slice]] = {}
    for index, lane in enumerate(lanes):
        for kernel in lane.slices.get(KERNELS, ()):
            kernels.setdefault(kernel.correlation, (index, kernel))
    launches = sorted(
        (call, index)
        for index, lane in enumerate(lanes)
        for call in lane.slices.get(CALLS, ())
        if call.correlation and call.correlation in kernels
    )
    every = max(1, math.ceil(len(launches) / most))
    chosen = launches[every // 2 :: every]
    return [(index, call, *kernels[call.correlation]) for call, index in chosen]
