"""From V1 to a faster version, one change at a time: the rungs, their runs, and what each saves.

Each rung is a command line of a version, so that the code that runs really changes; its result
files record the switches, and from these alone the waterfall is built again.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workshop.compare import rows, runner
from workshop.compare.rows import Row
from workshop.compare.runner import Asked, Options, Planned, VersionPlan
from workshop.errors import WorkshopError, printable
from workshop.results import Kind, RunResult
from workshop.run import interpreter, presets, timing, trainer
from workshop.run.precision import FLOAT8
from workshop.versions import BASELINE, VERSIONS

KIND: Kind = "waterfall rung"
TARGETS = tuple(key for key, version in reversed(VERSIONS.items()) if version.rungs)
Requested = Sequence[tuple[str, str]]
"""Versions at the end of a waterfall, each with a precision."""
FULL = "fp32"
"""The precision of the first rung."""
HALF = ("bf16", "fp16")
PRECISIONS = (FULL, "tf32", *HALF, *FLOAT8)
NEEDS_GPU = "a graph needs a GPU"
CANT_COMPILE = "torch.compile can't run here"
NOT_RUN = "not run"


def switches(key: str) -> list[str]:
    """A version's switches, in the order in which the waterfalls switch them on."""
    rungs = [rung for version in VERSIONS.values() for rung in version.rungs]
    found = (what for code, what, _ in rungs if code == key and what.startswith("fuse_"))
    return list(dict.fromkeys(found))


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
        """Its differences from its version's defaults, as a result file records them."""
        version = VERSIONS[self.version]
        options: dict[str, str | bool] = {}
        if self.off:
            options = {name: name not in self.off for name in switches(self.version)}
        if self.compile != version.compile:
            options["compile"] = self.compile
        if self.cuda_graph != (version.cuda_graph and on_gpu):
            options["cuda_graph"] = self.cuda_graph
        return options

    def ran(self, run: RunResult) -> bool:
        """Whether the run is one of this rung."""
        version, options = VERSIONS[self.version], run.options
        on_gpu = run.device.get("type") == "cuda"
        off = frozenset(n for n, on in options.items() if n.startswith("fuse_") and not on)
        graph = options.get("cuda_graph", version.cuda_graph and on_gpu and not run.interpreted)
        return (
            (run.version, run.precision, off) == (self.version, self.precision, self.off)
            and options.get("compile", version.compile) == self.compile
            and graph == self.cuda_graph
        )


def rungs(to: str, precision: str, *, on_gpu: bool, compiles: bool) -> list[Rung]:
    """The rungs from V1 at fp32 to a version as it is, in order; fp8 comes last, after bf16.

    Args:
        to: one of TARGETS.
        compiles: whether torch.compile can run; a version runs without it where it can't.
    """
    if precision in FLOAT8:
        found = rungs(to, "bf16", on_gpu=on_gpu, compiles=compiles)
        fp8 = dataclasses.replace(
            found[-1], title=f"linear layers in {precision}", precision=precision,
            cuda_graph=found[-1].cuda_graph and on_gpu, needs="",
        )  # fmt: skip
        return [*found, fp8]
    found = [Rung("V1, plain", BASELINE, FULL)]
    if precision != FULL:
        found.append(Rung(precision, BASELINE, precision))
    if precision in HALF:  # V2 differs from V1 there with all of its switches off
        title, off = f"RoPE tables in {precision}", frozenset(switches("v2"))
        found.append(Rung(title, "v2", precision, off))
    last = found[-1]
    for key, what, title in VERSIONS[to].rungs:
        if key != last.version:
            last = Rung(title, key, precision, frozenset(switches(key)))
        rung = dataclasses.replace(last, title=title, off=last.off - {what})
        if what == "compile" and compiles:
            rung = dataclasses.replace(rung, compile=VERSIONS[key].compile)
        elif what == "compile":
            rung = dataclasses.replace(rung, needs=CANT_COMPILE)
        elif what == "cuda_graph":
            needs = "" if on_gpu else NEEDS_GPU
            rung = dataclasses.replace(rung, cuda_graph=True, needs=needs)
        found.append(rung)
        last = dataclasses.replace(rung, cuda_graph=rung.cuda_graph and on_gpu, needs="")
    return found


# --- running -------------------------------------------------------------------------------------


def targets(requested: Sequence[str], on_gpu: bool) -> list[str]:
    """The versions at the end of a waterfall: the requested ones, else all; but V3 only where its
    kernels are compiled, since the interpreter takes minutes. Raises WorkshopError: a version that
    has no waterfall."""
    for key in requested:
        if key not in TARGETS:
            raise WorkshopError(f"--waterfall {key}: choose from {', '.join(TARGETS)}")
    all_here = [key for key in TARGETS if on_gpu or not VERSIONS[key].triton]
    return list(dict.fromkeys(requested)) or all_here


