"""torch.profiler's traces: the Chrome JSON that Kineto writes, on NVIDIA, on AMD and without a GPU.

A kernel belongs to the phase (forward, backward, optimizer) in which the host launched it: the GPU
runs it later, often when the host is in the next phase. Autograd launches the backward pass from a
thread of its own, while the thread that holds the range "backward" waits; so a launch's phase is
found by its time on the host, on any thread.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, filterfalse, islice
from pathlib import Path
from typing import Any, NamedTuple

from workshop.errors import WorkshopError
from workshop.profilers import json_stream, reading, step_time
from workshop.profilers.categories import categorize, on_tensor_cores
from workshop.profilers.names import printable
from workshop.profilers.reading import (
    MOST_NS,
    NoNumber,
    Problems,
    amount,
    count,
    nanoseconds,
    number,
)
from workshop.profilers.table import (
    PHASES,
    STEP,
    HostCall,
    KernelTable,
    Loading,
    Ranges,
    Sums,
    timeline,
)

_STEP_RANGES = ("ProfilerStep", STEP)
"""The profiler's own and this workshop's: the first of them that the trace has counts."""
_BACKWARD_OPERATOR = "autograd::engine::evaluate_function"
_OPTIMIZER_RANGE = "Optimizer.step"
_LOADER_RANGE = "enumerate(DataLoader)"
"""Around the __next__ of every DataLoader's iterator since PyTorch 1.8, whose class is named after
a #: it makes the batch, or waits for a worker's."""
_WITHOUT_WORKERS = "SingleProcess"
"""In the name of that class."""
_TRANSFER = "gloo:"
"""The start of the names of ranges in which gloo's threads send and receive."""
_RANGES = (*PHASES, *_STEP_RANGES, _OPTIMIZER_RANGE, _LOADER_RANGE)
WHOLE_TRACE = "Trace"
"""The category of Kineto's own span, from the profiler's start to its stop."""
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_GPU = {*_ON_GPU, "gpu_user_annotation"}
_HOST_CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime"}
_KINDS = {*_ON_GPU, *_HOST_CALLS, "user_annotation", "cpu_op"}
_ON_HOST = {*_HOST_CALLS, "user_annotation", "cpu_op", "python_function", WHOLE_TRACE}
_NS_PER_US = 1000.0
_NO_CORRELATION = 0
_FOR_ORIGIN = 1000
"""Events from whose starts a clock takes its origin."""
_WEEK_NS = 7 * 24 * 3600e9
_UNSEEN_NS = 10e9
"""The longest that a kernel runs on after the last thing that the host did in the trace."""
_AMD = re.compile(r"AMD|Radeon|Instinct|gfx\d", re.IGNORECASE)

_Thread = tuple[int | str, int | str]
"""Its process and its number."""
_Operator = tuple[float, float, str]
"""Start and end in ns by the trace's Clock, name."""


def read(path: Path) -> KernelTable:
    """The table of a trace: of GPU kernels, or where no GPU was traced, of the host's operators
    with the time that each spent outside the operators it called.

    Args:
        path: a .json or .json.gz, or a folder with such (the newest counts).

    Raises:
        WorkshopError: it can't be read, is no trace, or has neither kernels nor operators.
    """
    path, warnings = newest_trace(path) if path.is_dir() else (path, [])
    trace, problems = _read(path)
    loading = _loading(trace)  # while what the GPU was still busy with is there
    leftovers = trace.drop_before_steps()
    table = _kernel_table(path, trace) if trace.devices else _operator_table(path, trace)
    if not table.kernels:
        raise problems.error("kernels and no operators")
    if leftovers:
        warnings.append(
            f"{path}: left out {len(leftovers):,} kernels and copies that were launched before the "
            "trace's first step"
        )
    table.loading = loading
    table.step_times = _step_times(trace, _step_spans(trace, leftovers))
    table.warnings += warnings + problems.warnings()
    return table


