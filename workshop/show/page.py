"""The page of all results: `make report` writes it, `make dashboard` serves it.

One's own results come first, the reference results after them. All text that does not come from a
template is escaped, so that no name from a file becomes markup.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop import tables
from workshop.collection import Collection
from workshop.compare.rows import Row
from workshop.errors import printable
from workshop.labs import LabRow, LabRun
from workshop.results import PASS, RunResult
from workshop.show import charts, sections
from workshop.show.drawing import Chart
from workshop.show.ladders import Group, at_a_glance, ladder_section, ladders, speedups
from workshop.show.sections import Alarm, Section
from workshop.tables import Cell, Line, Link, Table
from workshop.versions import ALL, BASELINE, ROOT

REFERENCE = "reference"
"""The subfolder of others' results."""
OWN, OTHERS = "Your results", "Reference results"
HOW_TO_READ = (
    ("step ms", "is the median over all steps of all processes, ± half of the interquartile range. "
     "Forward, backward and optimizer come from a separate pass with marks between them."),
    ("speed-up", "is V1's median step over this version's, from the same session, with the 95% "
     "interval: Student's t on the processes' medians; one process has no interval."),
    ("verdict", "says whether it trained V1's model: `pass`, `FAIL` or `not audited`. The "
     "gate runs before the clock: logits, loss, each gradient and a short training run may be no "
     "further from the truth than about twice what the precision costs V1. The audit checks the "
     "timed steps: the loss of each, and the distance and direction in which they moved each "
     "weight. A row that fails either has no speed-up. `not audited`: no run of V1 was in its "
     "comparison, or it was measured before the audit existed."),
    ("gradients", "counts the tensors, under V1's names, that the timed run's backward pass "
     "reached."),
    ("error, of allowed", "is the largest of the gate's errors, as a share of its tolerance."),
    ("peak MB", "(10^6 bytes) is the true peak of the timed steps, a captured graph's memory "
     "included."),
    ("of peak", "compares the useful operations (causal attention counts half) with the chip's "
     "peak, whose source is below the table."),
)  # fmt: skip
QUESTIONS = (
    "Which version gained most over the one before it, and what was it that its change removed?",
    "What bounds V1 here, and which line of a profile says so?",
    "What bounds the fastest version now, and how far is it from the chip's limit?",
    "What surprised me",
    "What I will try in my own code",
)
"""At the end of a participant's sheet."""
_HARDWARE = (
    ("architecture", "{}"),
    ("multiprocessors", "{} multiprocessors"),
    ("memory_gb", "{} GB"),
    ("threads", "PyTorch threads: {}"),
)
_KINDS = (
    sections.LADDERS, sections.STUDIES, sections.LABS, sections.KERNELS, sections.PROFILES,
    sections.OTHER,
)  # fmt: skip
"""In the order of a page."""


# --- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The filters of a page; an empty field leaves everything."""

    device: str = ""
    size: str = ""
    precision: str = ""
    show: str = ""
    """A kind of section."""
    versions: tuple[str, ...] = ()

    def takes(self, section: Section) -> bool:
        """Whether a section is shown: one without a size has every size."""
        return (
            self.device in ("", printable(section.device))
            and self.size in ("", section.size or self.size)
            and self.precision in ("", section.precision or self.precision)
            and self.show in ("", section.kind)
        )


@dataclass
class Device:
    """All that was measured on one kind of device."""

    name: str
    facts: list[tuple[str, str]]
    """Hardware, software, code and day."""
    charts: list[Chart]
    tables: list[Table]
    """The sessions, and the command lines."""
    sections: list[Section]
    anchor: str = ""


