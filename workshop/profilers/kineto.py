"""The table of a torch.profiler trace, on NVIDIA, on AMD and without a GPU.

A kernel belongs to the phase (forward, backward, optimizer) in which the host launched it: the GPU
runs it later, often when the host is in the next phase. Autograd launches the backward pass from a
thread of its own, while the thread that holds the range "backward" waits; so a launch's phase is
found by its time on the host, on any thread.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from workshop.profilers import step_time
from workshop.profilers import trace as traces
from workshop.profilers.categories import categorize, on_tensor_cores
from workshop.profilers.step_time import Span
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
from workshop.profilers.trace import NO_CORRELATION, ON_GPU, Event, Trace, Track, recognises_json

__all__ = ["read", "read_communication", "recognises_json"]

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


def read(path: Path) -> KernelTable:
    """The table of a trace: of GPU kernels, or where no GPU was traced, of the host's operators
    with the time that each spent outside the operators it called.

    Args:
        path: a .json or .json.gz, or a folder with such (the newest counts).

    Raises:
        WorkshopError: it can't be read, is no trace, or has neither kernels nor operators.
    """
    trace, problems = traces.read(path)
    run = _Run(trace)
    loading = _loading(run)  # while what the GPU was still busy with is there
    leftovers = run.drop_before_steps()
    table = _table(run)
    if not table.kernels:
        raise problems.error("kernels and no operators")
    table.loading = loading
    table.step_times = _step_times(run, _step_spans(run, leftovers))
    table.steps = len(table.step_times) or None
    if leftovers:
        trace.warnings.append(
            f"{trace.path}: left out {len(leftovers):,} kernels and copies that were launched "
            "before the trace's first step"
        )
    table.warnings += trace.warnings + problems.warnings()
    return table


def read_communication(path: Path) -> list[step_time.Communication]:
    """The time of each step in which the busiest GPU runs kernels of NCCL or RCCL, or without a GPU
    the process sends and receives through gloo. As `read`."""
    run = _Run(traces.read(path)[0])
    spans = _step_spans(run, run.drop_before_steps())
    if not run.devices:
        operators = chain.from_iterable(run.operators.values())
        idle = ("communication", "other")
        work = [one[:2] for one in operators if categorize(one.name) not in idle]
        gloo = (one for one in run.trace.of(traces.ANNOTATION) if one.name.startswith(_TRANSFER))
        return step_time.communication([one[:2] for one in gloo], work, spans)
    parts: dict[bool, list[Span]] = {True: [], False: []}
    for one in run.busiest():
        parts[categorize(one.name) == "communication"].append(one[:2])
    return step_time.communication(parts[True], parts[False], spans)


class _Run:
    """A trace's events, by the part that they have in training.

    Attributes:
        devices: what ran on each GPU, by its number.
        calls: of the runtime's functions.
        launches: when the host launched, by the correlation that it shares with what it launched.
        ranges: the annotations by name, without the number or the class that PyTorch adds.
        operators: the host's, by thread.
        steps: the ranges of steps, by their start; none where none are marked.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.devices: defaultdict[int, list[Event]] = defaultdict(list)
        for event in trace.of(*ON_GPU):
            self.devices[event.device].append(event)
        self.calls = list(trace.of(*traces.CALLS))
        self.launches: dict[int, float] = {}
        for call in self.calls:
            self.launches.setdefault(call.correlation, call.start)
        self.launches.pop(NO_CORRELATION, None)
        self.ranges: defaultdict[str, list[Event]] = defaultdict(list)
        for event in trace.of(traces.ANNOTATION):
            self.ranges[event.name.partition("#")[0]].append(event)
        self.operators: defaultdict[Track, list[Event]] = defaultdict(list)
        for event in trace.of(traces.OPERATOR):
            self.operators[event.track].append(event)
        self.steps = sorted(next((self.ranges[n] for n in _STEP_RANGES if n in self.ranges), []))

    def busiest(self) -> list[Event]:
        """Events of the GPU that worked longest; none without a GPU."""
        return max(self.devices.values(), key=lambda ran: sum(one.ns for one in ran), default=[])

    def drop_before_steps(self) -> list[Event]:
        """Drops what the host called and launched before the first step, if there are steps; its
        kernels and copies. A profiler that starts while the GPU lags behind records the end of
        the warm-up, which may run far into the first step.

        Launches before the trace began are not in it, but correlations count up."""
        if not self.steps:
            return []
        begin = self.steps[0].start
        in_steps = (number for number, start in self.launches.items() if start >= begin)
        lowest = min(in_steps, default=NO_CORRELATION)

        def is_of_steps(event: Event) -> bool:
            if event.correlation in self.launches:
                return self.launches[event.correlation] >= begin
            launched_earlier = NO_CORRELATION < event.correlation < lowest
            return event.start >= begin and not launched_earlier

        ran = list(chain.from_iterable(self.devices.values()))
        self.devices.clear()
        for event in filter(is_of_steps, ran):
            self.devices[event.device].append(event)
        self.calls = [call for call in self.calls if call.start >= begin]
        return [event for event in ran if not is_of_steps(event)]

    def waits(self) -> list[Event]:
        """Waits for data of the thread that has the steps; without steps, of the process's main
        one. Of waits within each other the outermost."""
        found: list[Event] = []
        for one in sorted(self.ranges[_LOADER_RANGE], key=lambda one: (one.start, -one.end)):
            process, thread = one.track
            is_main = one.track == self.steps[0].track if self.steps else process == thread
            if is_main and (not found or one.start >= found[-1].end):
                found.append(one)
        return found


