"""From V1 to a faster version, one change at a time: the rungs, their runs, and what each saves.

Each rung is a command line of a version, so that the code that runs really changes; its result
files record the switches, and from these alone the waterfall is built again.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workshop.compare import comparison, sessions
from workshop.compare.comparison import Row
from workshop.compare.sessions import Options, Plan
from workshop.errors import WorkshopError, printable
from workshop.results import RunResult
from workshop.run import hardware, interpreter, presets, timing, trainer
from workshop.run.precision import get_precision
from workshop.versions import BASELINE, VERSIONS, get_version

TARGETS = ("v4", "v3")
Asked = Sequence[tuple[str, str]]
"""Versions at the end of a waterfall, each with a precision."""
FULL = "fp32"
"""The precision of the first rung."""
HALF = ("bf16", "fp16")
PRECISIONS = (FULL, "tf32", *HALF)
SHARED = (("fuse_qkv", "fused QKV"), ("fuse_gate_up", "fused gate-up"))
"""V2's switches for the weights that V2 and V3 stack alike."""
LIBRARY = (
    ("fuse_norm", "F.rms_norm"),
    ("fuse_attention", "SDPA"),
    ("fuse_gqa", "native GQA"),
    ("fuse_optimizer", "fused AdamW"),
)
"""V2's other switches."""
OPTIMIZER = (("fuse_optimizer", "AdamW kernel"),)
KERNELS = (
    ("fuse_norm", "RMSNorm kernel"),
    ("fuse_swiglu", "SwiGLU kernel"),
    ("fuse_attention", "RoPE + attention"),
    ("fuse_embedding", "embedding kernel"),
    ("fuse_loss", "linear + loss kernel"),
    ("fuse_linear", "fp32 weight grads"),
)
"""V3's switches. The optimizer's comes first: with PyTorch's, a step at fp16 can't be captured. And
the graph is captured before the other kernels, which the host would else be too slow to launch: at
any size that a kernel saves time at, their worth would be lost in that."""
SWITCHES = {"v2": SHARED + LIBRARY, "v3": OPTIMIZER + KERNELS}
NEEDS_GPU = "a graph needs a GPU"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Rung:
    """One configuration of a version, which differs from the rung before it in what `title` names.

    `needs` says why this machine can't run it; empty where it can.
    """

    title: str
    version: str
    precision: str
    off: frozenset[str] = frozenset()
    compile: str = "none"
    cuda_graph: bool = False
    needs: str = ""

    @property
    def is_first(self) -> bool:
        return (self.version, self.precision) == (BASELINE, FULL)

    def options(self, on_gpu: bool) -> Options:
        """What of it differs from its version's defaults, as a result file records it."""
        version = VERSIONS[self.version]
        options: dict[str, str | bool] = {}
        if self.off:
            options = {name: name not in self.off for name, _ in SWITCHES[self.version]}
        if self.compile != version.compile:
            options["compile"] = self.compile
        if self.cuda_graph != (version.cuda_graph and on_gpu):
            options["cuda_graph"] = self.cuda_graph
        return options

    def ran(self, run: RunResult) -> bool:
        """Whether the run is one of this rung."""
        version, options = VERSIONS[self.version], run.options
        on_gpu = run.device.get("type") == "cuda"
        switches = {name: on for name, on in options.items() if name.startswith("fuse_")}
        off = frozenset(name for name, on in switches.items() if not on)
        graph = options.get("cuda_graph", version.cuda_graph and on_gpu and not run.interpreted)
        return (
            (run.version, run.precision, off) == (self.version, self.precision, self.off)
            and options.get("compile", version.compile) == self.compile
            and graph == self.cuda_graph
        )


def rungs(to: str, precision: str, *, on_gpu: bool, compiles: bool) -> list[Rung]:
    """The rungs from V1 at fp32 to a version as it is, in order.

    Args:
        to: one of TARGETS.
        compiles: whether torch.compile can run; a version runs without it where it can't.
    """
    found = [Rung("V1, plain", BASELINE, FULL)]
    if precision != FULL:
        found.append(Rung(precision, BASELINE, precision))
    if precision in HALF:  # V2 differs from V1 there with all of its switches off
        off = frozenset(name for name, _ in SHARED + LIBRARY)
        found.append(Rung(f"RoPE tables in {precision}", "v2", precision, off))
    shared = _switch_on("v2", precision, SHARED, LIBRARY)
    if to == "v4":
        found += [*shared, *_switch_on("v2", precision, LIBRARY)]
        found.append(Rung("V4's code, eager", "v4", precision))
    else:
        off = frozenset(name for name, _ in OPTIMIZER + KERNELS)
        found += [*shared, Rung("V3's code, no kernel", "v3", precision, off)]
        found += _switch_on("v3", precision, OPTIMIZER, KERNELS)
    found += _executed(found[-1], on_gpu=on_gpu, compiles=compiles)
    if to == "v3":
        found += _switch_on("v3", precision, KERNELS, cuda_graph=on_gpu)
    return found