@dataclass
class Part:
    """The results of one origin: one's own, or the reference."""

    title: str
    collection: Collection
    groups: list[Group] = field(init=False)
    others: list[Section] = field(init=False)
    """All sections but the ladders."""
    rows: list[Row] = field(init=False)
    lab_rows: list[LabRow] = field(init=False)
    broken: list[tuple[Path, str]] = field(init=False)

    def __post_init__(self) -> None:
        found = self.collection
        self.groups = ladders(found.runs)
        studies, study_rows = sections.studies(found.runs)
        of_labs = sections.lab_sections(found.lab_runs)
        costs, self.broken = sections.harness_costs(found.folders, found.keeps)
        self.others = [*studies, *(section for section, _ in of_labs)]
        self.others += [
            sections.benchmark(path, runs, found.folders) for path, runs in found.kernels.items()
        ]
        self.others += costs
        self.others += [sections.profile(one, found.folders) for one in found.profiles]
        self.rows = [*(row for group in self.groups for row in group.rows), *study_rows]
        self.lab_rows = [row for _, rows in of_labs for row in rows]
        self.broken += [(one.path, one.reason) for one in found.broken]

    @property
    def names(self) -> list[str]:
        """The devices: that of the newest ladder first."""
        names = [group.device for group in self.groups] + [one.device for one in self.others]
        return list(dict.fromkeys(names))

    def chosen(self, choice: Choice) -> list[Group]:
        """The groups that a choice takes, with the versions that it takes."""
        found = []
        for group in self.groups:
            row = group.rows[0]
            like = Section(sections.LADDERS, group.device, "", printable(group.preset),
                           printable(row.precision))  # fmt: skip
            own = group.only(choice.versions) if choice.versions else group
            if own and choice.takes(like):
                found.append(own)
        return found

    def verdicts(self) -> str:
        """How many rows of the versions and of the labs have which verdict; empty without rows."""
        versions = [(row.verdict, row.plausibility) for row in self.rows]
        of_labs = [(row.verdict, row.plausibility) for row in self.lab_rows]
        found = [*_verdicts("Versions", versions)]
        more = sum(one.run.kind == "run" for one in self.collection.runs) - len(_runs(self.groups))
        if more and self.title == OWN:
            row = (
                "A row is a version's newest comparison at its size, or its newest run without one"
            )
            found.append(f"{row}; that leaves out {count(more, 'run')}.")
        return " ".join([*found, *_verdicts("Labs", of_labs)])