def read_communication(path: Path) -> list[step_time.Communication]:
    """The time of each step in which the busiest GPU runs kernels of NCCL or RCCL, or without a GPU
    the process sends and receives through gloo. As `read`."""
    path, _ = newest_trace(path) if path.is_dir() else (path, [])
    trace, _ = _read(path)
    spans = _step_spans(trace, trace.drop_before_steps())
    if not trace.devices:
        operators = chain.from_iterable(trace.operators.values())
        idle = ("communication", "other")
        work = [one[:2] for one in operators if categorize(one[2]) not in idle]
        return step_time.communication(trace.transfers, work, spans)
    parts: dict[bool, list[step_time.Span]] = {True: [], False: []}
    for one in trace.busiest()[1]:
        is_transfer = categorize(one.name) == "communication"
        parts[is_transfer].append((one.start, one.start + one.ns))
    return step_time.communication(parts[True], parts[False], spans)


def _read(path: Path) -> tuple["_Trace", Problems]:
    """A trace, and the events that make no sense."""
    trace = _Trace()
    return trace, read_events(path, trace.clock, trace.add)


def read_events(path: Path, clock: "Clock", add: Callable[[Any], None]) -> Problems:
    """Gives every event of a trace to `add`, which reads its times from the clock; returns those
    that make no sense. A kernel that outlasts all that the host did in the trace is one of them.

    Raises:
        WorkshopError: the file can't be read, or has no events.
    """
    problems, late = Problems(path), []
    events = json_stream.items(path, "traceEvents", problems)
    first = list(islice(events, _FOR_ORIGIN))
    if not first and not problems.count:
        raise WorkshopError(
            f"{path}: its traceEvents are missing or empty; is it a trace of torch.profiler?"
        )
    clock.set_origin(event for _, event in first)
    for row, event in chain(first, events):
        try:
            add(event)
        except TooLong:
            late.append((row, event))
        except (NoNumber, NoEvent) as error:
            problems.add(row, str(error))
    if late:
        clock.longest_ns = min(max(_UNSEEN_NS, _host_ns(path, clock)), _WEEK_NS)
    for row, event in late:
        with problems.noted(row):
            add(event)
    return problems


def _host_ns(path: Path, clock: "Clock") -> float:
    """The time from the first to the last thing that the host did; inf where it did nothing."""
    first, last = math.inf, -math.inf
    for _, event in json_stream.items(path, "traceEvents", Problems(path)):
        if isinstance(event, dict) and category(event) in _ON_HOST and event.get("ph") == "X":
            with suppress(NoNumber):
                start, ns = clock.times(event)
                first, last = min(first, start), max(last, start + ns)
    return last - first if first < math.inf else math.inf


def category(event: dict) -> str:
    """The kind of an event; "" where it does not say."""
    found = event.get("cat")
    return found if isinstance(found, str) else ""


def recognises_json(start: str) -> bool:
    """Whether a JSON text that begins so is a trace.

    Args:
        start: the first 64 KiB.
    """
    if start.lstrip("\ufeff \t\r\n").startswith("["):
        return '"ph"' in start and '"cat"' in start
    return any(f'"{key}"' in start for key in ("traceEvents", "schemaVersion", "deviceProperties"))


def newest_trace(folder: Path) -> tuple[Path, list[str]]:
    """The trace to read of a folder, and a warning where others are passed over."""
    traces = [
        file
        for file in folder.rglob("*.json*")
        if file.name.endswith((".json", ".json.gz"))
        and file.is_file()
        and recognises_json(reading.head(file))
    ]
    if not traces:
        raise WorkshopError(f"{folder}: no trace of torch.profiler (.json, .json.gz) in it")
    newest = max(traces, key=lambda file: (file.stat().st_mtime_ns, file.name))
    if len(traces) == 1:
        return newest, []
    return newest, [f"{folder} has {len(traces)} traces; this is the newest, {newest.name}"]


class NoEvent(ValueError):
    """An entry of the list of events is not what its place or its category makes it."""


class TooLong(NoNumber):
    """A GPU's event lasts longer than its clock allows."""


