"""The results that a page can show, and the choice among them."""

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from workshop import labs
from workshop.collection import Collection, Profile, StoredRun, distinct_names
from workshop.compare import rows as compared
from workshop.compare.rows import Row, variant
from workshop.labs import LabRow
from workshop.profilers.names import printable
from workshop.report import comparisons, lab_sections, studies
from workshop.report.parts import Section
from workshop.results import RunResult
from workshop.run import presets
from workshop.show import lab_table
from workshop.versions import ALL, BASELINE

_DAY = len("20261120")
"""The first characters of a session's name."""


class Group(NamedTuple):
    """Runs that may be compared: of one device, size and precision."""

    device: str
    preset: str
    precision: str
    shape: str


@dataclass(frozen=True)
class Choice:
    """Choice of the user: a group, the labels of versions, keys of a profile and of a lab's
    subject; empty where nothing was chosen yet."""

    device: str = ""
    preset: str = ""
    precision: str = ""
    shape: str = ""
    versions: tuple[str, ...] = ()
    profile: str = ""
    lab: str = ""

    @property
    def group(self) -> Group:
        return Group(self.device, self.preset, self.precision, self.shape)


class Snapshot:
    """All results at one time. It caches rows and rooflines, which every page needs."""

    def __init__(self, collection: Collection) -> None:
        self.broken = collection.broken
        self.profiles = {str(profile.folder): profile for profile in collection.profiles}
        labels = distinct_names(collection.profiles, map(_profile_label, collection.profiles))
        self.profile_labels = dict(zip(self.profiles, labels, strict=True))
        self.kernels = collection.kernels
        self.folders = collection.folders
        self.runs = len(collection.runs) + len(collection.lab_runs)
        self.groups: dict[Group, list[StoredRun]] = {}
        for stored in collection.runs:
            self.groups.setdefault(group_of(stored.run), []).append(stored)
        self._lab_files = {id(stored.run): stored for stored in collection.lab_runs}
        self._peaks = compared.session_peaks(stored.run for stored in collection.runs)
        self._rows: dict[Group, list[Row]] = {}
        self.views: dict[tuple[str, Choice], list[Any]] = {}
        """The blocks that were made, by view and choice."""

    def rows(self, group: Group) -> list[Row]:
        """The group's rows, in the ladder's order; none for an unknown group."""
        if group not in self._rows:
            runs = compared.preferred(stored.run for stored in self.groups.get(group, ()))
            self._rows[group] = compared.build_rows(runs, self._peaks)
        return self._rows[group]

    def chosen(self, choice: Choice) -> list[Row]:
        return [row for row in self.rows(choice.group) if row.label in choice.versions]

    def stored(self, group: Group, row: Row) -> list[StoredRun]:
        """The result files that a row of the group is made of."""
        return [
            stored
            for stored in self.groups[group]
            if stored.run.session == row.session and label_of(stored.run) == row.label
        ]

    @functools.cached_property
    def labs(self) -> dict[str, list[LabRow]]:
        """The rows of the newest session of each lab, subject, precision and device, by title."""
        found = labs.newest(stored.run for stored in self._lab_files.values())
        return {lab_table.title(rows): rows for rows in found}

    def lab_section(self, title: str) -> Section:
        """One of `labs`, as the report has it."""
        return lab_sections.section("lab", self.labs[title], self._lab_files)

    def reported(self, choice: Choice) -> comparisons.Group:
        """The chosen rows, as the report has them."""
        rows = self.chosen(choice)
        return comparisons.Group("size", rows, [self.stored(choice.group, row) for row in rows])

    def studies(self, kind: str, device: str) -> list[Section]:
        """The sections of the waterfalls or sweeps on a device.

        Args:
            kind: "waterfall" or "sweep".
        """
        return [
            section
            for name, section in self._studies
            if printable(name) == device and section.anchor.startswith(kind)
        ]

    @functools.cached_property
    def _studies(self) -> list[tuple[str, Section]]:
        of_studies, _ = studies.split([run for own in self.groups.values() for run in own])
        return studies.build(of_studies)[0]

    def settle(
        self, choice: Choice, *, seen: Iterable[str] = (), of_its_device: bool = False
    ) -> Choice:
        """The choice, with what is not there exchanged for what is nearest.

        Args:
            seen: labels that were offered when the versions were chosen. Other labels are chosen
                if they are versions as they are by default.
            of_its_device: whether the profile must be of the chosen device.
        """
        lab = choice.lab
        if lab not in self.labs:
            firsts = {key: rows[0].first for key, rows in self.labs.items()}
            newest = lambda key: (firsts[key].lab != labs.KERNELS, firsts[key].session)  # noqa: E731
            lab = max(firsts, key=newest, default="")
        if not self.groups:
            profile = choice.profile if choice.profile in self.profiles else ""
            profile = profile or next(iter(self.profiles), "")
            return replace(choice, versions=(), profile=profile, lab=lab)
        group = max(self.groups, key=lambda group: self._nearness(group, choice.group))
        labels = [row.label for row in self.rows(group)]
        offered = set(seen)
        kept = [x for x in labels if x in choice.versions or (x not in offered and x in ALL)]
        ours = self.profiles_of(group.device)
        profiles = ours if of_its_device else ours | self.profiles
        profile = choice.profile if choice.profile in profiles else next(iter(profiles), "")
        return Choice(*group, tuple(kept), profile, lab)

    def _nearness(self, group: Group, wanted: Group) -> tuple[object, ...]:
        """The more of the wanted group's parts it has, the first ones first; then those of whole
        versions, of the newest day, and there the one whose fullest session has most versions, in
        half precision, with most processes and tokens."""
        sessions = defaultdict(list)
        for run in compared.preferred(stored.run for stored in self.groups[group]):
            sessions[run.session].append(run)
        day = max(sessions)[:_DAY]
        versions, processes, newest = max(
            (len({run.version for run in own if run.step_ms}), len(own), session)
            for session, own in sessions.items()
            if session[:_DAY] == day
        )
        own = sessions[newest]
        whole = bool(compared.ordinary(own))
        parts = tuple(a == b for a, b in zip(group, wanted, strict=True))
        half = group.precision in ("bf16", "fp16")  # what one trains in, if the device can
        tokens = own[0].batch_size * own[0].seq_len
        return (*parts, whole, day, versions, half, processes, tokens, newest)

    def profiles_of(self, device: str) -> dict[str, Profile]:
        return {key: p for key, p in self.profiles.items() if printable(p.device) == device}

    def sizes(self) -> list[Group]:
        """All groups, the small ones of a device first."""

        def order(group: Group) -> tuple[object, ...]:
            run = self.groups[group][0].run
            preset = (presets.rank(group.preset), group.preset)
            return group.device, preset, group.precision, run.batch_size * run.seq_len, run.seq_len

        return sorted(self.groups, key=order)

    def offered(self, field: str, choice: Choice) -> list[str]:
        """The values of a field of Group, for what was chosen in the fields before it."""
        depth = Group._fields.index(field)
        before = choice.group[:depth]
        found = (group[depth] for group in self.sizes() if group[:depth] == before)
        return list(dict.fromkeys(found))


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
    """The name of a version with its switches, as in "v2 no-fuse-qkv"."""
    return f"{run.version} {variant(run)}".strip()


