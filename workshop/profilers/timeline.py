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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers import kineto, names, reading
from workshop.profilers.categories import categorize

RANGES, OPERATORS, CALLS, KERNELS = "ranges", "operators", "runtime calls", "kernels"
"""Kinds of slices, in the order of their rows."""
_ALL_KINDS = (RANGES, OPERATORS, CALLS, KERNELS)
RANGE, CALL, SYNCHRONISATION = "marker range", "runtime call", "synchronisation"
"""In place of a category, where a slice is no operator and no kernel."""

_MOST_THREADS, _MOST_STREAMS = 3, 2
_KINDS = {
    "user_annotation": RANGES,
    "gpu_user_annotation": RANGES,
    "cpu_op": OPERATORS,
    "cuda_runtime": CALLS,
    "cuda_driver": CALLS,
    "hip_runtime": CALLS,
    "kernel": KERNELS,
    "gpu_memcpy": KERNELS,
    "gpu_memset": KERNELS,
}
_STEP_NAMES = (re.compile(r"step\Z"), re.compile(r"ProfilerStep#\d+\Z"))
"""This workshop's ranges, and the profiler's own: the first that a trace has count."""
_WAITS = re.compile(r"Synchronize|^(?:cuda|hip)Memcpy(?!.*Async)")
_ROUNDING_MS = 2e-6  # a trace has its times to the nanosecond, or to the microsecond
_SHORTEST_MS = 1e-3
_LONGEST_NAME, _LONGEST_TITLE = 2000, 60

Key = tuple[str, str]
"""The process and the thread of a host's slices, the device and the stream of a GPU's."""


class Slice(NamedTuple):
    """Something with a beginning and an end, in ms."""

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
class Trace:
    """A trace's slices by thread and stream, in ms by its clock."""

    path: Path
    begin: float = math.inf
    """The earliest time, from which Perfetto counts."""
    tracks: dict[Key, dict[str, list[Slice]]] = field(default_factory=dict)
    streams: set[Key] = field(default_factory=set)
    """The keys of the tracks that are a GPU's."""
    titles: dict[Key, str] = field(default_factory=dict)
    """As the trace names threads and streams."""
    devices: dict[int, str] = field(default_factory=dict)
    """Names of GPUs by number."""
    warnings: list[str] = field(default_factory=list)
    clock: kineto.Clock = field(default_factory=kineto.Clock)
    # The same few names come in every event: each is kept, and its category sought, once.
    _known: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def slices(self, kinds: Iterable[str]) -> Iterator[Slice]:
        """Those of all threads and streams."""
        for track in self.tracks.values():
            for kind in kinds:
                yield from track.get(kind, ())

    def add(self, event: Any) -> None:
        """Adds what of an event can be drawn.

        Raises:
            NoNumber, kineto.NoEvent: what it should hold is missing or makes no sense.
        """
        if not isinstance(event, dict):
            raise kineto.NoEvent(f"{event!r:.40} is no event")
        phase, category = event.get("ph"), kineto.category(event)
        if phase == "M" and event.get("name") == "thread_name":
            title = _argument(event, "name")
            # A thread may be named twice, by its own name and by its process's: "pt_autograd_0"
            # is clearer than "python3".
            if isinstance(title, str) and "autograd" not in self.titles.get(_key(event), ""):
                self.titles[_key(event)] = title
        elif phase == "X" and category == kineto.WHOLE_TRACE:
            self._times(event)  # with it Perfetto's axis begins
        elif phase == "X" and category in _KINDS:
            self._add_slice(event, category)

    def _add_slice(self, event: dict, category: str) -> None:
        name = event.get("name")
        if not isinstance(name, str) or not name:
            raise kineto.NoEvent(f"its name is {name!r:.40}")
        times = self._times(event)
        known = self._known.get((category, name))
        if known is None:
            known = name[:_LONGEST_NAME], _category(category, name)
            self._known[category, name] = known
        key, correlation = _key(event), _argument(event, "correlation")
        if category in kineto.ON_GPU:
            self.streams.add(key)
        slices = self.tracks.setdefault(key, {}).setdefault(_KINDS[category], [])
        slices.append(Slice(*times, *known, correlation if isinstance(correlation, int) else 0))

    def _times(self, event: dict) -> tuple[float, float]:
        """Start and end in ms by the clock."""
        start, duration = self.clock.times(event)
        self.begin = min(self.begin, start / 1e6)
        return start / 1e6, (start + duration) / 1e6


def _key(event: dict) -> Key:
    return f"{event.get('pid')!s:.40}", f"{event.get('tid')!s:.40}"


def _argument(event: dict, name: str) -> Any:
    arguments = event.get("args")
    return arguments.get(name) if isinstance(arguments, dict) else None


def _category(of_event: str, name: str) -> str:
    kind = _KINDS[of_event]
    if kind == RANGES:
        return RANGE
    if kind == CALLS:
        return SYNCHRONISATION if _WAITS.search(name) else CALL
    is_copy = of_event in ("gpu_memcpy", "gpu_memset")
    return kineto.copy_category(name) if is_copy else categorize(name)


@dataclass
class Lane:
    """All that one thread or stream did within the window; times in ms since the trace began."""

    title: str
    on_gpu: bool
    slices: dict[str, list[Slice]]
    """By kind, uncut and unmerged, sorted by their start."""


# --- reading -------------------------------------------------------------------------------------