class Clock:
    """Reads the times of events in ns since about the trace's beginning: since 1970, nanoseconds
    would take more digits than a float has.

    CUPTI and roctracer sometimes give an event a start of 0, or a duration of days to centuries.

    Attributes:
        longest_ns: what runs on a GPU for longer is TooLong.
    """

    def __init__(self) -> None:
        self.longest_ns = _UNSEEN_NS
        self._origin_us = 0.0

    def set_origin(self, events: Iterable[Any]) -> None:
        """To the median of these events' starts: any one of them may be corrupt."""
        starts = []
        for event in events:
            if isinstance(event, dict) and event.get("ph") == "X":
                with suppress(NoNumber):
                    starts.append(number(event.get("ts")))
        if starts:
            self._origin_us = sorted(starts)[len(starts) // 2]

    def times(self, event: dict) -> tuple[float, float]:
        """Start and duration. Raises NoNumber, TooLong: they make no sense."""
        try:
            start_us = number(event.get("ts"))
        except NoNumber as error:
            raise NoNumber(f"its start (ts): {error}") from None
        try:
            duration = nanoseconds(event.get("dur"), _NS_PER_US)
        except NoNumber as error:
            raise NoNumber(f"its duration (dur): {error}") from None
        if duration > self.longest_ns:
            seconds = f"its duration (dur): {duration / 1e9:,.0f} s"
            if duration > _WEEK_NS:
                raise NoNumber(f"{seconds}, more than a week")
            if category(event) in ON_GPU:
                raise TooLong(f"{seconds}, longer than all that the host did")
        start = (start_us - self._origin_us) * _NS_PER_US
        if abs(start) > MOST_NS:
            raise NoNumber(f"its start (ts): {start_us:g} is years from the others'")
        return start, duration


class _Interval(NamedTuple):
    """A range on the host, in ns by the trace's Clock."""

    start: float
    end: float
    name: str
    thread: _Thread


class _Activity(NamedTuple):
    """A kernel, copy or memset that a GPU ran. Times in ns by the trace's Clock."""

    name: str
    start: float
    ns: float
    correlation: int
    """The number that it shares with its launch, or _NO_CORRELATION."""
    bytes: float | None


class _Trace:
    """A trace's events, sorted by kind. Times in ns by its Clock.

    Attributes:
        devices: what ran on each GPU, by its number.
        copies: the category of each copy and memset, by its name.
        calls: (start, time, thread) of the runtime's functions, by name.
        launches: when the host launched, by the correlation that it shares with what it launched.
        ranges: the annotations that mark steps, phases and the loading of data, by name, without
            the number or the class that PyTorch adds to its own.
        operators: (start, end, name) of the host's operators, by thread.
        transfers: when gloo sent and received.
    """

    def __init__(self) -> None:
        self.devices: defaultdict[int, list[_Activity]] = defaultdict(list)
        self.copies: dict[str, str] = {}
        self.calls: defaultdict[str, list[tuple[float, float, _Thread]]] = defaultdict(list)
        self.launches: dict[int, float] = {}
        self.ranges: dict[str, list[_Interval]] = {name: [] for name in _RANGES}
        self.operators: defaultdict[_Thread, list[_Operator]] = defaultdict(list)
        self.transfers: list[step_time.Span] = []
        self._names: dict[str, str] = {}  # as read, as printed: one copy of each for all events
        self.clock = Clock()

    def add(self, event: Any) -> None:
        """Raises:
        NoNumber, NoEvent: what it should hold is missing or makes no sense.
        """
        if not isinstance(event, dict):
            raise NoEvent(f"a {type(event).__name__} is no event")
        kind = category(event)
        if kind not in _KINDS or event.get("ph") != "X":
            return
        name, arguments = event.get("name"), event.get("args")
        if not isinstance(name, str) or not name:
            raise NoEvent("it has no name")
        if not isinstance(arguments, dict):
            arguments = {}
        start, ns = self.clock.times(event)
        if name not in self._names:
            self._names[name] = printable(name)
        name = self._names[name]
        if kind in _ON_GPU:
            moved = None
            if kind != "kernel":
                if name not in self.copies:
                    self.copies[name] = copy_category(name)
                moved = _traffic(name, arguments)
            index = arguments.get("device", event.get("pid"))
            activity = _Activity(name, start, ns, _correlation(arguments), moved)
            self.devices[index if isinstance(index, int) else 0].append(activity)
        elif kind in _HOST_CALLS:
            self.calls[name].append((start, ns, _thread(event)))
            if correlation := _correlation(arguments):
                self.launches.setdefault(correlation, start)
        elif kind == "cpu_op":
            self.operators[_thread(event)].append((start, start + ns, name))
        elif name.startswith(_TRANSFER):
            self.transfers.append((start, start + ns))
        elif (range_ := name.partition("#")[0]) in self.ranges:
            self.ranges[range_].append(_Interval(start, start + ns, name, _thread(event)))

    def steps(self) -> list[_Interval]:
        """The ranges of steps, by their start; none where none are marked."""
        marked = next((self.ranges[name] for name in _STEP_RANGES if self.ranges[name]), [])
        return sorted(marked, key=lambda step: step.start)

    def busiest(self) -> tuple[int, list[_Activity]]:
        """The GPU that worked longest, and what it ran."""
        return max(self.devices.items(), key=lambda item: sum(a.ns for a in item[1]))

    def drop_before_steps(self) -> list[_Activity]:
        """Drops what the host called and launched before the first step, if there are steps; its
        kernels and copies. A profiler that starts while the GPU lags behind records the end of
        the warm-up, which may run far into the first step.

        Launches before the trace began are not in it, but correlations count up."""
        steps = self.steps()
        if not steps:
            return []
        begin = steps[0].start
        in_steps = (number for number, start in self.launches.items() if start >= begin)
        lowest = min(in_steps, default=_NO_CORRELATION)

        def is_of_steps(activity: _Activity) -> bool:
            if activity.correlation in self.launches:
                return self.launches[activity.correlation] >= begin
            launched_earlier = _NO_CORRELATION < activity.correlation < lowest
            return activity.start >= begin and not launched_earlier

        dropped = []
        for index, activities in list(self.devices.items()):
            self.devices[index] = list(filter(is_of_steps, activities))
            dropped += list(filterfalse(is_of_steps, activities))
            if not self.devices[index]:
                del self.devices[index]
        for name, calls in list(self.calls.items()):
            self.calls[name] = [call for call in calls if call[0] >= begin]
        return dropped

    def host_calls(self) -> dict[str, HostCall]:
        return {
            name: HostCall(len(calls), sum(ns for _, ns, _ in calls))
            for name, calls in self.calls.items()
            if calls
        }


def _thread(event: dict) -> _Thread:
    ids = (event.get(key) for key in ("pid", "tid"))
    process, thread = (one if isinstance(one, int | str) else "" for one in ids)
    return process, thread


def _traffic(name: str, arguments: dict) -> float | None:
    """The bytes that a copy or memset moves to and from a device's memory: twice its size where it
    reads and writes the same memory. A copy between two devices reads the one and writes the other.
    """
    is_within = "Device -> Device" in name and copy_category(name) == "copy"
    with suppress(NoNumber):
        return amount(arguments.get("bytes"), 2 if is_within else 1)
    return None


def copy_category(name: str) -> str:
    """The category of a copy or memset: "communication" between GPUs, else "copy"."""
    return "communication" if categorize(name) == "communication" else "copy"


def _correlation(arguments: dict) -> int:
    with suppress(NoNumber):
        return count(arguments.get("correlation"))
    return _NO_CORRELATION


def _kernel_table(path: Path, trace: _Trace) -> KernelTable:
    sums, launched = Sums(), []
    for device, activities in trace.devices.items():
        for name, start, ns, correlation, moved in activities:
            category = trace.copies.get(name)
            sums.add(name, ns, start_ns=start, bytes=moved, category=category, device=device)
            if correlation in trace.launches:
                launched.append((trace.launches[correlation], ns))
    table = _table(path, trace, sums, launched)
    busiest = sums.busiest()
    if isinstance(busiest, int):  # anything ran
        table.device = device_name(device_names(path), busiest)
    table.timeline = sums.timeline()
    table.warnings += [f"{path}: {warning}" for warning in sums.warnings()]
    orphans = table.launches - len(launched)
    if orphans and table.phases_ns:
        table.warnings.append(
            f"{path}: {orphans:,} of {table.launches:,} kernels and copies have no launch in the "
            "trace, so that they are in no phase"
        )
    return table


def _operator_table(path: Path, trace: _Trace) -> KernelTable:
    sums, started = Sums(), []
    for operators in trace.operators.values():
        for start, own_time, name in _own_times(operators):
            sums.add(name, own_time)
            started.append((start, own_time))
    table = _table(path, trace, sums, started)
    table.what = "operator"
    if any("Launch" in name for name in trace.calls):
        table.warnings.append(
            f"{path}: the host launched kernels, but none is in the trace, so these are the host's "
            "operators; was the GPU traced, and the trace written to its end?"
        )
    return table


def _table(
    path: Path, trace: _Trace, sums: Sums, started: list[tuple[float, float]]
) -> KernelTable:
    """Args:
    started: (when on the host, how long it took) of every kernel or operator.
    """
    return KernelTable(
        path=path,
        tool="torch.profiler",
        kernels=sums.kernels(),
        steps=_steps(trace, sorted(instant for instant, _ in started)),
        phases_ns=_phases_ns(trace, started),
        host_calls=trace.host_calls(),
    )


def _loading(trace: _Trace) -> Loading | None:
    """The waits for data of the thread that has the steps; without steps, of the process's main
    one."""
    steps = trace.steps()
    waits = _waits(trace, steps)
    last = _last_between(trace, waits)
    begin = steps[0].start if steps else -math.inf
    end = max((step.end for step in steps if step.start <= last), default=last)
    waits = [wait for wait in waits if begin <= wait.start < end]
    wait_ns, idle_ns = _covered(waits), None
    if not wait_ns:
        return None
    if trace.devices:
        ran = [(start, start + ns) for _, start, ns, *_ in trace.busiest()[1]]
        idle_ns = _covered([*ran, *waits]) - _covered(ran)
    in_thread = _covered(wait for wait in waits if _WITHOUT_WORKERS in wait.name)
    span_ns = end - (begin if steps else waits[0].start)
    return Loading(span_ns, wait_ns, len(waits), in_thread > wait_ns / 2, idle_ns)


def _waits(trace: _Trace, steps: list[_Interval]) -> list[_Interval]:
    """For data, of the thread that has the steps; without steps, of the process's main one."""
    return _outermost(
        wait
        for wait in trace.ranges[_LOADER_RANGE]
        if (wait.thread == steps[0].thread if steps else wait.thread[0] == wait.thread[1])
    )


def _last_between(trace: _Trace, waits: list[_Interval]) -> float:
    """When the last of what a thread ran between its waits was launched, or ended. A wait after
    that brings no batch: it is for the end of the workers."""
    waiting = Ranges(wait[:3] for wait in waits)
    operators = (trace.operators.get(thread, ()) for thread in {wait.thread for wait in waits})
    launches = ((start, start, "") for start in trace.launches.values())
    ran = chain(chain.from_iterable(operators), launches)
    return max((end for start, end, _ in ran if not waiting.at(start)), default=-math.inf)


def _step_spans(trace: _Trace, leftovers: list[_Activity]) -> list[step_time.Span]:
    """Each step from the end of the one before it to that of its range or of the last thing
    launched in it, so that a GPU that lags behind the host counts; the first from the start of its
    range. Steps after the last that launched or ran anything outside of the DataLoader are left
    out: a profiler that is stopped after its last step leaves another range.

    Args:
        leftovers: what was launched before the first step, and dropped.
    """
    steps = trace.steps()
    ran = trace.busiest()[1] if trace.devices else []
    launches = [trace.launches.get(one.correlation, -math.inf) for one in ran]
    if steps:
        waiting = Ranges(wait[:3] for wait in _waits(trace, steps))
        operators = (end for _, end, _ in trace.operators.get(steps[0].thread, ()))
        last = max(
            [*launches, *(end for end in operators if not waiting.at(end))], default=-math.inf
        )
        steps = [step for step in steps if step.start <= last]
    starts, ends = [step.start for step in steps], [step.end for step in steps]
    for one, launched in zip(ran, launches, strict=True):
        if (index := bisect_right(starts, launched) - 1) >= 0:
            ends[index] = max(ends[index], one.start + one.ns)
    spans = []
    begin = max([*starts[:1], *(one.start + one.ns for one in leftovers)], default=0.0)
    for end in ends:
        if end > begin:
            spans.append((begin, end))
            begin = end
    return spans


def _step_times(trace: _Trace, spans: list[step_time.Span]) -> list[step_time.StepTime]:
    """The times of steps, by what ran on the thread that has them, on those that run operators, and
    on the busiest GPU. (A thread that pins memory only calls the runtime.)"""
    if not spans:
        return []
    steps = trace.steps()
    active: defaultdict[str, list[step_time.Span]] = defaultdict(list)
    active[step_time.LOADING] = [wait[:2] for wait in _waits(trace, steps)]
    for start, ns, thread in chain.from_iterable(trace.calls.values()):
        if thread == steps[0].thread or thread in trace.operators:
            active[step_time.RUNTIME].append((start, start + ns))
    for operators in trace.operators.values():
        active[step_time.CPU] += [operator[:2] for operator in operators]
    ran = trace.busiest()[1] if trace.devices else []
    kinds = {name: _kind(trace, name) for name in {one.name for one in ran}}
    for one in ran:
        active[kinds[one.name]].append((one.start, one.start + one.ns))
    return step_time.divide(active, spans)


def _kind(trace: _Trace, name: str) -> str:
    if name in trace.copies:
        return step_time.COPY
    return step_time.TENSOR if on_tensor_cores(name) else step_time.KERNEL


def _outermost(ranges: Iterable[_Interval]) -> list[_Interval]:
    """The ranges of one thread that lie in no other, by their start."""
    found: list[_Interval] = []
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        if not found or one.start >= found[-1].end:
            found.append(one)
    return found


def _covered(intervals: Iterable[tuple]) -> float:
    """The time within at least one of those that begin with (start, end)."""
    line = timeline((start, end) for start, end, *_ in intervals)
    return line.busy_ns if line else 0.0


def device_name(names: Mapping[int, str], index: int) -> str | None:
    """The name of the GPU on which a trace's kernels ran, if it is sure.

    AMD's kernels have the number of an HSA agent. CPU sockets are agents, too, and come first, but
    `deviceProperties` counts GPUs alone.
    """
    different = set(names.values())
    if len(different) == 1:
        return different.pop()
    return None if any(map(_AMD.search, different)) else names.get(index)


def device_names(path: Path) -> dict[int, str]:
    """The names of the GPUs that a trace lists, by number."""
    devices = json_stream.value(reading.head(path), "deviceProperties")
    return {
        device["id"]: printable(device["name"])
        for device in (devices if isinstance(devices, list) else [])
        if isinstance(device, dict)
        and isinstance(device.get("id"), int)
        and isinstance(device.get("name"), str)
        and device["name"]
    }


def _steps(trace: _Trace, instants: list[float]) -> int | None:
    """How many step ranges have one of the sorted `instants` in them: a profiler that is stopped
    after its last step leaves another range, in which nothing was launched."""
    for name in _STEP_RANGES:
        steps = sum(
            bisect_left(instants, interval.start) < bisect_right(instants, interval.end)
            for interval in trace.ranges[name]
        )
        if steps:
            return steps
    return None


def _phases_ns(trace: _Trace, started: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Time by phase, of (instant, time); 0 for a phase whose ranges hold none of them. The phases
    are the ranges of that name; where a trace has none, backward is autograd's own operators, and
    optimizer the range that PyTorch sets itself."""
    intervals = {phase: trace.ranges[phase] for phase in PHASES}
    if not intervals["backward"]:
        intervals["backward"] = [
            _Interval(start, end, name, thread)
            for thread, operators in trace.operators.items()
            for start, end, name in operators
            if name.startswith(_BACKWARD_OPERATOR)
        ]
    if not intervals["optimizer"]:
        intervals["optimizer"] = trace.ranges[_OPTIMIZER_RANGE]
    ranges = Ranges(
        (one.start, one.end, phase) for phase, found in intervals.items() for one in found
    )
    sums = {phase: 0.0 for phase, found in intervals.items() if found}
    for instant, time in started:
        if phase := ranges.at(instant):
            sums[phase] += time
    return sums


def _own_times(operators: list[_Operator]) -> Iterator[tuple[float, float, str]]:
    """(start, own time, name) of each operator of one thread. Every instant is the own time of the
    last operator to start that still runs, so that it counts once however they overlap."""
    running: list[tuple[float, float, str]] = []
    own_times: list[float] = []  # of those that run, so far: until `clock`
    clock = -math.inf
    operators.sort(key=lambda operator: (operator[0], -operator[1]))
    for start, end, name in chain(operators, [(math.inf, math.inf, "")]):
        while running and running[-1][1] <= start:
            began, ended, ran = running.pop()
            own_time = own_times.pop()
            if ended > clock:
                own_time += ended - clock
                clock = ended
            yield began, own_time, ran
        if running:
            own_times[-1] += start - clock
        clock = start
        running.append((start, end, name))
        own_times.append(0.0)
