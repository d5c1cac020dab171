"""How the benchmark checks a contender, and how it times one that is correct.

The check: results and every gradient against the plain version in fp64, by relative RMS. The
allowance calibrates itself on what the plain version loses at the same precision.

The clock: events around replays of a CUDA graph that holds many calls, so that launches
from Python are not timed. The calls of a graph go round over copies of the arguments, four times as
large as the last-level cache together. All contenders take turns, so that drift hits all alike.

The host's clock: from Python's call to its return, forward and backward, without waiting for the
device, which has done all earlier work by then.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workshop.gate import plausibility
from workshop.kernels.cases import (
    BACKWARD,
    BOTH,
    COMPILED,
    FORWARD,
    OURS,
    PLAIN,
    UNITS,
    Absent,
    Case,
    Draw,
    Function,
    Tensors,
)
from workshop.results import FAIL, PASS, SKIPPED
from workshop.run import timing, trainer
from workshop.run.precision import Precision
from workshop.run.timing import StepClock

MULTIPLE = 2.0
"""How far from the truth a contender may be, in units of the plain version's own distance."""
ROUNDING_UNITS = 2.0
"""To which is added: so many roundings of one number, for what the plain version gets by luck."""
ORDER_OF_SUMS = 2.0**-20
"""And what fp32 sums of some thousand terms differ by when they are added in another order."""

CACHE_MULTIPLE = 4
MEMORY_SHARE = 0.2  # of the device, for one contender's copies and what it keeps for each
WARM_UP_CALLS = 2
SAMPLE_MS = 2.0  # what a graph's calls should last, so that its launch does not show
MAX_CALLS = 64
BUDGET_MS = 300.0  # for one contender's samples of one phase, of which slow ones take fewer
MIN_SAMPLES = 5
HOST_CALLS = 5  # of a sample: few, since the host waits once the device's queue is full

GRADIENT = "gradient of "  # and the argument's name

Outcome = dict[str, Tensor | None]
"""Results and gradients by name; None for what is missing or of another shape."""
Call = Callable[[int], object]
"""Enqueues one call on the arguments of that index."""


@dataclass(frozen=True)
class Setting:
    """What holds for all cases. `stream` is the current one, a side stream, on a GPU."""

    device: torch.device
    precision: Precision
    seed: int
    rounds: int
    stream: torch.cuda.Stream | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.precision.autocast_dtype or torch.float32


@dataclass
class Row:
    """One contender at one size. Samples in ms a call, amounts in bytes or FLOPs, by phase."""

    op: str
    size: str
    contender: str
    unit: str
    amounts: dict[str, float]
    status: str = PASS
    note: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    peak_mb: float | None = None
    """What a forward and backward pass needed at most, beyond its arguments."""
    host_us: list[float] = field(default_factory=list)
    """Samples of the host's time for a forward and backward pass, launched from Python."""

    @property
    def failed(self) -> bool:
        """Whether this is a kernel of ours that is wrong or does not run."""
        return self.contender == OURS and self.status == FAIL

    @property
    def worst(self) -> str | None:
        """The tensor that comes closest to its allowance, or exceeds it most."""
        return max(self.errors, key=self._excess, default=None)

    def _excess(self, name: str) -> float:
        excess = self.errors[name] / self.allowed[name]
        return math.inf if math.isnan(excess) else excess

    def median_ms(self, phase: str) -> float | None:
        samples = self.samples.get(phase)
        return timing.median(samples) if samples else None

    @property
    def device_us(self) -> float | None:
        """Of all phases together."""
        medians = [self.median_ms(phase) for phase in self.amounts]
        return None if None in medians else 1e3 * sum(filter(None, medians))

    @property
    def median_host_us(self) -> float | None:
        return timing.median(self.host_us) if self.host_us else None

    def rate(self, phase: str) -> float | None:
        """GB/s or TFLOP/s, as `unit` says."""
        median = self.median_ms(phase)
        return self.amounts[phase] / (median / 1e3) / UNITS[self.unit] if median else None

    def add_note(self, note: str) -> None:
        self.note = "; ".join(filter(None, (self.note, note)))


# --- one call --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """A case's arguments and the gradients of its results that come from upstream."""

    arguments: Tensors
    upstream: Tensors

    @property
    def tensors(self) -> Tensors:
        return (*self.arguments, *self.upstream)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def fresh(self) -> "Data":
        """A copy with the same strides: some contenders overwrite what they are given."""
        arguments = (_copy(tensor, tensor.requires_grad) for tensor in self.arguments)
        return Data(tuple(arguments), tuple(_copy(tensor, False) for tensor in self.upstream))

    def restore(self, original: "Data") -> None:
        """Copies the values back; unseen by autograd, which would forbid a second backward."""
        for tensor, source in zip(self.tensors, original.tensors, strict=True):
            tensor.data.copy_(source.data)

    def differs(self, original: "Data") -> bool:
        pairs = zip(self.tensors, original.tensors, strict=True)
        return any(not torch.equal(tensor, source) for tensor, source in pairs)