def read(path: Path) -> Trace:
    """Reads what of a trace can be drawn, event by event.

    Raises:
        WorkshopError: it can't be read, is no trace, or there is nothing to draw in it.
    """
    others: list[str] = []
    if path.is_dir():
        path, others = kineto.newest_trace(path)
    if not kineto.recognises_json(reading.head(path)):
        raise WorkshopError(f"{path}: no trace of torch.profiler, the only one that can be drawn")
    trace = Trace(path, warnings=others)
    problems = kineto.read_events(path, trace.clock, trace.add)
    if not trace.tracks:
        raise problems.error("ranges, operators or kernels")
    trace.devices = kineto.device_names(path)
    trace.warnings += problems.warnings()
    return trace


# --- choosing and sorting ------------------------------------------------------------------------


def choose_window(
    trace: Trace, step: int | None, start_ms: float | None, end_ms: float | None
) -> Window:
    """The stretch to draw: the arguments are those of `draw`.

    Raises:
        WorkshopError: there is no such step or stretch.
    """
    begin = trace.begin
    last = max(s.end for s in trace.slices(_ALL_KINDS)) - begin
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
        start, end = chosen.start - begin, _last_launched(trace, chosen) - begin
    elif step is not None:
        raise WorkshopError(f"{trace.path}: no step {step}: it has {len(steps)} step ranges")
    else:
        start, end = min(s.start for s in trace.slices(_ALL_KINDS)) - begin, last
        what = "the whole trace"
    return Window(start, max(end, start + _SHORTEST_MS), what)


def _steps(trace: Trace) -> list[Slice]:
    """The host's step ranges, by their start, in which it did anything: a profiler that is stopped
    after its last step leaves an empty one."""
    starts = sorted(s.start for s in trace.slices([OPERATORS, CALLS]))
    ranges = sorted(
        s
        for key, track in trace.tracks.items()
        if key not in trace.streams
        for s in track.get(RANGES, ())
        if bisect_left(starts, s.start) < bisect_right(starts, s.end)
    )
    found = ([s for s in ranges if pattern.match(s.name)] for pattern in _STEP_NAMES)
    return next(filter(None, found), [])


def _last_launched(trace: Trace, step: Slice) -> float:
    """The end of the step, and of the last kernel launched in it: the GPU may be far behind."""
    calls = trace.slices([CALLS])
    launched = {s.correlation for s in calls if step.start <= s.start <= step.end} - {0}
    ends = (s.end for s in trace.slices([KERNELS]) if s.correlation in launched)
    return max([step.end, *ends])


def arrange(trace: Trace, window: Window) -> list[Lane]:
    """The lanes in the window: first the threads of the host, the main thread before those that
    it set to work, then the streams of the GPUs. Of many only the busiest are kept, and the trace
    gets a warning.

    Raises:
        WorkshopError: nothing does.
    """
    lanes = []
    for key, track in trace.tracks.items():
        inside = {kind: _inside(track[kind], trace.begin, window) for kind in track}
        if inside := {kind: slices for kind, slices in inside.items() if slices}:
            lanes.append(Lane(_title(trace, key), key in trace.streams, inside))
    if not lanes:
        raise WorkshopError(
            f"{trace.path}: nothing happens from {window.start:.3f} to {window.end:.3f} ms"
        )
    lanes.sort(key=_weight, reverse=True)
    threads = [lane for lane in lanes if not lane.on_gpu][:_MOST_THREADS]
    streams = [lane for lane in lanes if lane.on_gpu][:_MOST_STREAMS]
    if left_out := len(lanes) - len(threads) - len(streams):
        trace.warnings.append(f"{trace.path}: {left_out} less busy threads or streams not drawn")
    return sorted(threads, key=lambda lane: min(s[0].start for s in lane.slices.values())) + streams


def _inside(slices: list[Slice], begin: float, window: Window) -> list[Slice]:
    start, end = window.start + begin, window.end + begin
    return sorted(
        Slice(s.start - begin, s.end - begin, *s[2:])
        for s in slices
        if s.start < end and s.end > start
    )


def _weight(lane: Lane) -> tuple[bool, int]:
    """The thread with the ranges comes first, even where it does little, as with a graph."""
    return RANGES in lane.slices, sum(len(slices) for slices in lane.slices.values())


def _title(trace: Trace, key: Key) -> str:
    """A thread's or a stream's."""
    of_gpu, (process, thread) = key in trace.streams, key
    title = trace.titles.get(key, f"{'stream' if of_gpu else 'thread'} {thread}")
    title = names.printable(title).strip()[:_LONGEST_TITLE]
    if of_gpu:
        index = int(process) if process.isdecimal() else -1
        name = (kineto.device_name(trace.devices, index) or "")[:_LONGEST_TITLE]
        return f"GPU {process}{name and f' ({name})'}, {title}"
    if "autograd" in title:
        return f"autograd thread: {title}"
    return f"main thread: {title}" if thread == process else title


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


def busy_shares(slices: Iterable[Slice], window: Window, bins: int) -> list[float]:
    """The share, from 0 to 1, of each of `bins` equal parts of the window in which at least one of
    the slices, sorted by their start, ran."""
    width = (window.end - window.start) / bins
    shares = [0.0] * bins
    reached = window.start
    for s in slices:
        start, end = max(s.start, reached), min(s.end, window.end)
        reached = max(reached, end)
        index = int((start - window.start) / width)
        while start < end and index < bins:
            limit = min(window.start + (index + 1) * width, end)
            shares[index] += max(limit - start, 0.0) / width
            start, index = max(limit, start), index + 1
    return [min(share, 1.0) for share in shares]


def gaps(slices: Iterable[Slice], window: Window) -> Iterator[tuple[float, float]]:
    """(start, end) of each time in the window in which none of the slices, sorted by their start,
    runs."""
    reached = window.start
    for s in slices:
        if s.start > reached:
            yield reached, s.start
        reached = max(reached, s.end)
    if reached < window.end:
        yield reached, window.end


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
