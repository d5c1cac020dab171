"""The process of the implementations: it runs what the judge asks for, and has no answer that it is
compared with.

The clock: events around the replay of a CUDA graph that holds many calls, so that launches from
Python are not timed. Each call has separate arguments, four times as large as the last-level
cache together.

The host's clock: from Python's call to its return, forward and backward, without waiting for the
device, which has done all earlier work by then.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from workshop import errors, versions
from workshop.judge.pipe import Message, Pipe
from workshop.kernels.calls import (
    EXPANDED,
    GRADIENT,
    NO_GRAPH,
    Data,
    Outcome,
    Setting,
    as_tuple,
    draw_data,
    gradients,
    lay_out,
    names,
    outcome,
    sketches,
)
from workshop.kernels.cases import (
    BACKWARD,
    BOTH,
    COMPILED,
    FORWARD,
    HOST,
    MINE,
    OPS,
    OURS,
    PLAIN,
    Case,
    Function,
    Skipped,
)
from workshop.run import hardware, trainer
from workshop.run.precision import PRECISIONS
from workshop.run.timing import StepClock

CACHE_MULTIPLE = 4
MEMORY_SHARE = 0.08  # of the device, for the arguments of one implementation's calls
WARM_UP_CALLS = 2
SAMPLE_MS = 2.0  # what a graph's calls should last, so that its launch does not show
MAX_CALLS = 64
HOST_CALLS = 5  # of a sample: few, since the host waits once the device's queue is full


def main() -> int:
    return errors.exit_status(lambda: serve(Pipe.to_judge()), interrupted="interrupted")


def serve(pipe: Pipe) -> int:
    """Answers until the judge has no more questions; the exit status. Raises Closed: the judge is
    gone."""
    asked = pipe.receive().values
    device, precision = torch.device(asked["device"]), PRECISIONS[asked["precision"]]
    precision.set_matmul_mode()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with on_its_stream(stream):
        while (message := pipe.receive()).kind != "end":
            if message.kind == "case":
                setting = Setting(device, precision, stream)
                implementations = Implementations(message.values, setting)
                pipe.send("answered")
            else:
                implementations.answer(message, pipe)
    return errors.DONE


@contextlib.contextmanager
def on_its_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Everything runs on the stream on which graphs are captured: autograd's nodes stay with the
    stream of their forward pass, and a capture may not wait for another."""
    import torch._functorch.config

    # torch.compile's backward would free what it was given; we call it again and again.
    own = torch.cuda.stream(stream) if stream else contextlib.nullcontext()
    with own, torch._functorch.config.patch(donated_buffer=False):
        yield