def _switch_on(
    version: str,
    precision: str,
    switches: tuple[tuple[str, str], ...],
    later: tuple[tuple[str, str], ...] = (),
    *,
    cuda_graph: bool = False,
) -> list[Rung]:
    """One switch more a rung; those of `later` stay off."""
    names = [name for name, _ in switches + later]
    return [
        Rung(title, version, precision, frozenset(names[index + 1 :]), cuda_graph=cuda_graph)
        for index, (_, title) in enumerate(switches)
    ]


def _executed(last: Rung, *, on_gpu: bool, compiles: bool) -> list[Rung]:
    """What a version asks of the harness by default."""
    version, found = VERSIONS[last.version], []
    mode = version.compile if compiles else "none"
    if version.compile != "none":
        needs = "" if compiles else "torch.compile can't run here"
        found.append(Rung("torch.compile", last.version, last.precision, compile=mode, needs=needs))
    if version.cuda_graph:
        needs = "" if on_gpu else NEEDS_GPU
        graph = dataclasses.replace(last, title="graph", compile=mode, cuda_graph=True, needs=needs)
        found.append(graph)
    return found


# --- running -------------------------------------------------------------------------------------


def targets(asked: Sequence[str] | None, on_gpu: bool) -> list[str]:
    """The versions at whose end a waterfall stands: those asked for, else all; but V3 only where
    its kernels are compiled, since the interpreter takes minutes.

    Raises:
        WorkshopError: a version that has no waterfall.
    """
    if not asked:
        return [key for key in TARGETS if on_gpu or not VERSIONS[key].triton]
    for key in asked:
        if key not in TARGETS:
            raise WorkshopError(f"--waterfall {key}: choose from {', '.join(TARGETS)}")
    return [get_version(key).key for key in dict.fromkeys(asked)]


@dataclass(frozen=True)
class Climb:
    """What is to be run: the waterfalls that were asked for, their processes in an alternating
    order, and what is left out, in sentences."""

    asked: Asked
    plans: list[Plan]
    left_out: list[str]


def plan(arguments: argparse.Namespace) -> Climb:
    """Turns compare_versions.py's arguments into processes.

    Raises:
        WorkshopError: a version, preset, precision, device or count that can't be.
    """
    sessions.check_counts(arguments)
    device = hardware.get_device(arguments.device)
    on_gpu, compiles = device.type == "cuda", trainer.missing_for_compile(device) is None
    names = [get_precision(name, device).name for name in arguments.precision]
    asked = list(itertools.product(targets(arguments.waterfall, on_gpu), dict.fromkeys(names)))
    found = dict.fromkeys(
        rung for to, name in asked for rung in rungs(to, name, on_gpu=on_gpu, compiles=compiles)
    )
    plans: list[Plan] = []
    for config in dict.fromkeys(arguments.config or [presets.default_preset(device.type)]):
        presets.get_preset(config)
        own = [_plan(rung, config, device) for rung in found if not rung.needs]
        plans += sessions.alternate(own, arguments.repeats)
    left_out = {f"{r.version}, {r.title}: left out: {r.needs}": None for r in found if r.needs}
    return Climb(asked, plans, list(left_out))


def _plan(rung: Rung, config: str, device: torch.device) -> Plan:
    return Plan(
        rung.version,
        config,
        rung.precision,
        repeat=0,
        interpreted=interpreter.serves(VERSIONS[rung.version], device),
        options=rung.options(device.type == "cuda"),
        name=rung.title,
    )


