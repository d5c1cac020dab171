"""Gathers the content of a report from a collection of results."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from workshop.collection import Collection
from workshop.exercises import sheet
from workshop.exercises.progress import Progress
from workshop.labs import LabRun
from workshop.profilers.names import printable
from workshop.report import comparisons, lab_sections, sections, studies
from workshop.report.comparisons import Group
from workshop.report.parts import (
    Cell,
    Device,
    Line,
    Link,
    Report,
    Section,
    Sheet,
    Table,
    cells,
    count,
)
from workshop.results import RunResult
from workshop.versions import ROOT

REFERENCE = "reference"
"""The subfolder of others' results."""
Shown = Callable[[str], object]
_HARDWARE = (
    ("architecture", "{}"),
    ("multiprocessors", "{} multiprocessors"),
    ("memory_gb", "{} GB"),
    ("threads", "PyTorch threads: {}"),
)


def build(
    collection: Collection, *, title: str, progress: Shown = lambda what: None, top: int = 10
) -> Report:
    """The report of a collection that has been refreshed.

    Args:
        progress: called with the name of each device.
        top: kernels of each profile.
    """
    of_studies, of_ladders = studies.split(collection.runs)
    groups = comparisons.groups(of_ladders)
    others, broken = sections.others(collection)
    study_sections, study_rows = studies.build(of_studies)
    of_labs = lab_sections.build(collection.lab_runs)
    lab_rows = [row for _, rows in of_labs for row in rows]
    measurements = len(study_sections) + len(others)
    others = [*study_sections, *((rows[0].device, section) for section, rows in of_labs), *others]
    names = dict.fromkeys(group.device for group in groups)
    names |= dict.fromkeys(found.device for found in collection.profiles)
    names |= dict.fromkeys(name for name, _ in others)
    devices = []
    for number, name in enumerate(names, 1):
        progress(printable(name))
        own = [section for of, section in others if of == name]
        ladder = [group for group in groups if group.device == name]
        of_lab = [run for row in lab_rows if row.device == name for run in row.runs]
        devices.append(_device(f"device-{number}", name, ladder, of_lab, own, collection, top))
    broken = sorted([*((one.path, one.reason) for one in collection.broken), *broken])
    return Report(
        title=title,
        devices=devices,
        rows=[*(row for group in groups for row in group.rows), *study_rows],
        lab_rows=lab_rows,
        broken=[
            (Link(printable(path.name), path), printable(why.removeprefix(f"{path}: ")))
            for path, why in broken
        ],
        counts=_counts(collection, groups, len(of_studies), measurements, len(broken)),
        glance=comparisons.at_a_glance(groups),
    )


def _counts(
    collection: Collection, groups: list[Group], of_studies: int, others: int, broken: int
) -> list[str]:
    older = len(collection.runs) - of_studies - len(_runs(groups))
    counts = [count(len(collection.runs), "run")]
    counts += [f"{older} of them older than another of their kind, and not shown"] if older else []
    kinds = (
        (len(collection.lab_runs), "lab run"),
        (len(collection.profiles), "profile"),
        (others, "other measurement"),
        (broken, "broken file"),
    )
    return counts + [count(n, what) for n, what in kinds if n]


# --- a device ------------------------------------------------------------------------------------


def _device(
    anchor: str,
    name: str,
    groups: list[Group],
    lab_runs: list[LabRun],
    others: list[Section],
    collection: Collection,
    top: int,
) -> Device:
    profiles = [found for found in collection.profiles if found.device == name]
    runs = _runs(groups)
    return Device(
        anchor=anchor,
        name=printable(name),
        facts=facts([*runs, *(found.run for found in profiles if found.run), *lab_runs]),
        sessions=_sessions(groups) if groups else None,
        commands=_commands(groups) if groups else None,
        pictures=comparisons.speedup_pictures(anchor, groups),
        sizes=[
            comparisons.section(group, sections.folder_of(group.files[0], collection.folders))
            for group in groups
        ],
        others=others,
        profiles=[
            sections.profile(f"{anchor}-profile-{number}", found, collection.folders, top)
            for number, found in enumerate(profiles, 1)
        ],
        profile_pictures=sections.category_pictures(anchor, profiles),
    )