Answer = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and values of a message."""


class Implementations:
    """All implementations of a case, which are timed in turn, so that drift hits all alike."""

    def __init__(self, asked: dict[str, Any], setting: Setting) -> None:
        self.case, self.setting = OPS[asked["op"]].make(*asked["sizes"]), setting
        self.functions = functions(self.case, setting.device, asked["mine"])
        self._mine = asked["mine"]
        self._peak_mb: dict[str, float] = {}
        self._found: Outcome = {}
        self._programs: dict[str, Program] = {}
        self._pool: Any = None
        self._release()

    def answer(self, message: Message, pipe: Pipe) -> None:
        """Answers one question, or says why an implementation does not."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                tensors, values = getattr(self, f"_{message.kind}")(**message.values)
            except Exception as error:  # another's reasons not to run are its own
                if self.setting.device.type == "cuda":
                    torch.cuda.synchronize()  # a device that is lost ends the process, here
                texts = [str(warning.message) for warning in warned]
                pipe.send("refused", why=_reason(error, texts) + self._hint(message, error))
            else:
                pipe.send("answered", tensors, **values)

    def _hint(self, message: Message, error: Exception) -> str:
        """Where a participant's file raised an error, or how its function is called."""
        if message.values.get("name") != MINE:
            return ""
        if line := versions.last_line(error, versions.mine_file(self._mine)[0]):
            return f" ({line})"
        return f"; it is called as {self.case.signature}" if isinstance(error, TypeError) else ""

    def _find_mine(self, name: str) -> Answer:
        """Imports a participant's file, which the judge never does."""
        if not callable(versions.load_mine(self._mine)[1]):
            raise errors.WorkshopError(f"{self._mine} is not a function")
        return {}, {}

    def _check_mine(self, name: str, seed: int, layout: str, precision: str) -> Answer:
        """A check of a participant's function. An earlier call had other numbers at the same
        addresses. What PyTorch allocates meanwhile holds NaN until it is written to."""
        function = self.functions[name]
        setting = dataclasses.replace(self.setting, precision=PRECISIONS[precision])
        data = lay_out(draw_data(self.case, setting, seed), layout)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            if layout != EXPANDED:  # whose upstream gradients are all one number in memory
                now, data = data, lay_out(draw_data(self.case, setting, seed + 1), layout)
                outcome(self.case, function, data)
                data.fill(now)
            before = data.fresh().tensors
            self._found = outcome(self.case, function, data)
        finally:
            torch.use_deterministic_algorithms(False)
        names = (*self.case.arguments, *(GRADIENT + result for result in self.case.results))
        pairs = zip(names, before, data.tensors, strict=True)
        return {}, {"overwritten": [name for name, old, new in pairs if not old.equal(new)]}

    def _check(self, name: str, seed: int) -> Answer:
        function, data = self.functions[name], draw_data(self.case, self.setting, seed)
        self._found = outcome(self.case, function, data.fresh())
        if self.setting.device.type == "cuda":  # PyTorch keeps no peak of a CPU
            self._peak_mb[name] = _peak_mb(self.case, function, data)
        return {}, {"peak_mb": self._peak_mb.get(name)}

    def _sketch(self, name: str, seed: int, index: int | None) -> Answer:
        """Sketches of a timed call, or of the check (None)."""
        found = self._found if index is None else self._programs[name].outputs[index]
        return sketches(found, seed), {}

    def _prepare(self, name: str, seed: int, phase: str) -> Answer:
        program = self._programs[name] = Program(
            *(self.case, self.functions[name], phase, self.setting),
            *(draw_data(self.case, self.setting, seed), self._peak_mb.get(name, 0.0), self._pool),
        )
        return {}, {"calls": len(program.sets), "note": program.note}

    def _load(self, name: str, seed: int) -> Answer:
        self._programs[name].load(draw_data(self.case, self.setting, seed))
        return {}, {}

    def _go(self, name: str) -> Answer:
        program = self._programs[name]
        return {}, {"ms": program.timed_ms(), "outlasted_ms": program.outlasted_ms}

    def _release(self) -> Answer:
        """Frees what all implementations have prepared."""
        self._found, self._programs = {}, {}
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        return {}, {}


def functions(case: Case, device: torch.device, mine: str) -> dict[str, Function]:
    """The implementations of a case by name; `mine` is a participant's function, FILE.py:NAME."""
    named = {OURS: case.kernel, MINE: case.mine(mine), PLAIN: case.plain, **case.others}
    missing = "a GPU" if device.type == "cpu" else trainer.missing_for_compile(device)

    def skipped(*_: Tensor) -> None:
        raise Skipped(f"needs {missing}")

    if missing:
        return named | {COMPILED: skipped}
    torch._dynamo.reset()  # each case is compiled for its own sizes
    return named | {COMPILED: torch.compile(case.plain, dynamic=False)}