def shown_path(path: Path) -> str:
    """As the user would type it: from the current folder, if it lies there."""
    here = Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _profile_label(profile: Profile) -> str:
    """As in "v1 torch.profiler (tiny fp32, AMD EPYC)"."""
    name, size = profile.name, ""
    if profile.run:
        size = f"{compared.size_name(profile.run)} {profile.run.precision}, "
    if profile.lab:
        name = profile.lab.lab
        size = f"{profile.lab.subject}, {profile.lab.variant}, "
    return printable(f"{name} {profile.tool} ({size}{profile.device})")


# --- a group's rows in words ---------------------------------------------------------------------


def headline(rows: Sequence[Row]) -> str:
    """The best that was proven, in a sentence; empty if nothing was."""
    proven = [row for row in rows if row.speedup_ci and row.speedup_ci[0] > 1]
    if not proven:
        return ""
    best = max(proven, key=lambda row: row.speedup or 0.0)
    sentence = f"{best.label.upper()} is {best.speedup_text()} as fast as {BASELINE.upper()}"
    if best.memory_reduction:
        how = "less" if best.memory_reduction > 0 else "more"
        sentence += f", in {abs(best.memory_reduction):.0%} {how} memory"
    return f"{sentence}."


def alarms(rows: Iterable[Row]) -> list[str]:
    """Checks and runs that failed, and implausible numbers."""
    rows = list(rows)
    lines = [f"{row.label}: {row.note}" for row in rows if row.failed]
    return lines + [f"IMPLAUSIBLE: {sentence}" for row in rows for sentence in row.plausibility]


def doubts(rows: Iterable[Row]) -> list[str]:
    """Why a row that did not fail has no speed-up or no times."""
    return [f"{row.label}: {row.note}" for row in rows if row.note and not row.failed]


def sources(snapshot: Snapshot, group: Group, rows: Iterable[Row]) -> list[str]:
    """The files that rows are made of, a sentence for each folder of them."""
    paths = (s.path for row in rows for s in snapshot.stored(group, row))
    files = Counter(path.parent for path in dict.fromkeys(paths))
    return [
        f"From {count} result file{'s' if count > 1 else ''} in {shown_path(folder)}."
        for folder, count in files.items()
    ]