# --- the table -----------------------------------------------------------------------------------


def _table(run: _Run) -> KernelTable:
    sums, started = Sums(), []  # (when on the host, how long it took)
    for device, ran in run.devices.items():
        for one in ran:
            category = traces.category(one.name, one.kind)
            sums.add(
                one.name,
                one.ns,
                start_ns=one.start,
                bytes=one.bytes,
                occupancy_ns=None if one.occupancy is None else one.occupancy * one.ns,
                category=category,
                device=device,
            )
            if one.correlation in run.launches:
                started.append((run.launches[one.correlation], one.ns))
    for operators in [] if run.devices else run.operators.values():
        for start, own_time, name in _own_times(operators):
            sums.add(name, own_time)
            started.append((start, own_time))
    table = KernelTable(run.trace.path, "torch.profiler", sums.kernels())
    table.phases_ns = _phases_ns(run, started)
    for call in run.calls:
        total = table.host_calls.setdefault(call.name, HostCall())
        total.calls += 1
        total.total_ns += call.ns
    if not run.devices:
        table.what = "operator"
    else:
        busiest = sums.busiest()
        table.device = run.trace.device_name(busiest if isinstance(busiest, int) else 0)
        table.timeline = sums.timeline()
    doubts = [*sums.warnings(), *_doubts(run, table, len(started))]
    table.warnings += [f"{table.path}: {doubt}" for doubt in doubts]
    return table


def _doubts(run: _Run, table: KernelTable, started: int) -> Iterator[str]:
    if not run.devices and any("Launch" in call.name for call in run.calls):
        yield (
            "the host launched kernels, but none is in the trace, so these are the host's "
            "operators; was the GPU traced, and the trace written to its end?"
        )
    orphans = table.launches - started
    if run.devices and orphans and table.phases_ns:
        yield (
            f"{orphans:,} of {table.launches:,} kernels and copies have no launch in the trace, so "
            "that they are in no phase"
        )