def _verdicts(of: str, found: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    numbers = Counter(verdict for verdict, _ in found)
    if numbers:
        words = ", ".join(f"{number} {verdict}" for verdict, number in numbers.most_common())
        flagged = sum(bool(sentences) for _, sentences in found)
        also = f"{f'{flagged} with' if flagged else 'no'} implausible numbers"
        yield f"{of}: {words} of {count(len(found), 'row')}; {also}."


def read(collection: Collection) -> list[Part]:
    """One's own results and the reference's, each as far as there are any."""
    theirs = {ROOT / "results" / REFERENCE, *(one / REFERENCE for one in collection.folders)}

    def is_reference(path: Path) -> bool:
        return not theirs.isdisjoint(path.parents)

    own = collection.only(lambda path: not is_reference(path))
    parts = [(OWN, own), (OTHERS, collection.only(is_reference))]
    found = [Part(title, one) for title, one in parts]
    return [part for part in found if part.groups or part.others or part.broken]


# --- the page ------------------------------------------------------------------------------------


@dataclass
class Shelf:
    """A part of the page: what a choice takes of the results of one origin."""

    title: str
    verdicts: str
    glance: Table | None
    devices: list[Device]
    broken: list[tuple[Link, str]]
    is_own: bool
    anchor: str

    @property
    def alarms(self) -> list[Alarm]:
        found = (section for device in self.devices for section in device.sections)
        return [alarm for section in found for alarm in section.alarms]


@dataclass
class Page:
    """Everything, in its order on the page."""

    title: str
    sentences: list[str]
    """Three: what is here, what it says, what to do next."""
    picture: Chart | None
    shelves: list[Shelf]

    @property
    def charts(self) -> dict[str, Chart]:
        found = [self.picture] if self.picture else []
        for device in (one for shelf in self.shelves for one in shelf.devices):
            found += [*device.charts, *(c for s in device.sections for c in s.charts)]
        return {chart.name: chart for chart in found}


def make(parts: Sequence[Part], choice: Choice = Choice(), *, title: str) -> Page:
    """The page of a choice."""
    shelves: list[Shelf] = []
    groups: list[Group] = []
    for number, part in enumerate(parts, 1):
        own = part.chosen(choice)
        groups += [] if groups else own
        devices: list[Device] = []
        for name in part.names:
            its = [group for group in own if group.device == name]
            device = _device(name, its, part, choice)
            if device.sections:
                device.anchor = f"part-{number}-device-{len(devices) + 1}"
                devices.append(device)
                _set_anchors(device)
        anchors = [s.anchor for d in devices for s in d.sections if s.kind == sections.LADDERS]
        broken = [
            (Link(printable(path.name), path), printable(why.removeprefix(f"{path}: ")))
            for path, why in sorted(part.broken)
        ]
        glance = at_a_glance(own, anchors) if choice.show in ("", sections.LADDERS) else None
        shelves.append(Shelf(part.title, part.verdicts(), glance, devices, broken,
                             part.title == OWN, f"part-{number}"))  # fmt: skip
    shown = main_group(groups)
    picture = charts.rows_chart("first", shown.rows, shown.files) if shown else None
    return Page(title, _sentences(parts, shelves, shown), picture, shelves)


def _set_anchors(device: Device) -> None:
    """Names for sections and charts that no others of the page have."""
    device.charts = [
        dataclasses.replace(c, name=f"{device.anchor}-{c.name}") for c in device.charts
    ]
    for number, section in enumerate(device.sections, 1):
        section.anchor = f"{device.anchor}-{number}"
        section.charts = [
            dataclasses.replace(chart, name=f"{section.anchor}-{chart.name}")
            for chart in section.charts
        ]


def main_group(groups: Sequence[Group]) -> Group | None:
    """The ladder that is seen first: of the newest day, the one with most versions, in half
    precision, with most tokens; None where nothing was timed."""

    def order(group: Group) -> tuple[object, ...]:
        timed = {row.version for row in group.rows if row.step_ms}
        row, half = group.rows[0], group.rows[0].precision in ("bf16", "fp16")
        newest = max(row.session for row in group.rows)
        return newest[:8], len(timed), half, row.batch_size * row.seq_len

    timed = [group for group in groups if any(row.step_ms for row in group.rows)]
    return max(timed, key=order, default=None)


def headline(rows: Sequence[Row]) -> str:
    """The best that was proven, in a sentence; empty if nothing was."""
    found = [(row.speedup.value, row) for row in rows if row.speedup and row.speedup.significant]
    value, best = max(found, key=lambda pair: pair[0], default=(0.0, None))
    if best is None or value <= 1:
        return ""
    sentence = f"{best.label.upper()} is {best.speedup_text()} as fast as {BASELINE.upper()}"
    if best.memory_reduction:
        how = "less" if best.memory_reduction > 0 else "more"
        sentence += f", in {abs(best.memory_reduction):.0%} {how} memory"
    return sentence


def _sentences(parts: Sequence[Part], shelves: Sequence[Shelf], shown: Group | None) -> list[str]:
    """Three sentences: what is here, what it says, what to do next."""
    here = "; ".join(f"{part.title}: {', '.join(held(part.collection))}" for part in parts)
    own = next((part for part in parts if part.title == OWN), None)
    failed = [alarm for shelf in shelves if shelf.is_own for alarm in shelf.alarms]
    says = "No timed run of a version is shown."
    if shown:
        where = f"at {shown.size}, on {shown.device}"
        tested = any(
            row.speedup and row.speedup.interval for row in shown.rows if row.version != BASELINE
        )
        slow = "no version is significantly faster than V1"
        once = "no speed-up has an interval, which takes two processes of each version"
        best = headline(shown.rows) or (slow if tested else once)
        passed = sum(row.verdict == PASS for row in shown.rows)
        says = f"{best[0].upper()}{best[1:]}, {where}; {passed} of {count(len(shown.rows), 'row')} "
        says += "passed gate and audit."
    if failed:
        then = f"Look into {count(len(failed), 'row')} below before you quote a number."
    elif own is None or not own.groups:
        then = "make compare measures your machine; its results will be above these."
    elif not own.collection.profiles:
        then = "make profile shows what bounds your versions; its profiles will be below."
    else:
        then = "Read below what bounds the fastest version, and try to change that."
    return [f"{here or 'No results yet'}.", printable(says), then]


def held(collection: Collection) -> list[str]:
    """The numbers of a collection's runs, lab runs and profiles, as far as there are any."""
    kinds = (
        (len(collection.runs), "run"),
        (len(collection.lab_runs), "lab run"),
        (len(collection.profiles), "profile"),
    )
    return [count(number, what) for number, what in kinds if number]


def count(number: int, what: str) -> str:
    """As in "3 profiles"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# --- a device ------------------------------------------------------------------------------------


def _device(name: str, groups: list[Group], part: Part, choice: Choice) -> Device:
    found = part.collection
    shown = [ladder_section(group, found.folders) for group in groups]
    shown += [
        dataclasses.replace(one) for one in part.others if one.device == name and choice.takes(one)
    ]
    profiles = [one for one in found.profiles if one.device == name]
    if any(section.kind == sections.PROFILES for section in shown):
        drawn = sections.category_charts(profiles)
        head = Section(
            sections.PROFILES, name, "Where the time of profiled steps goes", charts=drawn
        )
        shown += [head] if drawn else []
        shown.sort(key=lambda one: one is not head)
    shown.sort(key=lambda one: _KINDS.index(one.kind))
    runs: list[RunResult | LabRun] = [*_runs(groups), *(p.run for p in profiles if p.run)]
    runs += [run for row in part.lab_rows if row.device == name for run in row.runs]
    tables = [_sessions(groups), _commands(groups)] if groups else []
    return Device(printable(name), facts(runs), speedups(groups), tables, shown)


def _runs(groups: Sequence[Group]) -> list[RunResult]:
    return [one.run for group in groups for stored in group.runs for one in stored]


def facts(runs: Sequence[RunResult | LabRun]) -> list[tuple[str, str]]:
    """Hardware, software, code and days of some runs: a name and a text each."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        known = [form.format(run.device[key]) for key, form in _HARDWARE if run.device.get(key)]
        texts = {
            "hardware": ", ".join(["CPU" if run.device.get("type") == "cpu" else "GPU", *known]),
            "software": ", ".join(f"{name} {v}" for name, v in run.software.items() if v),
            "code": f"commit {run.git_commit or 'unknown'}",
            "measured": run.created[:10],
        }
        for what, text in texts.items():
            found.setdefault(what, {})[printable(text)] = None
    return [(what, "; ".join(sorted(texts))) for what, texts in found.items()]


def _sessions(groups: Sequence[Group]) -> Table:
    """A line for each session and size."""
    found: dict[tuple[str, str], list[RunResult]] = defaultdict(list)
    for group in groups:
        for run in _runs([group]):
            found[run.session, group.size].append(run)
    lines = []
    for (session, size), runs in sorted(found.items(), key=lambda item: item[0][0]):
        steps = {f"{len(run.step_ms)} after {run.warmup_steps}" for run in runs if run.step_ms}
        data = ", ".join(sorted({str(run.data.get("name", "-")) for run in runs}))
        versions = ", ".join(dict.fromkeys(run.version for run in runs))
        day, taken = min(run.created for run in runs)[:10], ", ".join(sorted(steps)) or "-"
        lines.append(Line([session, day, size, versions, data, taken, str(len(runs))]))
    header = ["session", "day", "size", "versions", "data", "steps, after warm-up", "processes"]
    return Table("What was run", header, lines, left=range(5))


def _commands(groups: Sequence[Group]) -> Table:
    """The command of each version and size: of its processes the one with the gate."""
    lines = []
    for group in groups:
        for row, stored in group.pairs():
            gated = next((one for one in stored if one.run.gate.status != "not run"), stored[0])
            program, words = ALL[row.version].path, " ".join(gated.run.command)
            words = words.replace(f" {program.name}", f" {program.relative_to(ROOT)}", 1)
            command = Cell(printable(words) or "-", is_code=True)
            file = Cell("", [Link("result file", gated.path)])
            lines.append(Line([f"{row.label} {group.size}", command, file]))
    return Table("Command lines", ["version and size", "command", ""], lines, left=range(3))


# --- HTML ----------------------------------------------------------------------------------------


def html_page(page: Page, folder: Path | None, *, live: Any = None) -> str:
    """The page of a folder, to which its links are relative; without one it has no links to files.

    Args:
        live: the dashboard's controls; without them all charts are in the page.
    """
    from markupsafe import Markup

    def draw(chart: Chart) -> Markup:
        return Markup(chart.markup)  # which escapes its own texts

    return _render("page.html.j2", folder, page=page, live=live, draw=draw, how_to_read=HOW_TO_READ)


def _render(template: str, folder: Path | None, **content: object) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True,
    )  # fmt: skip
    environment.filters["html"] = lambda table: Markup(tables.html(table, folder))
    environment.filters["links"] = lambda links: Markup(tables.html_links(links, folder))
    files = lambda paths: [Link(path.name, path) for path in paths]  # noqa: E731
    return environment.get_template(template).render(files=files, **content)


# --- a participant's sheet -----------------------------------------------------------------------


def sheet(parts: Sequence[Part], folder: Path, exercises: Table) -> str | None:
    """A participant's own ladders and labs, and how far they are in the exercises, with room for
    what they saw; None without any runs of theirs."""
    own = next((part for part in parts if part.title == OWN and (part.rows or part.lab_rows)), None)
    if own is None:
        return None
    devices = make([own], title="My results").shelves[0].devices
    for device in devices:
        kept = [one for one in device.sections if one.kind in (sections.LADDERS, sections.LABS)]
        device.sections, device.charts, device.tables = kept, [], []
    content = {"devices": devices, "exercises": exercises, "questions": QUESTIONS}
    return _render("sheet.html.j2", folder, **content)