def _peak_mb(case: Case, function: Function, data: Data) -> float:
    """The peak of a forward and backward pass that is not the first, beyond its arguments."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome(case, function, data)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _reason(error: BaseException, warned: list[str]) -> str:
    """Why an implementation did not run, in one line. SDPA gives its reasons as warnings."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, Skipped):
        return str(error)
    if "No available kernel" in str(error) or "No viable backend" in str(error):
        silent = ("not used because", "has been runtime disabled")
        reasons = [text for text in warned if not any(words in text for words in silent)]
        return reasons[0].split(" (Triggered")[0] if reasons else "has no kernel for this case"
    if isinstance(error, errors.WorkshopError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    text = lines[0]
    if type(error).__module__.startswith("triton"):  # it says where, shows the lines, says why
        text += f" {lines[-1]}"
    return f"{type(error).__name__}: {text}"[:240]


class Program:
    """One implementation in one phase, ready to be timed. Each of its calls has separate
    arguments, so that nothing that an earlier call has left serves a later one."""

    def __init__(
        self,
        case: Case,
        function: Function,
        phase: str,
        setting: Setting,
        data: Data,
        kept_mb: float,
        pool: Any,
    ) -> None:
        """
        Args:
            phase: FORWARD, BACKWARD or BOTH; HOST for one call of both, launched from Python.
            data: arguments to warm up with.
            kept_mb: what a call needs beyond its arguments.
            pool: the memory of all implementations' graphs, which are replayed one after the other.
        """
        self._case, self._function, self._setting, self._pool = case, function, setting, pool
        self._phase = BOTH if phase == HOST else phase
        self.sets, self.outputs = [data.fresh()], list[Outcome]()
        self._results: list[Any] = []
        self._begin: Callable[[], object] = self._forward
        self._run: Callable[[], object] = self._calls
        self.note, self._busy, self.outlasted_ms = "", torch.empty(0), 0.0
        call_ms = self._eager_ms()
        if phase == HOST:
            return
        self.sets = [data.fresh() for _ in range(self._number(call_ms, data, kept_mb))]
        self._begin()
        self._run()
        if obstacle := self._obstacle() or self._capture():
            self.note = f"{phase} timed launch by launch: {obstacle}"
        cache = hardware.cache_bytes(setting.device)
        self._busy = _filler(CACHE_MULTIPLE * cache, setting.device)

    def _number(self, call_ms: float, data: Data, kept_mb: float) -> int:
        """Calls of a sample: enough for it to be long, and for no cache to hold their arguments, as
        far as memory allows. (An implementation with too much memory for that overflows the cache
        in a single call.)"""
        device = self._setting.device
        long_enough = min(math.ceil(SAMPLE_MS / call_ms), MAX_CALLS)
        overflowing = math.ceil(CACHE_MULTIPLE * hardware.cache_bytes(device) / data.bytes)
        memory = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
        fitting = int(memory / (data.bytes + 1e6 * kept_mb))
        return max(1, min(max(long_enough, overflowing), fitting))

    def _forward(self) -> None:
        """The forward pass before a backward pass, outside of the clock."""
        if self._phase == BACKWARD:
            self._results = [as_tuple(self._function(*own.arguments)) for own in self.sets]

    def _calls(self) -> None:
        self.outputs = [self.call(index) for index in range(len(self.sets))]

    def call(self, index: int) -> Outcome:
        """Enqueues one call on the arguments of that index; what it gives."""
        own = self.sets[index]
        if self._phase == BOTH:
            return outcome(self._case, self._function, own)
        if self._phase == FORWARD:
            found: tuple[Tensor | None, ...] = as_tuple(self._function(*own.arguments))
        else:
            found = gradients(self._results[index], own, retain_graph=True)
        return dict(zip(names(self._case, self._phase), found, strict=True))

    def load(self, data: Data) -> None:
        """Fills the arguments of all calls; waits for the device."""
        for index, own in enumerate(self.sets):
            own.fill(data, index)
        self._begin()
        if self._setting.device.type == "cuda":
            torch.cuda.synchronize(self._setting.device)

    def timed_ms(self) -> float:
        """The time of all calls; waits for the device. It reads as much memory before as the cache
        holds, several times, which gives the device something to do while the host enqueues. In
        phase HOST, the host's time for a call."""
        timed_on_device = len(self._busy) > 0
        device = self._setting.device if timed_on_device else torch.device("cpu")
        self._busy.sum()
        return self._mean_ms(1 if timed_on_device else HOST_CALLS, device)

    def _eager_ms(self) -> float:
        """The time of a call launched from Python, after the first ones, which compile and
        allocate."""
        self._begin()
        for _ in range(WARM_UP_CALLS):
            self._run()
        return self._mean_ms(WARM_UP_CALLS, self._setting.device)

    def _mean_ms(self, runs: int, device: torch.device) -> float:
        clock = StepClock(device)
        clock.mark()
        for _ in range(runs):
            self._run()
        clock.mark()
        self.outlasted_ms = clock.outlasted_ms()
        return clock.durations_ms()[0] / runs

    def _obstacle(self) -> str:
        """Why a call can't be captured, as far as that shows without trying; empty if it does not.
        An attempt that fails leaves PyTorch's random generator unusable."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._begin()
            self.call(0)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return "it waits for the device"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    def _capture(self) -> str:
        """Makes graphs of the passes; why it can't, or nothing."""
        self._results, self.outputs = [], []  # their memory is the graphs'
        try:
            begin = self._graph(self._begin) if self._phase == BACKWARD else self._begin
            self._begin, self._run = begin, self._graph(self._run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize(self._setting.device)
            cause = error.__context__ or error  # the end of such a capture raises, too
            return f"{NO_GRAPH} ({_reason(cause, [])})"
        return ""

    def _graph(self, work: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._setting.stream):
            work()
        return graph.replay


@functools.cache
def _filler(number: int, device: torch.device) -> Tensor:
    return torch.ones(number // 4, device=device)
