"""Cost as work grows: every version over a range of one size, up to where its memory ends.

The end is found, not crashed into: from a version's peaks at smaller sizes the next one's is
predicted, and it is tried only if it may fit. A run that is out of memory all the same is recorded
as such, and ends that version's curve.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from workshop import versions
from workshop.compare import rows, runner
from workshop.compare.rows import Row
from workshop.compare.runner import Asked, Planned, VersionPlan
from workshop.errors import NotOnThisMachine, WorkshopError, printable
from workshop.results import MODEL_SIZES, MOST, Kind, RunResult, model_sizes
from workshop.run import flops, hardware, interpreter, presets
from workshop.run.memory import MB
from workshop.run.presets import PRESETS, ROPE_ROWS, Preset

KIND: Kind = "sweep point"


@dataclass(frozen=True)
class Axis:
    """A size that grows."""

    flag: str
    """As in `--sweep FLAG`."""
    field: str
    """Field of a result: `batch_size`, `seq_len`, or one of its config."""
    words: str
    degree: int
    """Memory is a polynomial of this degree: V1's scores grow with the square of the sequence,
    weights with that of the hidden dimension."""
    least: int = 1

    @property
    def keeps_model(self) -> bool:
        return self.field in ("batch_size", "seq_len")


AXES = {
    axis.flag: axis
    for axis in (
        Axis("seq-len", "seq_len", "sequence length", degree=2, least=2),
        Axis("batch-size", "batch_size", "batch size", degree=1),
        Axis("hidden-dim", "hidden_dim", "hidden dimension", degree=2),
        Axis("num-layers", "num_layers", "number of layers", degree=1),
    )
}
ELLIPSIS = "..."
LEEWAY = {"cuda": 1.1, "cpu": 0.8}
"""By device, the share of the free memory that the predicted peak of a size may take: a GPU that
runs out of memory reports it, a CPU's process is killed."""
_MOST_SIZE = 2**31
_OUT_OF_MEMORY = ("out of memory", "SIGKILL")


# --- the axis and its sizes ----------------------------------------------------------------------


def parse(words: Sequence[str]) -> tuple[Axis, list[int]]:
    """`seq-len 128 256 512`, or `seq-len 128 ... 8192`, where each is twice the one before. Raises
    WorkshopError: no such axis, or an invalid size."""
    flag, *numbers = words
    if flag not in AXES:
        raise WorkshopError(f"--sweep {flag}: choose from {', '.join(AXES)}")
    axis = AXES[flag]
    sizes: list[int] = []
    for index, word in enumerate(numbers):
        if word != ELLIPSIS:
            sizes.append(_size(axis, word))
        elif not sizes or index + 1 == len(numbers):
            raise WorkshopError(f"--sweep {flag}: {ELLIPSIS} goes between two sizes")
        else:
            end = _size(axis, numbers[index + 1])
            if end <= sizes[-1]:
                words = f"{sizes[-1]} {ELLIPSIS} {end}"
                raise WorkshopError(f"--sweep {flag} {words}: the second size must be the larger")
            while 2 * sizes[-1] < end:
                sizes.append(2 * sizes[-1])
    return axis, sorted(set(sizes))


def _size(axis: Axis, word: str) -> int:
    # The length is looked at first: Python refuses to read a number of thousands of digits.
    if not re.fullmatch(r"[0-9]{1,10}", word) or not axis.least <= int(word) <= _MOST_SIZE:
        bounds = f"from {axis.least} on, up to {_MOST_SIZE:,}"
        raise WorkshopError(f"--sweep {axis.flag} {word:.20}: a size is a whole number {bounds}")
    return int(word)


