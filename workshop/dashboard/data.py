"""What the page can choose from, and what a choice shows."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from workshop.compare.collection import Benchmark, Broken, Collection, Profile, StoredRun
from workshop.compare.rows import (
    Row,
    build_rows,
    ordinary,
    session_peaks,
    steady,
    trained_differently,
    variant,
)
from workshop.compare.sweep import AXES, kept_by
from workshop.profilers.names import printable
from workshop.results import RunResult
from workshop.roofline import ceilings
from workshop.roofline import inputs as roofline_inputs
from workshop.roofline.model import Roofline
from workshop.run import presets, timing
from workshop.versions import ALL, BASELINE

_AXES = {axis.field: axis for axis in AXES.values()}
SWEPT = {field: axis.words for field, axis in _AXES.items()}
"""Sizes along which runs of one version are drawn, and what they are called."""
HALF = ("bf16", "fp16")
"""What one trains in where the device can."""
_DAY = len("20261120")
"""Characters of a session's name that tell the day."""
_FOLLOWS_HIDDEN = ("hidden_dim", "intermediate_dim")
"""A sweep of the hidden dimension keeps the feed-forward layer as many times as wide."""


class Group(NamedTuple):
    """Runs that may be compared: of one device, size and precision."""

    device: str
    preset: str
    precision: str
    shape: str


@dataclass(frozen=True)
class Choice:
    """What the user chose: a group, the labels of versions, a profile's key; empty where nothing
    was chosen yet."""

    device: str = ""
    preset: str = ""
    precision: str = ""
    shape: str = ""
    versions: tuple[str, ...] = ()
    profile: str = ""

    @property
    def group(self) -> Group:
        return Group(self.device, self.preset, self.precision, self.shape)