# --- from results --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A rung as it was measured. `row` is None where it was not run; `note` says why it has no
    time.

    `before` is the title of the last rung with a time, against which `saved_ms`, `gain` and
    `gain_ci` are; `row.speedup` is against V1 at fp32. `gain_ci` is None if one process ran either.
    """

    rung: Rung
    row: Row | None
    note: str = ""
    before: str | None = None
    saved_ms: float | None = None
    gain: float | None = None
    gain_ci: tuple[float, float] | None = None

    @property
    def timed(self) -> bool:
        """Whether its time may be shown: its gate is green, and no interpreter ran it."""
        return self.row is not None and self.row.step_ms is not None and self.row.parity == "pass"

    @property
    def step_ms(self) -> float | None:
        return self.row.step_ms if self.timed and self.row else None


@dataclass(frozen=True)
class Waterfall:
    """The steps from V1 to a version at one size, precision and device, of one session."""

    to: str
    precision: str
    config: str
    batch_size: int
    seq_len: int
    device: str
    session: str
    steps: list[Step] = field(default_factory=list)

    @property
    def title(self) -> str:
        size = f"{self.config}: {self.batch_size} x {self.seq_len} tokens"
        where = f"{self.precision}, {self.device}"
        return printable(f"From V1 to {self.to.upper()}, {size}, {where}")

    @property
    def failed(self) -> bool:
        return any(step.row is not None and step.row.failed for step in self.steps)


@dataclass(frozen=True)
class Found:
    """The runs of one session and size, as the rungs of a waterfall that they may be."""

    to: str
    precision: str
    runs: list[RunResult]
    by_rung: list[tuple[Rung, list[RunResult]]]

    @property
    def is_one(self) -> bool:
        """Whether V1 was run, and a rung that stands in this waterfall alone and in no comparison
        of whole versions."""
        return self._begins and not all(map(_is_shared, self._switched))

    @property
    def may_be_one(self) -> bool:
        """Whether V1 was run and a rung that all share: the beginning of one that was cut off."""
        return self.to == TARGETS[0] and self._begins and bool(self._switched)

    @property
    def _begins(self) -> bool:
        return bool(self.by_rung[0][1])

    @property
    def _switched(self) -> list[Rung]:
        """The rungs that were run with a part switched off. Others may be whole versions: without
        a compiler V4 runs as its eager rung does."""
        return [rung for rung, own in self.by_rung if own and rung.off]


def build(runs: Sequence[RunResult], asked: Asked | None = None) -> list[Waterfall]:
    """The waterfalls that the runs hold: of each size, device, version and precision the newest
    session's.

    Args:
        asked: which of them; these are built however little of them was run. None takes those of
            which V1 at fp32 and a rung of their own was run; or, of a size without any, that to V4
            if a rung that all share was.
    """
    return [_build(found) for found in find(runs, asked)]


def find(runs: Sequence[RunResult], asked: Asked | None = None) -> list[Found]:
    """What `build` makes its waterfalls of."""
    by_size: dict[tuple[object, ...], dict[str, list[RunResult]]] = {}
    for run in runs:
        by_size.setdefault(_size(run), {}).setdefault(run.session, []).append(run)
    chosen = []
    for own in by_size.values():
        made = [
            [_gather(to, precision, own[session]) for session in sorted(own)]
            for to, precision in asked or itertools.product(TARGETS, PRECISIONS)
        ]
        told = [[one for one in by_session if asked or one.is_one] for by_session in made]
        if not any(told):
            told = [[one for one in by_session if one.may_be_one] for by_session in made]
        chosen += [by_session[-1] for by_session in told if by_session]
    return chosen


def _is_shared(rung: Rung) -> bool:
    """Whether it stands in all waterfalls."""
    library = {name for name, _ in LIBRARY}
    return rung.version == BASELINE or (rung.version == "v2" and library <= rung.off)


def _size(run: RunResult) -> tuple[object, ...]:
    sizes = tuple(sorted(run.config.items()))
    return (str(run.device.get("name")), sizes, run.batch_size, run.seq_len)


def _gather(to: str, precision: str, runs: list[RunResult]) -> Found:
    mode = VERSIONS[to].compile
    compiles = mode == "none" or any(
        run.version == to and run.options.get("compile", mode) == mode for run in runs
    )
    on_gpu = runs[0].device.get("type") == "cuda"
    by_rung = [
        (rung, [run for run in runs if not rung.needs and rung.ran(run)])
        for rung in rungs(to, precision, on_gpu=on_gpu, compiles=compiles)
    ]
    return Found(to, precision, runs, by_rung)


def _build(found: Found) -> Waterfall:
    first = found.runs[0]
    return Waterfall(
        to=found.to,
        precision=found.precision,
        config=first.config_name,
        batch_size=first.batch_size,
        seq_len=first.seq_len,
        device=str(first.device.get("name")),
        session=first.session,
        steps=_steps(found.by_rung),
    )


def _steps(by_rung: list[tuple[Rung, list[RunResult]]]) -> list[Step]:
    baseline = by_rung[0][1]
    steps: list[Step] = []
    before: tuple[Step, list[RunResult]] | None = None
    for rung, runs in by_rung:
        step = _step(rung, runs, baseline, before)
        steps.append(step)
        if step.timed:
            before = step, runs
    return steps


def _step(
    rung: Rung,
    runs: list[RunResult],
    baseline: list[RunResult],
    before: tuple[Step, list[RunResult]] | None,
) -> Step:
    if not runs:
        return Step(rung, None, rung.needs or NOT_RUN)
    row = comparison.build_row(runs, baseline)
    step = Step(rung, row, row.note)
    if before is None or not step.timed:
        return step
    ratio = timing.speedup(_times(before[1]), _times(runs))
    last = before[0]
    assert last.step_ms is not None and step.step_ms is not None
    return Step(
        rung,
        row,
        row.note,
        before=last.rung.title,
        saved_ms=last.step_ms - step.step_ms,
        gain=ratio.value,
        gain_ci=ratio.interval,
    )


def _times(runs: list[RunResult]) -> list[list[float]]:
    return [run.step_ms for run in comparison.steady(runs) if run.step_ms]