def sizes_at(axis: Axis, size: int, preset: Preset) -> dict[str, int]:
    """The differences from the preset at one point of a sweep. Raises WorkshopError: a hidden
    dimension that is no multiple of two of the preset's heads."""
    if axis.field == "seq_len" and size > ROPE_ROWS:
        return {"seq_len": size, "max_seq_len": size}
    if axis.field != "hidden_dim":
        return {axis.field: size}
    pair = 2 * preset.hidden_dim // preset.num_heads
    if size % pair:
        raise WorkshopError(
            f"--sweep {axis.flag} {size}: it must be a multiple of {pair}, since heads keep the "
            f"preset's {pair // 2} and two of them share one of k and v"
        )
    heads = 2 * size // pair
    return {"hidden_dim": size, "intermediate_dim": 4 * size, "num_heads": heads,
            "num_kv_heads": heads // 2}  # fmt: skip


def size_of(run: RunResult, axis: Axis) -> float:
    """Size of a run along the axis."""
    return float(run.config.get(axis.field) or getattr(run, axis.field))


Kept = tuple[tuple[str, float], ...]
"""All sizes but the one that grows, by name; over the hidden dimension the heads' size, not their
number."""


def _kept(axis: Axis, model: Mapping[str, float], batch: RunResult | Preset) -> Kept:
    sizes = {name: float(model[name]) for name in MODEL_SIZES}
    sizes |= {"batch_size": batch.batch_size, "seq_len": batch.seq_len}
    if axis.field == "hidden_dim":
        for name in ("num_heads", "num_kv_heads", "intermediate_dim"):
            sizes[name] /= sizes["hidden_dim"]
    del sizes[axis.field]
    return tuple(sizes.items())


def _kept_by(run: RunResult, axis: Axis) -> Kept:
    return _kept(axis, run.config, run)


def _kept_by_preset(preset: Preset, axis: Axis) -> Kept:
    return _kept(axis, preset.model(), preset)


# --- running -------------------------------------------------------------------------------------


def plan(asked: Asked, words: Sequence[str], session: str) -> Planned:
    """The processes of the sweep that `words` name.

    Raises:
        WorkshopError: an invalid version, preset, precision, device, size or count.
        NotOnThisMachine: all of the versions would be interpreted.
    """
    device, configs, precisions = runner.check(asked)
    axis, sizes = parse(words)
    if len(sizes) < 2:
        raise WorkshopError(f"--sweep {axis.flag}: give two sizes or more")
    if asked.jobs and asked.jobs > 1:
        raise WorkshopError("--jobs: no more than 1 with --sweep, where a size may fill the memory")
    wanted = versions.baseline_first(asked.versions or versions.available())
    slow = [key for key in wanted if interpreter.serves(versions.get_version(key), device)]
    keys = [key for key in wanted if key not in slow]
    if not keys:
        raise NotOnThisMachine(f"--sweep: {', '.join(slow)} can only be interpreted here")
    for config, size in itertools.product(configs, sizes):
        sizes_at(axis, size, presets.get_preset(config))
    skipped = [f"{key}: skipped: interpreted, it has no times to compare" for key in slow]
    free = hardware.free_memory_bytes(device)

    def plans() -> Iterator[VersionPlan]:
        for config, precision in itertools.product(configs, precisions):
            kept = _kept_by_preset(presets.get_preset(config), axis)
            left = keys
            for size in sizes:
                runs = [
                    run
                    for run in runner.load_session(asked.output_dir, session)
                    if run.precision == precision and _kept_by(run, axis) == kept
                ]
                ended = {run.version for run in runs if out_of_memory(run)}
                own = [
                    _at(
                        axis,
                        size,
                        VersionPlan(key, config, precision, kind=KIND),
                        runs,
                        device,
                        free,
                    )
                    for key in left
                    if key not in ended
                ]
                left = [plan.version for plan in own if not plan.skipped]
                yield from runner.alternate(own, asked.repeats)

    total = len(configs) * len(precisions) * len(sizes) * len(keys) * asked.repeats
    return Planned(plans(), keys, total, skipped)


def _at(
    axis: Axis,
    size: int,
    plan: VersionPlan,
    runs: list[RunResult],
    device: torch.device,
    free_bytes: int | None,
) -> VersionPlan:
    """The plan at one size; skipped if the smaller sizes' runs predict that it can't fit."""
    changes = sizes_at(axis, size, presets.get_preset(plan.config))
    plan = dataclasses.replace(plan, sizes=changes, name=f"{axis.flag} {size}")
    peaks = peaks_mb([run for run in runs if run.version == plan.version], axis)
    predicted_mb = predict(peaks, size, axis.degree, upwards=device.type == "cpu")
    free_mb = math.inf if free_bytes is None else free_bytes / MB
    if predicted_mb is None or predicted_mb <= LEEWAY[device.type] * free_mb:
        return plan
    why = f"not tried: predicted to take {predicted_mb:,.0f} MB of {free_mb:,.0f} MB free"
    prediction = {"predicted_mb": predicted_mb, "free_mb": free_mb}
    return dataclasses.replace(plan, skipped=why, prediction=prediction)


# --- memory --------------------------------------------------------------------------------------


def out_of_memory(run: RunResult) -> bool:
    """Whether a run was out of memory: it reported so, or was killed by the system."""
    return run.status == "failed" and any(words in (run.error or "") for words in _OUT_OF_MEMORY)


def peaks_mb(runs: Sequence[RunResult], axis: Axis) -> dict[float, float]:
    """The highest peak of each size, in MB, smallest size first. Where the axis keeps the model,
    size 0 comes first, with what does not grow: weights, gradients, moments."""
    peaks: dict[float, float] = {}
    for run in runs:
        if run.memory_mb:
            size = size_of(run, axis)
            peaks[size] = max(peaks.get(size, 0.0), float(run.memory_mb["peak"]))
    if peaks and axis.keeps_model:
        parameters = flops.parameter_count(model_sizes(runs[0].config))
        peaks[0.0] = flops.ADAMW_STATE_BYTES_PER_PARAMETER * parameters / MB
    return dict(sorted(peaks.items()))


def predict(
    peaks: Mapping[float, float], size: float, degree: int, *, upwards: bool = False
) -> float | None:
    """The peak at a larger size, in MB: the polynomial of `degree` through the last sizes, or a
    lower one where that would fall or they are too few; from one alone, its share. None if there
    is nothing to go by.

    Args:
        peaks: by size, smallest first, as `peaks_mb` gives them.
        upwards: with fewer sizes than the polynomial needs, assume that all memory grows with its
            highest power.
    """
    points = list(peaks.items())
    if not points:
        return None
    last, peak = points[-1]
    if upwards and sum(size > 0 for size in peaks) <= degree:
        return peak * (size / last) ** degree
    if len(points) == 1:
        return peak * size / last
    for used in range(min(degree + 1, len(points)), 1, -1):
        value = _through(points[-used:], size)
        if value >= peak:
            return value
    return peak


def _through(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value of the polynomial through the points (Lagrange's form)."""
    total = 0.0
    for i, (x, y) in enumerate(points):
        others = [other for j, (other, _) in enumerate(points) if j != i]
        for other in others:
            y *= (at - other) / (x - other)
        total += y
    return total


def size_that_fills(peaks: Mapping[float, float], free_mb: float, degree: int) -> float | None:
    """The size at which the prediction reaches `free_mb`; None where no two peaks were measured,
    or it is a thousand times the largest size."""
    if sum(size > 0 for size in peaks) < 2:
        return None
    low, high = max(peaks), 1024 * max(peaks)
    for _ in range(60):
        middle = (low + high) / 2
        predicted = predict(peaks, middle, degree)
        low, high = (middle, high) if predicted is None or predicted < free_mb else (low, middle)
    return None if high == 1024 * max(peaks) else low


# --- from results --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A version at one size. `predicted_mb` and `free_mb` are set if it was not tried."""

    size: int
    row: Row
    out_of_memory: bool
    predicted_mb: float | None = None
    free_mb: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it failed for another reason than memory, whose end is a result of the sweep."""
        return self.row.failed and not self.out_of_memory

    @property
    def ran(self) -> bool:
        return self.row.status in ("timed", "interpreted")

    @property
    def beyond_memory(self) -> bool:
        """Whether it was out of memory, or not tried because of that."""
        return self.out_of_memory or self.predicted_mb is not None


@dataclass(frozen=True)
class Curve:
    """A version over all sizes.

    `fits` is the largest size that ran, `measured_limit` the size at which a run was out of memory,
    `predicted_limit` the one that was not tried, `predicted_end` where the prediction fills the
    memory, if that is before the two; None without such a size.
    """

    version: str
    label: str
    points: list[Point]
    fits: int | None
    measured_limit: int | None
    predicted_limit: int | None
    predicted_end: float | None


@dataclass(frozen=True)
class Sweep:
    """All versions over one size, with all else fixed, of one session."""

    axis: str
    config: str
    precision: str
    device: str
    session: str
    memory_mb: float | None
    """Memory of the device, if known."""
    curves: list[Curve] = field(default_factory=list)

    @property
    def title(self) -> str:
        words = AXES[self.axis].words
        return printable(f"{words.capitalize()}, {self.config}, {self.precision}, {self.device}")

    @property
    def failed(self) -> bool:
        return any(point.failed for curve in self.curves for point in curve.points)

    @property
    def rows(self) -> list[Row]:
        return [point.row for curve in self.curves for point in curve.points]

    def includes(self, run: RunResult) -> bool:
        own = (self.axis, self.config, self.precision, self.device, self.session)
        return run.kind == KIND and _names(AXES[self.axis], run) == own


def build(
    runs: Sequence[RunResult], axis: Axis, *, sizes: Sequence[int] = (), least: int = 2
) -> list[Sweep]:
    """The sweeps over an axis that the runs hold: of each device, precision and fixed sizes the
    newest session's.

    Args:
        sizes: use these only; none for all.
        least: a sweep has at least this many sizes.
    """
    by_kind = rows.grouped(
        (run for run in runs if run.kind == KIND and (not sizes or size_of(run, axis) in sizes)),
        lambda run: (str(run.device.get("name")), run.precision, _kept_by(run, axis)),
    )
    sweeps = []
    for its in by_kind.values():
        by_session = sorted(rows.grouped(its, lambda run: run.session).items())
        found = [own for _, own in by_session if len({size_of(run, axis) for run in own}) >= least]
        sweeps += [_build(axis, own) for own in found[-1:]]
    return sorted(sweeps, key=lambda sweep: (sweep.device, sweep.config, sweep.precision))


def _build(axis: Axis, runs: list[RunResult]) -> Sweep:
    by_curve = rows.grouped(runs, lambda run: (run.version, rows.variant(run)))
    baseline = by_curve.get((versions.BASELINE, ""), [])
    memory = runs[0].device.get("memory_gb")
    memory_mb = float(memory) * 1e3 if isinstance(memory, (int, float)) else None
    keys = sorted(by_curve, key=lambda key: (list(versions.ALL).index(key[0]), key[1]))
    curves = [_curve(axis, by_curve[key], baseline, memory_mb) for key in keys]
    return Sweep(*_names(axis, runs[0]), memory_mb, curves)


def _names(axis: Axis, run: RunResult) -> tuple[str, str, str, str, str]:
    """The axis, the preset whose sizes are kept along it, precision, device and session."""
    kept = _kept_by(run, axis)
    found = (name for name, preset in PRESETS.items() if _kept_by_preset(preset, axis) == kept)
    place = str(run.device.get("name")), run.session
    return (axis.flag, next(found, "custom"), run.precision, *place)


def _curve(
    axis: Axis, runs: list[RunResult], baseline: list[RunResult], memory_mb: float | None
) -> Curve:
    points = []
    for size, own in sorted(rows.grouped(runs, lambda run: size_of(run, axis)).items()):
        amounts = [own[0].options.get(name) for name in ("predicted_mb", "free_mb")]
        numbers = [float(mb) for mb in amounts if isinstance(mb, (int, float)) and 0 <= mb <= MOST]
        prediction = numbers if len(numbers) == 2 else ()
        row = rows.build_row(own, [run for run in baseline if size_of(run, axis) == size])
        points.append(Point(int(size), row, any(map(out_of_memory, own)), *prediction))
    beyond = [point.size for point in points if point.out_of_memory]
    not_tried = [point for point in points if point.predicted_mb is not None]
    free_mb = next((point.free_mb for point in not_tried), memory_mb)
    end = size_that_fills(peaks_mb(runs, axis), free_mb, axis.degree) if free_mb else None
    # The prediction of what was skipped was more cautious than that of the end.
    limits = [*beyond, *(point.size for point in not_tried)]
    return Curve(
        version=runs[0].version,
        label=printable(points[0].row.label),
        points=points,
        fits=max((point.size for point in points if point.ran), default=None),
        measured_limit=min(beyond, default=None),
        predicted_limit=min((point.size for point in not_tried), default=None),
        predicted_end=end if end is not None and end < min(limits, default=math.inf) else None,
    )