class Snapshot:
    """All results at one time. What it derives from them it keeps, since every page asks again."""

    def __init__(self, collection: Collection) -> None:
        self.broken: list[Broken] = collection.broken
        self.profiles: dict[str, Profile] = {profile_key(p): p for p in collection.profiles}
        self.benchmarks: list[Benchmark] = collection.benchmarks
        self.folders = collection.folders
        self.groups: dict[Group, list[StoredRun]] = {}
        for stored in collection.runs:
            self.groups.setdefault(group_of(stored.run), []).append(stored)
        self._peaks = session_peaks(stored.run for stored in collection.runs)
        self._rows: dict[Group, list[Row]] = {}
        self._rooflines: dict[tuple[Path, ...], Roofline] = {}

    def rows(self, group: Group) -> list[Row]:
        """The group's rows, in the ladder's order; none for an unknown group."""
        if group not in self.groups:
            return []
        if group not in self._rows:
            runs = [stored.run for stored in self.groups[group]]
            own = self._ordinary_of(group) or runs
            self._rows[group] = build_rows(own, self._peaks)
        return self._rows[group]

    def _ordinary_of(self, group: Group) -> list[RunResult]:
        """The group's runs that are of no waterfall or sweep."""
        return ordinary(s.run for s in self.groups[group])

    def roofline(self, paths: Sequence[Path]) -> Roofline:
        """Of result files, a profile's folder or a benchmark, with all known ceilings.

        Raises:
            WorkshopError: nothing in them has a place on a roofline.
        """
        key = tuple(paths)
        if key not in self._rooflines:
            roofline = roofline_inputs.load(key)
            own = next((folder for folder in self.folders if folder in key[0].parents), None)
            ceilings.attach(roofline, folder=own)
            self._rooflines[key] = roofline
        return self._rooflines[key]

    def stored(self, group: Group, row: Row) -> list[StoredRun]:
        """The result files that a row of the group is made of."""
        return [
            stored
            for stored in self.groups[group]
            if stored.run.session == row.session and label_of(stored.run) == row.label
        ]

    def settle(
        self, choice: Choice, *, seen: Iterable[str] = (), of_its_device: bool = False
    ) -> Choice:
        """The choice, with what is not there exchanged for what is nearest.

        Args:
            seen: labels that were offered when the versions were chosen. Other labels are chosen
                if they are versions as they are by default.
            of_its_device: whether the profile must be of the chosen device.
        """
        if not self.groups:
            profile = choice.profile if choice.profile in self.profiles else ""
            return replace(choice, versions=(), profile=profile or next(iter(self.profiles), ""))
        group = max(self.groups, key=lambda group: self._nearness(group, choice.group))
        labels = [row.label for row in self.rows(group)]
        offered = set(seen)
        kept = [x for x in labels if x in choice.versions or (x not in offered and x in ALL)]
        ours = self.profiles_of(group.device)
        profiles = ours if of_its_device else ours | self.profiles
        profile = choice.profile if choice.profile in profiles else next(iter(profiles), "")
        return Choice(*group, tuple(kept), profile)

    def _nearness(self, group: Group, wanted: Group) -> tuple[object, ...]:
        """The more of the wanted group's parts it has, the first ones first; then those of whole
        versions, of the newest day, and there the one with most versions, in half precision, with
        most processes and tokens."""
        whole = self._ordinary_of(group)
        runs = [stored.run for stored in self.groups[group]]
        newest = max(run.session for run in whole or runs)
        own = [run for run in whole or runs if run.session == newest]
        versions = len({run.version for run in own if run.step_ms})
        parts = tuple(a == b for a, b in zip(group, wanted, strict=True))
        half = group.precision in HALF
        tokens = own[0].batch_size * own[0].seq_len
        day, processes = newest[:_DAY], len(own)
        return (*parts, bool(whole), day, versions, half, processes, tokens, newest)

    def profiles_of(self, device: str) -> dict[str, Profile]:
        return {key: p for key, p in self.profiles.items() if device_of(p) == device}

    def devices(self) -> list[str]:
        return sorted({group.device for group in self.groups})

    def presets(self, device: str) -> list[str]:
        found = {group.preset for group in self.groups if group.device == device}
        return sorted(found, key=lambda name: (presets.rank(name), name))

    def precisions(self, device: str, preset: str) -> list[str]:
        wanted = (device, preset)
        return sorted({group.precision for group in self.groups if group[:2] == wanted})

    def shapes(self, device: str, preset: str, precision: str) -> list[str]:
        wanted = (device, preset, precision)
        found = [group for group in self.groups if group[:3] == wanted]
        return [group.shape for group in sorted(found, key=self._tokens)]

    def _tokens(self, group: Group) -> tuple[int, int, str]:
        run = self.groups[group][0].run
        return run.batch_size * run.seq_len, run.seq_len, group.shape


class Live:
    """The newest snapshot of a collection, for any number of threads."""

    def __init__(self, collection: Collection) -> None:
        self._collection, self._lock = collection, threading.Lock()
        self._collection.refresh()
        self.snapshot, self.generation = Snapshot(collection), 1

    def refresh(self) -> int:
        """Looks for new files, unless another thread is doing so; the snapshot's number."""
        if self._lock.acquire(blocking=False):
            try:
                if self._collection.refresh():
                    self.snapshot = Snapshot(self._collection)
                    self.generation += 1
            finally:
                self._lock.release()
        return self.generation


def group_of(run: RunResult) -> Group:
    device = printable(str(run.device.get("name")))
    return Group(device, printable(run.config_name), printable(run.precision), _shape(run))


def _shape(run: RunResult) -> str:
    """As in "8 × 128"; of a model that is no preset, with its sizes."""
    shape = f"{run.batch_size} × {run.seq_len}"
    if run.config_name in presets.PRESETS:
        return shape
    c = run.config
    heads = f"{c['num_heads']}/{c['num_kv_heads']} heads"
    return (
        f"{shape}, hidden {c['hidden_dim']}, {c['num_layers']} layers, {heads}, "
        f"FFN {c['intermediate_dim']}, vocab {c['vocab_size']}"
    )