def facts(runs: Sequence[RunResult | LabRun]) -> list[tuple[str, str]]:
    """Hardware, software, code and days of some runs: a name and a text each."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        software = ", ".join(f"{name} {v}" for name, v in run.software.items() if v)
        texts = {
            "hardware": _hardware(run),
            "software": software,
            "code": f"commit {run.git_commit or 'unknown'}",
            "measured": run.created[:10],
        }
        for what, text in texts.items():
            found.setdefault(what, {})[printable(text)] = None
    return [(what, "; ".join(sorted(texts))) for what, texts in found.items()]


def _hardware(run: RunResult | LabRun) -> str:
    known = [form.format(run.device[key]) for key, form in _HARDWARE if run.device.get(key)]
    return ", ".join(["CPU" if run.device.get("type") == "cpu" else "GPU", *known])


def _sessions(groups: Sequence[Group]) -> Table:
    """A line for each session and size."""
    found: dict[tuple[str, str], list[RunResult]] = defaultdict(list)
    for group in groups:
        for run in _runs([group]):
            found[run.session, group.size].append(run)
    lines = []
    for (session, size), runs in sorted(found.items(), key=lambda item: item[0][0]):
        steps = {f"{len(run.step_ms)} after {run.warmup_steps}" for run in runs if run.step_ms}
        data = {str(run.data.get("name", "-")) for run in runs}
        versions = dict.fromkeys(run.version for run in runs)
        day, steps_taken = min(run.created for run in runs)[:10], ", ".join(sorted(steps)) or "-"
        names = ", ".join(versions), ", ".join(sorted(data))
        lines.append(Line(cells(session, day, size, *names, steps_taken, str(len(runs)))))
    header = ["session", "day", "size", "versions", "data", "steps, after warm-up", "processes"]
    return Table("What was run", header, lines, texts=5)


def _commands(groups: Sequence[Group]) -> Table:
    """The command of each version and size: of its processes the one with the gate."""
    lines = []
    for group in groups:
        for row, stored in group.pairs():
            gated = next((one for one in stored if one.run.gate.status != "not run"), stored[0])
            command = printable(" ".join(gated.run.command)) or "-"
            link = Link("result file", gated.path)
            what = cells(f"{row.label} {group.size}")
            lines.append(Line([*what, Cell(command, is_code=True), Cell("", (link,))]))
    return Table("Command lines", ["version and size", "command", ""], lines, texts=3)


def participants_sheet(collection: Collection) -> Sheet:
    """A participant's own results: the exercises, and all comparisons and labs but those in a
    results folder's `reference`; without pictures."""
    theirs = {folder / REFERENCE for folder in collection.folders}
    own = [one for one in collection.runs if theirs.isdisjoint(one.path.parents)]
    of_labs = [one for one in collection.lab_runs if theirs.isdisjoint(one.path.parents)]
    _, of_ladders = studies.split(own)
    parts: dict[str, list[Section]] = defaultdict(list)
    runs: dict[str, list[RunResult | LabRun]] = defaultdict(list)
    for group in comparisons.groups(of_ladders):
        parts[group.device].append(comparisons.tables(group))
        runs[group.device] += _runs([group])
    for section, rows in lab_sections.build(of_labs):
        parts[rows[0].device].append(section)
        runs[rows[0].device] += [run for row in rows for run in row.runs]
    devices = [(printable(name), facts(runs[name]), its) for name, its in parts.items()]
    return Sheet(devices, _exercises(collection.folders[0]))


def _exercises(results: Path) -> Table:
    """A line for each exercise: how far the participant is."""
    states = Progress(results)
    sheets, _ = sheet.read_all(ROOT)
    lines = []
    for one in sheets:
        state = states[one.name]
        so_far = f"{state.green} of {state.items}" if state.checks else ""
        passed = f"passed {state.passed[:10]}" if state.passed else so_far
        lines.append(Line(cells(one.name, one.title, one.when, passed)))
    return Table("The exercises", ["exercise", "what", "when", "so far"], lines, texts=4)


def _runs(groups: Sequence[Group]) -> list[RunResult]:
    return [one.run for group in groups for stored in group.runs for one in stored]
