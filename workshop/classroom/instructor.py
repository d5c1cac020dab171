"""The measured figures of exercises/instructor_guide.md, each with the file that it comes from.

`make docs` writes them between the guide's markers; the words around them are the guide's own.
"""

from collections.abc import Iterable

from workshop.compare.collection import Collection, Profile
from workshop.compare.rows import Row
from workshop.gate import plausibility
from workshop.profilers import kernel_file
from workshop.report import comparisons, studies
from workshop.report.comparisons import Group
from workshop.report.pages import References
from workshop.report.parts import Cell, Line, Link, Table, cells, links
from workshop.versions import ROOT

GUIDE = ROOT / "exercises" / "instructor_guide.md"
PUBLISHED = ROOT / "tests" / "fixtures" / "published_tables.json"
SESSIONS = {1: ("v1",), 2: ("v1", "v2"), 3: ("v1", "v3"), 4: ("v3", "v4")}
"""The versions whose figures a session needs."""
_SIZES = ("small", "medium")
_PRECISION = "bf16"
_CATEGORIES = 3
"""Of a profile's time, the largest."""


def parts(recorded: Collection) -> dict[str, str]:
    """What stands between each pair of the guide's markers, Markdown by the markers' name."""
    _, of_ladders = studies.split(recorded.runs)
    groups = comparisons.groups(of_ladders)
    references = References(GUIDE.parent)
    written = {}
    for session, keys in SESSIONS.items():
        tables = [_steps(groups, keys), _profiles(recorded.profiles, keys)]
        shown = [f"*{t.caption}*\n\n{references.table(t)}" for t in tables if t.lines]
        written[f"figures of session {session}"] = "\n\n".join(shown)
    written["published tables"] = str(references.table(_published()))
    written["files"] = references.definitions().strip()
    return written


# --- steps ---------------------------------------------------------------------------------------


def _steps(groups: Iterable[Group], keys: tuple[str, ...]) -> Table:
    header = [
        *("version", "size", "step ms", "forward", "backward", "optimizer", "speed-up [95%]"),
        *("peak MB", "of it activations and rest", "of peak", "files"),
    ]
    lines = []
    for group in groups:
        for row, stored in group.pairs():
            if row.version in keys and not row.variant and _is_shown(row):
                files = links(stored)
                lines.append(Line([*cells(*_step_cells(row, group)), Cell("", files)]))
    return Table("Steps, in processes that passed the gate", header, lines, texts=2)


def _is_shown(row: Row) -> bool:
    return row.config in _SIZES and row.precision == _PRECISION and row.step_ms is not None


def _step_cells(row: Row, group: Group) -> list[str]:
    times = (row.step_ms, row.forward_ms, row.backward_ms, row.optimizer_ms)
    rest = row.memory_mb.get("rest")
    return [
        row.label,
        f"{group.size}, {row.device}",
        *("-" if ms is None else f"{ms:,.2f}" for ms in times),
        row.verdict(),
        "-" if row.peak_memory_mb is None else f"{row.peak_memory_mb:,.0f}",
        f"{rest:,.0f}" if isinstance(rest, (int, float)) else "-",
        "-" if row.peak_share is None else f"{row.peak_share:.1%}",
    ]


# --- profiles ------------------------------------------------------------------------------------


def _profiles(profiles: Iterable[Profile], keys: tuple[str, ...]) -> Table:
    header = ["version", "size", "a step", "GPU busy", "most of the time", "file"]
    lines = [
        Line([*cells(*_profile_cells(found)), Cell("", (_link(found),))])
        for found in profiles
        if found.version in keys and found.run is not None and found.table.steps
    ]
    lines.sort(key=lambda line: (line.cells[1].text, line.cells[0].text))
    return Table("Profiles of torch.profiler", header, lines, texts=2)


def _link(found: Profile) -> Link:
    return Link(kernel_file.JSON_FILE, found.folder / kernel_file.JSON_FILE)


def _profile_cells(found: Profile) -> list[str]:
    run, table = found.run, found.table
    assert run is not None and table.steps
    busy = table.timeline.busy_ns / table.timeline.span_ns if table.timeline else None
    largest = list(table.category_ns().items())[:_CATEGORIES]
    return [
        found.version,
        f"{run.config_name}, {run.precision}, {run.device.get('name')}",
        f"{table.launches / table.steps:,.0f} {table.what}s",
        "-" if busy is None else f"{busy:.1%}",
        ", ".join(f"{name} {ns / table.total_ns:.0%}" for name, ns in largest),
    ]


# --- the tables that can't be true ---------------------------------------------------------------


def _published() -> Table:
    """What can't be true of each row of the published tables: the hunt's last question."""
    lines = []
    for claim in plausibility.read_claims(PUBLISHED):
        reasons = [one.removeprefix(f"{claim.name}: ") for one in plausibility.check(claim)]
        for reason in reasons or ["nothing in it is impossible"]:
            lines.append(Line(cells(claim.name, reason)))
    return Table("", ["published row", "what can't be true of it"], lines, texts=2)