def _copy(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(requires_grad)


def draw_data(case: Case, setting: Setting) -> Data:
    """Random arguments and upstream gradients, those of heads laid out as the model has them."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    draw = Draw(setting.device, setting.dtype, generator)
    arguments = tuple(
        tensor.requires_grad_(wanted)
        for tensor, wanted in zip(case.draw(draw), case.differentiable, strict=True)
    )
    results = as_tuple(case.plain(*(tensor.detach().to("meta") for tensor in arguments)))
    scalar = lambda: draw.weight() * case.upstream_scale  # noqa: E731
    draws: dict[int, Callable[..., Tensor]] = {4: draw.heads, 0: scalar}
    upstream = (draws.get(like.dim(), draw.normal)(*like.shape) for like in results)
    return Data(arguments, tuple(upstream))


def as_tuple(results: Tensor | Tensors) -> Tensors:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def gradients(results: Tensors, data: Data, *, retain_graph: bool) -> tuple[Tensor | None, ...]:
    """Of the arguments that want one; None where the backward pass does not reach it."""
    wanted = [tensor for tensor in data.arguments if tensor.requires_grad]
    reached = [
        (result, upstream.to(result.dtype))
        for result, upstream in zip(results, data.upstream, strict=True)
        if result.requires_grad
    ]
    if not reached:
        return (None,) * len(wanted)
    outputs, upstreams = zip(*reached, strict=True)
    return torch.autograd.grad(
        outputs, wanted, upstreams, retain_graph=retain_graph, allow_unused=True
    )


def outcome(case: Case, function: Function, data: Data) -> Outcome:
    """Results and gradients of one call."""
    wanted = (GRADIENT + name for name in case.arguments if name not in case.constants)
    names = (*case.results, *wanted)
    results = as_tuple(function(*data.arguments))
    if [result.shape for result in results] != [upstream.shape for upstream in data.upstream]:
        return dict.fromkeys(names)
    found = gradients(results, data, retain_graph=False)
    return dict(zip(names, (*(result.detach() for result in results), *found), strict=True))


# --- the check -------------------------------------------------------------------------------


def truth_and_allowance(
    case: Case, data: Data, setting: Setting
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The plain version's outcome in fp64, and how far from it a contender may be."""
    truth = in_parts(case, data, torch.float64)
    plain = in_parts(case, data, None)
    own = {name: relative_rms(plain[name], true) for name, true in truth.items()}
    # One tensor's error may be small by luck; the typical one says what the precision costs.
    typical = timing.median(list(own.values()))
    floor = ROUNDING_UNITS * setting.precision.unit_roundoff + ORDER_OF_SUMS
    return truth, {name: MULTIPLE * max(error, typical) + floor for name, error in own.items()}


def in_parts(case: Case, data: Data, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The plain version's outcome in a floating-point type (None: the arguments' own), one part
    after the other: what is cut into parts is put together again, other gradients are summed."""
    cut = [
        tensor.tensor_split(case.parts, case.cut[name]) if name in case.cut else [tensor]
        for name, tensor in zip((*case.arguments, *case.results), data.tensors, strict=True)
    ]
    pieces: list[dict[str, Any]] = []
    for index in range(case.parts):
        own = [tensors[index % len(tensors)] for tensors in cut]
        own = [x.to(dtype) if dtype and x.is_floating_point() else x for x in own]
        arguments = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(own, case.differentiable, strict=False)
        ]
        part = Data(tuple(arguments), tuple(own[len(arguments) :]))
        pieces.append(outcome(case, case.plain, part))
    return {
        name: _join([piece[name] for piece in pieces], case.cut.get(name.removeprefix(GRADIENT)))
        for name in pieces[0]
    }


def _join(parts: list[Tensor], axis: int | None) -> Tensor:
    if axis is None:
        return torch.stack([part.double() for part in parts]).sum(0)
    return torch.cat(parts, axis)


def _peak_mb(case: Case, function: Function, data: Data) -> float | None:
    """Of a forward and backward pass that is not the first, beyond its arguments; None for the
    CPU, of which PyTorch keeps no peak."""
    if not data.arguments[0].is_cuda:
        return None
    own = data.fresh()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome(case, function, own)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def relative_rms(found: Tensor | None, true: Tensor) -> float:
    """|found - true| / |true| over all elements, in fp64; infinite where there is nothing."""
    if found is None or found.shape != true.shape:
        return math.inf
    true = true.double()
    return float((found.double() - true).norm() / true.norm())


def check(row: Row, case: Case, function: Function, data: Data, truth: dict[str, Tensor]) -> None:
    """Fills the row's status, errors and note: the reason where it is skipped or wrong."""
    own = data.fresh()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = outcome(case, function, own)
            row.peak_mb = _peak_mb(case, function, data)
        except Absent as error:
            row.status, row.note = SKIPPED, str(error)
            return
        except Exception as error:  # a rival's reasons not to run are its own
            row.status = FAIL if row.contender == OURS else SKIPPED
            row.note = _reason(error, [str(warning.message) for warning in warned])
            return
    row.errors = {name: relative_rms(found[name], true) for name, true in truth.items()}
    wrong = [name for name, error in row.errors.items() if not error <= row.allowed[name]]
    if wrong:
        row.status, row.peak_mb = FAIL, None
        row.note = ", ".join(_too_far(name, row.errors[name], row.allowed[name]) for name in wrong)
    elif own.differs(data):
        row.add_note("overwrites its arguments or the gradient that it is given")


def _too_far(name: str, error: float, allowed: float) -> str:
    if math.isinf(error):
        return f"{name} is missing or has another shape"
    return f"{name} is off by {error:.1e} of its size, allowed {allowed:.1e}"


def _reason(error: Exception, warned: list[str]) -> str:
    """Why a contender did not run, in one line. SDPA gives its reasons as warnings."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if "No available kernel" in str(error) or "No viable backend" in str(error):
        silent = ("not used because", "has been runtime disabled")
        reasons = [text for text in warned if not any(words in text for words in silent)]
        return reasons[0].split(" (Triggered")[0] if reasons else "has no kernel for this case"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


# --- a case ----------------------------------------------------------------------------------


def contenders(case: Case, setting: Setting) -> dict[str, Function]:
    everyone = {OURS: case.kernel, PLAIN: case.plain, **case.rivals}
    return everyone | {COMPILED: _compiled(case.plain, setting.device)}


def _compiled(function: Function, device: torch.device) -> Function:
    missing = "a GPU" if device.type == "cpu" else trainer.missing_for_compile(device)
    if missing:

        def absent(*_: Tensor) -> None:
            raise Absent(f"needs {missing}")

        return absent
    torch._dynamo.reset()  # each case is compiled for its own sizes
    compiled: Function = torch.compile(function, dynamic=False)
    return compiled


Timer = Callable[[Case, list[tuple[Row, Function]], Data, Setting], None]


def measure_case(case: Case, setting: Setting, timer: Timer | None) -> list[Row]:
    """A row for each contender; `timer` gets those that are right. None: nothing is timed."""
    functions = contenders(case, setting)
    amounts = case.amounts(setting.dtype.itemsize)
    rows = [Row(case.op, case.size, name, case.unit, dict(amounts)) for name in functions]
    try:
        data = draw_data(case, setting)
        truth, allowed = truth_and_allowance(case, data, setting)
    except torch.OutOfMemoryError:
        for row in rows:
            row.status, row.note = SKIPPED, "this device has no memory for the check"
        return rows
    for row in rows:
        row.allowed = dict(allowed)
        check(row, case, functions[row.contender], data, truth)
    del truth
    right = [(row, functions[row.contender]) for row in rows if row.status == PASS]
    if timer and right:
        timer(case, right, data, setting)
    return rows


# --- the clock -------------------------------------------------------------------------------


@dataclass
class Timed:
    """One contender ready to be timed in one phase: `run` enqueues `calls` calls."""

    row: Row
    run: Callable[[], object]
    calls: int
    refresh: Callable[[], None]
    """Restores the arguments. It also empties the cache of what the last contender left, and
    gives the device something to do while the host enqueues the run."""
    call: Call
    """Not called any more, but it keeps alive what a graph's replay reads."""
    clock: StepClock
    every: int = 1
    """Takes part in each so many-th round."""

    def samples(self) -> list[float]:
        """ms a call; waits for the device. The first run was the warm-up."""
        return [duration / self.calls for duration in self.clock.durations_ms()[2::2]]


def time_contenders(
    case: Case, right: list[tuple[Row, Function]], data: Data, setting: Setting
) -> None:
    """Times each phase of all contenders side by side, then the host, and fills their rows."""
    for phase in case.phases:
        _time_phase(phase, right, data, setting)  # whose graphs and copies are then freed
    _time_host(right, data, setting)


def _time_phase(
    phase: str, right: list[tuple[Row, Function]], data: Data, setting: Setting
) -> None:
    # Replays follow one another and their results are not read: the graphs share their memory.
    pool = torch.cuda.graph_pool_handle()
    timed = []
    for row, function in right:
        try:
            timed.append(_prepare(row, function, phase, data, setting, pool))
        except Exception as error:  # as in the check, but for several calls at a time
            row.add_note(f"{phase} not timed: {_reason(error, [])}")
    run_rounds(timed, setting.rounds)
    for one in timed:
        one.row.samples[phase] = one.samples()


def run_rounds(timed: list[Timed], rounds: int) -> None:
    """Enqueues all runs in turn, there and back, after a first round that is not counted."""
    for number in range(rounds + 1):
        for one in timed if number % 2 == 0 else timed[::-1]:
            if number % one.every == 0:
                one.refresh()
                one.clock.mark()
                one.run()
                one.clock.mark()


def _prepare(
    row: Row, function: Function, phase: str, data: Data, setting: Setting, pool: Any
) -> Timed:
    """Warms a contender up on its own copies of the arguments and captures its calls."""
    sets = [data.fresh() for _ in range(_copies(data, row, setting.device))]
    call = _caller(function, phase, sets)
    call_ms = _eager_ms(call, len(sets), setting.device)
    wanted = min(max(SAMPLE_MS / call_ms, 1), MAX_CALLS)
    calls = math.ceil(wanted / len(sets)) * len(sets)

    def run() -> None:
        _several(call, calls, len(sets))

    def refresh() -> None:
        for own in sets:
            own.restore(data)

    obstacle = _obstacle(call)
    graph = None if obstacle else _capture(run, setting, pool)
    if graph is None:
        row.add_note(f"{phase} timed launch by launch: {obstacle or 'no graph can be captured'}")
    samples = min(setting.rounds, max(MIN_SAMPLES, BUDGET_MS / (call_ms * calls)))
    return Timed(
        row,
        graph.replay if graph else run,
        calls,
        refresh,
        call,
        StepClock(setting.device),
        every=math.ceil(setting.rounds / samples),
    )


def _copies(data: Data, row: Row, device: torch.device) -> int:
    """Sets of arguments that together no cache holds, as far as memory allows. (A contender
    with too much memory for that overflows the cache in a single call.)"""
    properties = torch.cuda.get_device_properties(device)
    cache = float(properties.L2_cache_size)
    if torch.version.hip:  # whose properties leave out the cache between L2 and memory
        cache = plausibility.LAST_LEVEL_CACHE_BYTES
    wanted = math.ceil(CACHE_MULTIPLE * cache / data.bytes)
    one = data.bytes + 1e6 * (row.peak_mb or 0.0)
    return max(1, min(wanted, int(MEMORY_SHARE * properties.total_memory / one)))


def _caller(function: Function, phase: str, sets: list[Data]) -> Call:
    """One call of a phase, on the set of that index."""
    if phase == FORWARD:
        return lambda index: function(*sets[index].arguments)
    if phase == BACKWARD:
        # Outside the graph, but on its stream, where autograd will run the backward pass.
        results = [as_tuple(function(*own.arguments)) for own in sets]
        return lambda index: gradients(results[index], sets[index], retain_graph=True)
    return lambda index: gradients(
        as_tuple(function(*sets[index].arguments)), sets[index], retain_graph=False
    )


def _time_host(right: list[tuple[Row, Function]], data: Data, setting: Setting) -> None:
    timed = []
    for row, function in right:
        call = _caller(function, BOTH, [data.fresh()])
        try:
            _several(call, WARM_UP_CALLS, 1)
            timed.append((row, call))
        except Exception as error:  # as in the check, but for several calls at a time
            row.add_note(f"host not timed: {_reason(error, [])}")
    for number in range(setting.rounds):
        for row, call in timed if number % 2 == 0 else timed[::-1]:
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)
            start = time.perf_counter()
            _several(call, HOST_CALLS, 1)
            row.host_us.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)


def _several(call: Call, calls: int, copies: int) -> None:
    """Calls in turn on all copies. Results are kept for a turn: a call that could write to what
    the last one freed would find it in the cache."""
    kept: list[object] = [None] * copies
    for index in range(calls):
        kept[index % copies] = call(index % copies)


def _eager_ms(call: Call, copies: int, device: torch.device) -> float:
    """What a call takes launched from Python, after the first ones, which compile and allocate."""
    clock = StepClock(device)
    _several(call, WARM_UP_CALLS, copies)
    clock.mark()
    _several(call, WARM_UP_CALLS, copies)
    clock.mark()
    return clock.durations_ms()[0] / WARM_UP_CALLS


def _obstacle(call: Call) -> str:
    """Why a call can't be captured, as far as that shows without trying; empty if it does not.
    An attempt that fails leaves PyTorch's random generator unusable."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return "it waits for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _capture(run: Callable[[], None], setting: Setting, pool: Any) -> torch.cuda.CUDAGraph | None:
    """The run as a graph; None if it can't be one."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=setting.stream):
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize(setting.device)
        return None
    return graph
