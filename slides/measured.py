"""The results that slides show, and which files they are from.

What a slide asks for is noted until `begin` is called for the next one, so that its notes can name
every file. What was not measured raises NotMeasured, with the command that measures it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop import labs
from workshop.collection import Collection, Profile, StoredRun
from workshop.compare import waterfall
from workshop.compare.rows import Row
from workshop.compare.waterfall import Waterfall
from workshop.errors import WorkshopError, printable
from workshop.labs import LabRow
from workshop.show import ladders
from workshop.show.ladders import Group
from workshop.versions import ALL, BASELINE, VERSIONS

SIZES, PRECISION = ("small", "medium"), "bf16"
"""The sizes that the decks show; where a size was not measured, another one."""


class NotMeasured(WorkshopError):
    """No result file has it."""

    def __init__(self, what: str, command: str) -> None:
        super().__init__(f"not measured: {what}: {command}")
        self.what, self.command = what, command


@dataclass(frozen=True)
class Ladder:
    """The versions and peers at one size, V1 among them, each with a time."""

    group: Group
    rows: dict[str, Row]

    @property
    def first(self) -> Row:
        return self.rows[BASELINE]

    @property
    def versions(self) -> list[Row]:
        return [row for key, row in self.rows.items() if key in VERSIONS]

    def stored(self, rows: Iterable[Row]) -> list[StoredRun]:
        wanted = {id(row) for row in rows}
        return [one for row, its in self.group.pairs() if id(row) in wanted for one in its]


class Measured:
    """All results below some folders, of the device that ran last where there are several."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.all = Collection(folders)
        self.all.refresh()
        for broken in self.all.broken:
            raise WorkshopError(broken.reason)
        groups = ladders.ladders(self.all.runs)
        found = [one for group in groups if (one := _ladder(group))]
        self.ladders = [one for one in found if one.first.device == found[0].first.device]
        self.begin()

    def begin(self) -> None:
        """Forgets what the last slide used."""
        self.files: list[Path] = []
        self.sources: list[str] = []

    def use(self, files: Iterable[Path], source: str = "") -> None:
        """Notes files, and what the line at the bottom of the slide says of them."""
        self.files += files
        self.sources += [printable(source)] if source else []

    def use_runs(self, stored: Sequence[StoredRun]) -> None:
        """With a source as "small, bf16, 8 x 128 tokens, NVIDIA H200, commit b6083d2"."""
        runs = [one.run for one in stored]
        sizes = {f"{run.batch_size} x {run.seq_len} tokens" for run in runs}
        words = [runs[0].config_name, *sorted({run.precision for run in runs})]
        words += sizes if len(sizes) == 1 else []
        commits = sorted({run.git_commit[:7] for run in runs if run.git_commit})
        words += [str(runs[0].device.get("name")), f"commit {', '.join(commits) or 'unknown'}"]
        self.use([one.path for one in stored], ", ".join(words))

    def ladder(self, size: str) -> Ladder:
        """The rows of one of SIZES."""
        by_size = {(one.first.config, one.first.precision): one for one in self.ladders}
        named = {config: by_size.pop((config, PRECISION), None) for config in SIZES}
        others = iter(by_size.values())
        chosen = {config: one or next(others, None) for config, one in named.items()}[size]
        if chosen is None:
            command = f'make compare ARGS="--config {size} --precision {PRECISION}"'
            raise NotMeasured(f"the versions at {size}, or another size", command)
        self.use_runs(chosen.stored(chosen.rows.values()))
        return chosen

    def fall(self, to: str, size: str) -> Waterfall:
        """The waterfall to a version, at one of SIZES or else at another."""
        found = waterfall.build([one.run for one in self.all.runs])
        found = [one for one in found if one.to == to and one.steps[-1].timed]
        found.sort(key=lambda one: one.config != size)
        if not found:
            command = f"compare_versions.py --waterfall {to} --config {size}"
            raise NotMeasured(f"one change at a time to {to.upper()}", command)
        own = [one for one in self.all.runs if found[0].includes(one.run)]
        rungs = [step.rung for step in found[0].steps]
        self.use_runs([one for one in own if any(rung.ran(one.run) for rung in rungs)])
        return found[0]

    def profiles(self, tool: str) -> dict[str, Profile]:
        """By version, of one tool and device."""
        by_device: dict[tuple[bool, str], dict[str, Profile]] = {}
        for one in self.all.profiles:
            if one.tool == tool and one.version in VERSIONS and one.run:
                # A GPU's tell more: a CPU's have operators in the place of kernels.
                key = (one.table.what != "kernel", one.device)
                by_device.setdefault(key, {})[one.version] = one
        found = next((its for _, its in sorted(by_device.items()) if len(its) > 1), {})
        if BASELINE not in found or not (run := found[BASELINE].run):
            raise NotMeasured(f"profiles of several versions by {tool}", "make profile")
        size = f"{run.config_name}, {run.config['num_layers']} layers, {run.precision}"
        files = [one.folder / "kernels.json" for one in found.values()]
        self.use(files, f"{tool}, {size}, {found[BASELINE].device}")
        return {key: found[key] for key in VERSIONS if key in found}

    def lab(self, lab: str, subject: str = "") -> list[LabRow]:
        """The timed rows of a subject's newest session in a lab that has a baseline; of another
        subject if that was not measured.
        """
        subjects: dict[str, list[LabRow]] = {}
        for group in labs.newest(one.run for one in self.all.lab_runs if one.run.lab == lab):
            for row in group:
                if row.first.baseline and row.times:
                    subjects.setdefault(row.first.subject, []).append(row)
        compared = {key: its for key, its in subjects.items() if any(row.speedup for row in its)}
        rows = compared.get(subject) or next(iter(compared.values()), None)
        if not rows:
            raise NotMeasured(f"the lab {lab}", f"see labs/{lab}/README.md")
        used = {id(run) for row in rows for run in row.runs}
        files = [one.path for one in self.all.lab_runs if id(one.run) in used]
        self.use(files, f"{rows[0].first.subject}, {rows[0].device}")
        return rows


def _ladder(group: Group) -> Ladder | None:
    """None where V1 has no time, or nothing else has one."""
    rows = {row.version: row for row in group.rows if not row.variant and row.step_ms}
    shown = {key: rows[key] for key in ALL if key in rows}
    return Ladder(group, shown) if BASELINE in shown and len(shown) > 1 else None