def label_of(run: RunResult) -> str:
    """Of a version with its switches, as in "v2 no-fuse-qkv"."""
    return f"{run.version} {variant(run)}".strip()


def shown_path(path: Path) -> str:
    """As the user would type it: from the current folder, if it lies there."""
    here = Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def device_of(profile: Profile) -> str:
    return printable(str((profile.run.device.get("name") if profile.run else None)
                         or profile.table.device or "unknown device"))  # fmt: skip


def profile_key(profile: Profile) -> str:
    return str(profile.folder)


def profile_name(profile: Profile) -> str:
    """Of its version, or of its folder."""
    return printable(profile.version or profile.folder.name)


def profile_label(profile: Profile) -> str:
    """As in "v1 torch.profiler (tiny fp32, AMD EPYC)"."""
    size = f"{profile.run.config_name} {profile.run.precision}, " if profile.run else ""
    return printable(f"{profile_name(profile)} {profile.tool} ({size}{device_of(profile)})")


# --- what is said of a group's rows --------------------------------------------------------------


def headline(rows: Sequence[Row]) -> str:
    """The best that was proven, in a sentence; empty if nothing was."""
    proven = [row for row in rows if row.speedup_ci and row.speedup_ci[0] > 1]
    if not proven:
        return ""
    best = max(proven, key=lambda row: row.speedup or 0.0)
    sentence = f"{best.label.upper()} is {best.verdict()} as fast as {BASELINE.upper()}"
    if best.memory_reduction:
        how = "less" if best.memory_reduction > 0 else "more"
        sentence += f", in {abs(best.memory_reduction):.0%} {how} memory"
    return f"{sentence}."


def alarms(rows: Iterable[Row]) -> list[str]:
    """What nobody may overlook: red gates, runs that failed, figures that no machine could give."""
    rows = list(rows)
    lines = [f"{row.label}: {row.note}" for row in rows if row.failed]
    return lines + [f"IMPLAUSIBLE: {sentence}" for row in rows for sentence in row.plausibility]


def doubts(rows: Iterable[Row]) -> list[str]:
    """Why a row that did not fail has no speed-up or no times."""
    return [f"{row.label}: {row.note}" for row in rows if row.note and not row.failed]


def sources(snapshot: Snapshot, group: Group, rows: Iterable[Row]) -> list[str]:
    """The files that rows are made of, a sentence for each folder of them."""
    files: dict[Path, int] = {}
    for row in rows:
        for stored in snapshot.stored(group, row):
            files[stored.path.parent] = files.get(stored.path.parent, 0) + 1
    return [
        f"From {count} result file{'s' if count > 1 else ''} in {shown_path(folder)}."
        for folder, count in files.items()
    ]


@dataclass(frozen=True)
class LossCurve:
    """The losses of one run of a row, step by step; None where one was not finite."""

    row: Row
    run: RunResult


def loss_curves(snapshot: Snapshot, group: Group, rows: Iterable[Row]) -> list[LossCurve]:
    """One a row: of its longest run."""
    curves = []
    for row in rows:
        runs = [stored.run for stored in snapshot.stored(group, row)]
        longest = max(runs, key=lambda run: len(run.losses))
        if longest.losses:
            curves.append(LossCurve(row, longest))
    return curves


def loss_difference(curves: Sequence[LossCurve]) -> str:
    """The largest difference between any two curves at the same step, in a sentence; or why there
    is none to tell of."""
    if len(curves) < 2:
        return "With two or more versions their largest difference would stand here."
    differing = " and ".join(trained_differently([curve.run for curve in curves]))
    if differing:
        return f"These runs differ in {differing}, so their losses may not be compared."
    steps = min(len(curve.run.losses) for curve in curves)
    found: list[tuple[float, int, str, str]] = []
    for step in range(steps):
        told = [(x, c.row.label) for c in curves if (x := c.run.losses[step]) is not None]
        if len(told) < len(curves):
            return f"In step {step + 1} a loss is not finite: the training diverged there."
        (low, a), (high, b) = min(told), max(told)
        found.append((high - low, step + 1, a, b))
    largest, step, a, b = max(found)
    names = f" ({a} and {b})" if largest else ""
    return (
        f"Largest difference between {len(curves)} versions over {steps} common steps: "
        f"{largest:.2g} in step {step}{names}; a loss there is {_loss(curves[0], step):.3g}."
    )