def _phases_ns(run: _Run, started: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Time by phase, of (instant, time); 0 for a phase whose ranges hold none of them. The phases
    are the ranges of that name; where a trace has none, backward is autograd's own operators, and
    optimizer the range that PyTorch sets itself."""
    found = {phase: run.ranges[phase] for phase in PHASES}
    operators = chain.from_iterable(run.operators.values())
    if not found["backward"]:
        found["backward"] = [one for one in operators if one.name.startswith(_BACKWARD_OPERATOR)]
    if not found["optimizer"]:
        found["optimizer"] = run.ranges[_OPTIMIZER_RANGE]
    ranges = Ranges((one.start, one.end, phase) for phase in PHASES for one in found[phase])
    sums = {phase: 0.0 for phase in PHASES if found[phase]}
    for instant, time in started:
        if phase := ranges.at(instant):
            sums[phase] += time
    return sums


def _own_times(operators: list[Event]) -> Iterator[tuple[float, float, str]]:
    """(start, own time, name) of each operator of one thread. Every instant is the own time of the
    last operator to start that still runs, so that it counts once however they overlap."""
    running: list[tuple[float, float, str]] = []
    own_times: list[float] = []  # of those that run, so far: until `clock`
    clock = -math.inf
    ordered = sorted((one[:3] for one in operators), key=lambda one: (one[0], -one[1]))
    for start, end, name in chain(ordered, [(math.inf, math.inf, "")]):
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


# --- waiting for data ----------------------------------------------------------------------------


def _loading(run: _Run) -> Loading | None:
    """The waits for data of the thread that trains."""
    waits = run.waits()
    last = _last_between(run, waits)
    begin = run.steps[0].start if run.steps else -math.inf
    end = max((step.end for step in run.steps if step.start <= last), default=last)
    waits = [wait for wait in waits if begin <= wait.start < end]
    wait_ns, idle_ns = _covered(waits), None
    if not wait_ns:
        return None
    if ran := run.busiest():
        idle_ns = _covered([*ran, *waits]) - _covered(ran)
    in_thread = _covered(wait for wait in waits if _WITHOUT_WORKERS in wait.name)
    span_ns = end - (begin if run.steps else waits[0].start)
    return Loading(span_ns, wait_ns, len(waits), in_thread > wait_ns / 2, idle_ns)


def _last_between(run: _Run, waits: list[Event]) -> float:
    """When the last of what a thread ran between its waits was launched, or ended. A wait after
    that brings no batch: it is for the end of the workers."""
    waiting = Ranges(wait[:3] for wait in waits)
    operators = chain.from_iterable(run.operators[track] for track in {w.track for w in waits})
    ended = (one.end for one in operators if not waiting.at(one.start))
    launched = (start for start in run.launches.values() if not waiting.at(start))
    return max(chain(ended, launched), default=-math.inf)


def _covered(events: Iterable[Event]) -> float:
    """The time within at least one of them."""
    line = timeline(one[:2] for one in events)
    return line.busy_ns if line else 0.0


# --- the time of steps ---------------------------------------------------------------------------


def _step_spans(run: _Run, leftovers: list[Event]) -> list[Span]:
    """Each step from the end of the one before it to that of its range or of the last thing
    launched in it, so that a GPU that lags behind the host counts; the first from the start of its
    range. Steps after the last that launched or ran anything outside of the DataLoader are left
    out: a profiler that is stopped after its last step leaves another range.

    Args:
        leftovers: what was launched before the first step, and dropped.
    """
    ran, steps = run.busiest(), run.steps
    launches = [run.launches.get(one.correlation, -math.inf) for one in ran]
    if steps:
        waiting = Ranges(wait[:3] for wait in run.waits())
        ended = (one.end for one in run.operators[steps[0].track] if not waiting.at(one.end))
        last = max(chain(launches, ended), default=-math.inf)
        steps = [step for step in steps if step.start <= last]
    starts, ends = [step.start for step in steps], [step.end for step in steps]
    for one, launched in zip(ran, launches, strict=True):
        if (index := bisect_right(starts, launched) - 1) >= 0:
            ends[index] = max(ends[index], one.end)
    spans = []
    begin = max([*starts[:1], *(one.end for one in leftovers)], default=0.0)
    for end in ends:
        if end > begin:
            spans.append((begin, end))
            begin = end
    return spans


def _step_times(run: _Run, spans: list[Span]) -> list[step_time.StepTime]:
    """The times of steps, by what ran on the thread that has them, on those that run operators, and
    on the busiest GPU. (A thread that pins memory only calls the runtime.)"""
    if not spans:
        return []
    active: defaultdict[str, list[Span]] = defaultdict(list)
    active[step_time.LOADING] = [wait[:2] for wait in run.waits()]
    with_operators = {track for track, operators in run.operators.items() if operators}
    for call in run.calls:
        if call.track == run.steps[0].track or call.track in with_operators:
            active[step_time.RUNTIME].append(call[:2])
    for one in chain.from_iterable(run.operators.values()):
        active[step_time.CPU].append(one[:2])
    on_tensor = {name: on_tensor_cores(name) for name in {one.name for one in run.busiest()}}
    for one in run.busiest():
        kernel = step_time.TENSOR if on_tensor[one.name] else step_time.KERNEL
        active[kernel if one.kind == "kernel" else step_time.COPY].append(one[:2])
    return step_time.divide(active, spans)