def plan(asked: Asked, ends: Sequence[str]) -> tuple[Planned, Requested]:
    """The processes of the waterfalls that end at these versions, and what they are. Raises
    WorkshopError: an invalid version, preset, precision, device or count."""
    if asked.versions is not None:
        raise WorkshopError("--versions: name a waterfall's end after --waterfall, as in v3")
    device, configs, precisions = runner.check(asked)
    on_gpu, compiles = device.type == "cuda", trainer.missing_for_compile(device) is None
    requested = list(itertools.product(targets(ends, on_gpu), precisions))
    found = dict.fromkeys(
        rung
        for to, precision in requested
        for rung in rungs(to, precision, on_gpu=on_gpu, compiles=compiles)
    )
    plans: list[VersionPlan] = []
    for config in configs:
        own = [
            VersionPlan(
                rung.version,
                config,
                rung.precision,
                kind=KIND,
                interpreted=interpreter.serves(VERSIONS[rung.version], device),
                options=rung.options(on_gpu),
                name=rung.title,
            )
            for rung in found
            if not rung.needs
        ]
        plans += runner.alternate(own, asked.repeats)
    skipped = dict.fromkeys(f"{r.version}, {r.title}: skipped: {r.needs}" for r in found if r.needs)
    return Planned.of(plans, skipped), requested


# --- from results --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A rung as it was measured. `row` is None where it was not run; `note` says why it has no
    time.

    `saved_ms` and `gain` are against the last rung with a time, whose title is `before`;
    `row.speedup` is against V1 at fp32.
    """

    rung: Rung
    row: Row | None
    note: str = ""
    before: str | None = None
    saved_ms: float | None = None
    gain: timing.Ratio | None = None

    @property
    def timed(self) -> bool:
        """Whether its time may be shown: it passed the gate, and no interpreter ran it."""
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
    def rows(self) -> list[Row]:
        return [step.row for step in self.steps if step.row]

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    def includes(self, run: RunResult) -> bool:
        own = (self.config, self.batch_size, self.seq_len, self.device, self.session)
        return run.kind == KIND and _names(run) == own


def _names(run: RunResult) -> tuple[str, int, int, str, str]:
    size = (run.config_name, run.batch_size, run.seq_len)
    return (*size, str(run.device.get("name")), run.session)


def build(runs: Iterable[RunResult], requested: Requested | None = None) -> list[Waterfall]:
    """The waterfalls that the runs hold: of each size, device, version and precision the newest
    session's.

    Args:
        requested: build these, even if few of their rungs were run. None builds those of which a
            rung of their own was run; else the first of TARGETS, if a shared rung was.
    """
    built = []
    by_size = rows.grouped((run for run in runs if run.kind == KIND), rows.size_of)
    for its in by_size.values():
        by_session = rows.grouped(its, lambda run: run.session)
        ends = {session: _ends(own) for session, own in by_session.items()}
        for end in requested or itertools.product(TARGETS, PRECISIONS):
            found = [session for session in by_session if requested or end in ends[session]]
            if found:
                newest = max(found, key=lambda session: (ends[session].get(end, False), session))
                own = by_session[newest]
                steps, (to, precision) = _steps(_gather(*end, own)), end
                built.append(Waterfall(to, precision, *_names(own[0]), steps))
    return sorted(built, key=lambda one: (one.device, presets.rank(one.config)))


def _ends(runs: Sequence[RunResult]) -> dict[tuple[str, str], bool]:
    """The versions and precisions at the ends of a session's waterfalls, and for each whether rungs
    of its own were run."""
    ends: dict[tuple[str, str], bool] = {}
    for precision in PRECISIONS:
        # All of fp8's rungs but the last are bf16's, and say nothing of it.
        ran = {
            to: {
                rung
                for rung, own in _gather(to, precision, runs)
                if own and rung.precision == precision
            }
            for to in TARGETS
        }
        shared = set.intersection(*ran.values())
        own = {(to, precision): True for to in TARGETS if ran[to] - shared}
        begun = any(not rung.is_first for rung in shared)
        ends |= own or ({(TARGETS[0], precision): False} if begun else {})
    return ends


def _gather(
    to: str, precision: str, runs: Sequence[RunResult]
) -> list[tuple[Rung, list[RunResult]]]:
    """The rungs of a waterfall, each with its runs."""
    # Where it can't be compiled, the last rung isn't; before that was run, nothing says that.
    mode = VERSIONS[to].compile
    modes = {
        run.options.get("compile", mode)
        for run in runs
        if run.version == to and all(run.options.get(name, True) for name in switches(to))
    }
    compiles = mode in modes or not modes
    on_gpu = runs[0].device.get("type") == "cuda"
    return [
        (rung, [run for run in runs if not rung.needs and rung.ran(run)])
        for rung in rungs(to, precision, on_gpu=on_gpu, compiles=compiles)
    ]


def _steps(by_rung: list[tuple[Rung, list[RunResult]]]) -> list[Step]:
    baseline = by_rung[0][1]
    steps: list[Step] = []
    last: tuple[str, float, list[list[float]]] | None = None
    for rung, runs in by_rung:
        if not runs:
            steps.append(Step(rung, None, rung.needs or NOT_RUN))
            continue
        row = rows.build_row(runs, baseline)
        step = Step(rung, row, row.note)
        ms = step.step_ms
        if ms is not None:
            times = [run.step_ms for run in rows.steady(runs) if run.step_ms]
            if last is not None:
                before, before_ms, before_times = last
                gain = timing.speedup(before_times, times)
                step = Step(rung, row, row.note, before, before_ms - ms, gain)
            last = rung.title, ms, times
        steps.append(step)
    return steps