def _loss(curve: LossCurve, step: int) -> float:
    return curve.run.losses[step - 1] or 0.0


@dataclass(frozen=True)
class SweepPoint:
    """One size of a sweep: medians over all runs of its session at that size."""

    size: float
    step_ms: float
    tokens_per_s: float
    peak_mb: float | None
    proven: bool
    """Whether a run of it passed the gate."""


def sweep(snapshot: Snapshot, group: Group, label: str, axis: str) -> list[SweepPoint]:
    """The runs of a version that differ from those of a group in one size alone, by that size: of
    the newest session that has two sizes. A size where that session failed has no point.

    Over the hidden dimension those whose heads keep their size, as in compare_versions.py --sweep;
    or, if there are none, those that keep their number of heads.
    """
    points: list[SweepPoint] = []
    for alike in (_of_one_sweep, _differs_in):
        if len(points) < 2:
            points = _sweep_points(snapshot, group, label, axis, alike)
    return points


def _sweep_points(
    snapshot: Snapshot,
    group: Group,
    label: str,
    axis: str,
    alike: Callable[[RunResult, RunResult, str], bool],
) -> list[SweepPoint]:
    sample = snapshot.groups[group][0].run
    by_session: dict[str, dict[float, list[RunResult]]] = {}
    for other, stored_runs in snapshot.groups.items():
        if other.device != group.device or other.precision != group.precision:
            continue
        size = _sizes(stored_runs[0].run)[axis]
        if alike(stored_runs[0].run, sample, axis):
            for run in (s.run for s in stored_runs if label_of(s.run) == label):
                by_session.setdefault(run.session, {}).setdefault(size, []).append(run)
    told = max((name for name, sizes in by_session.items() if len(sizes) > 1), default=None)
    by_size = by_session[told] if told is not None else {}
    points = [_sweep_point(size, runs) for size, runs in sorted(by_size.items())]
    return [point for point in points if point]


def _of_one_sweep(run: RunResult, other: RunResult, axis: str) -> bool:
    return kept_by(run, _AXES[axis]) == kept_by(other, _AXES[axis])


def _differs_in(run: RunResult, other: RunResult, axis: str) -> bool:
    free = _FOLLOWS_HIDDEN if axis == "hidden_dim" else (axis,)
    one, two = _sizes(run), _sizes(other)
    if axis == "hidden_dim" and _widening(one) != _widening(two):
        return False
    return all(one[name] == two[name] for name in one if name not in free)


def _widening(sizes: dict[str, float]) -> float:
    return sizes["intermediate_dim"] / sizes["hidden_dim"]


def _sizes(run: RunResult) -> dict[str, float]:
    sizes = dict(run.config)
    sizes.pop("max_seq_len", None)  # a limit, which grows with the sequence
    return sizes | {"batch_size": run.batch_size, "seq_len": run.seq_len}


def _sweep_point(size: float, runs: list[RunResult]) -> SweepPoint | None:
    """Of one session's runs; None where nothing was timed that may be compared."""
    bad = any(run.error or run.refused for run in runs)
    timed = [run for run in runs if run.step_ms and not run.interpreted]
    if bad or not timed:
        return None
    step = timing.median([ms for run in steady(timed) for ms in run.step_ms])
    peaks = [float(run.memory_mb["peak"]) for run in timed if run.memory_mb]
    return SweepPoint(
        size=size,
        step_ms=step,
        tokens_per_s=timed[0].batch_size * timed[0].seq_len / step * 1e3,
        peak_mb=max(peaks, default=None),
        proven=any(run.parity.status == "pass" for run in timed),
    )
