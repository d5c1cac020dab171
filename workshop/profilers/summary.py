"""Sums up what a program's profilers left: summary.json, a page that links every output, and
above it a page that links the programs' pages. Both pages need nothing beside themselves."""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import results, tables
from workshop.errors import WorkshopError
from workshop.labs import LabRun
from workshop.profilers import advisor, kernel_file, show
from workshop.profilers.load import load_with_doubts, recorded
from workshop.profilers.programs import PROGRAMS, Program
from workshop.results import RunResult
from workshop.tables import Cell, Line, Link, Table

SCHEMA_VERSION = 1
SUMMARY_FILE, PAGE_FILE = "summary.json", "index.html"
_MARK = "<!-- the versions' profiles -->"
"""In the page above the versions' folders: what it may replace."""
_HOT = 8
_OPENED_BY = {
    "a spreadsheet": (".csv",),
    "https://ui.perfetto.dev": (".trace.json.gz", ".pftrace", ".proto"),
    "https://pytorch.org/memory_viz": (".pickle",),
    "nsys-ui": (".nsys-rep",),
    "ncu-ui": (".ncu-rep",),
    "proton-viewer -m time/ms FILE": (".hatchet",),
    "rocpd convert -i FILE -f pftrace, or sqlite3": (".db",),
}
"""Programs by the ends of names of the files that they open."""
_STYLES = {"failed": "red", "interrupted": "red"}


@dataclass
class Outcome:
    """How one tool's script ended."""

    tool: str
    script: str
    question: str
    output: str
    """The folder for its outputs; `log`: what it printed. Both relative to the summary's folder."""
    log: str
    status: str = "not run"
    """Or "ok", "skipped" (the machine does not have what it needs), "failed", "interrupted"."""
    reason: str = ""
    """Why it was skipped or has failed: the script's own message."""
    seconds: float = 0.0
    exit_status: int | None = None
    filled: bool = False
    """Whether `output` is this run's, and not what an earlier one left there."""

    @property
    def shown_status(self) -> str:
        return "FAILED" if self.status == "failed" else self.status

    @property
    def result(self) -> str:
        return self.shown_status + (f": {self.reason}" if self.reason else "")


def sum_up(
    program: Program, outcomes: list[Outcome], model_flags: list[str], folder: Path
) -> dict[str, Any]:
    """Content of SUMMARY_FILE: how the tools ended, what was profiled, and the advice.

    Args:
        folder: the summary's, which has the tools' outputs below it.
    """
    filled = [folder / outcome.output for outcome in outcomes if outcome.filled]
    return {
        "schema_version": SCHEMA_VERSION,
        "created": results.now(),
        "version": program.key,
        "title": program.title,
        "model_flags": model_flags,
        "tools": [dataclasses.asdict(outcome) for outcome in outcomes],
        "utilisation": _utilisation(filled),
        **_findings(filled),
    }


def _findings(outputs: list[Path]) -> dict[str, Any]:
    """The advice on the first kernel table that a tool left, and what was profiled."""
    findings: dict[str, Any] = {"device": "", "configuration": "", "headline": ""}
    findings |= {"advice": [], "warnings": []}
    files = (output / kernel_file.JSON_FILE for output in outputs)
    path = next(filter(Path.is_file, files), None)
    if path is None:
        return findings
    try:
        table, run = load_with_doubts(path), recorded(path)
    except WorkshopError:  # it is in the log of the script that wrote them
        return findings
    advice = advisor.advise(table, run)
    warned = advice and advice[0].severity == advisor.WARNING
    # Else the first: a warning, or why the times mean nothing.
    first = (None if warned else advisor.headline(advice)) or next(iter(advice), None)
    findings["headline"] = first.sentence if first else ""
    findings["advice"] = [dataclasses.asdict(sentence) for sentence in advice]
    findings["warnings"] = table.warnings
    if run:
        findings["device"] = f"{run.device.get('name')}, PyTorch {run.software.get('torch')}"
        findings["configuration"] = _configuration(run)
    return findings


def _configuration(run: RunResult | LabRun) -> str:
    if isinstance(run, LabRun):
        return f"{run.subject}: {run.variant}"
    graph = "captured in a graph" if run.options.get("cuda_graph") else "no graph"
    return (
        f"{run.config_name} (hidden {run.config['hidden_dim']}, {run.config['num_layers']} "
        f"layers), {run.batch_size} sequence{'s' * (run.batch_size > 1)} of {run.seq_len} tokens, "
        f"{run.precision}, compile {run.options.get('compile')}, {graph}"
    )


def _utilisation(outputs: list[Path]) -> str:
    """Rate of a step by the counts of operations; nothing if it was not timed."""
    for output in outputs:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            flops = json.loads((output / "flops.json").read_text(encoding="utf-8"))
            return (
                f"Timed without a profiler, a step reaches {flops['tflops']:,.3g} TFLOP/s: "
                f"{flops['mfu']:.1%} (MFU) of {flops['peak_tflops']:,.3g} TFLOP/s "
                f"({flops['peak_source']})."
            )
    return ""


def outcome_table(title: str, outcomes: Iterable[Outcome], folder: Path) -> Table:
    """How each tool ended, for terminal and page; those that were skipped are in the notes, by the
    reason, since many have the same one."""
    lines: list[Line] = []
    skipped: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.status == "skipped":
            skipped.setdefault(outcome.reason, []).append(outcome.tool)
            continue
        log = [Link(outcome.log, folder / outcome.log)] if outcome.status in _STYLES else []
        tool = Cell(outcome.tool, anchor=outcome.tool if outcome.filled else "")
        seconds = "-" if outcome.exit_status is None else f"{outcome.seconds:.0f}"
        cells = [tool, outcome.question, Cell(outcome.result, log), seconds]
        lines.append(Line(cells, _STYLES.get(outcome.status)))
    notes = [f"skipped, {reason}: {', '.join(tools)}" for reason, tools in skipped.items()]
    header = ["tool", "question it answers", "result", "seconds"]
    return Table(title, header, lines, notes, left=(0, 1, 2))


# --- files and pages -----------------------------------------------------------------------------


def write(content: dict[str, Any], folder: Path) -> list[Path]:
    """Writes SUMMARY_FILE and PAGE_FILE of a program's folder, and above it, where this is a
    folder among the programs', the page of them all; their paths."""
    results.write_json(folder / SUMMARY_FILE, content)
    results.write_text(folder / PAGE_FILE, _program_page(content, folder))
    written = [folder / SUMMARY_FILE, folder / PAGE_FILE]
    above = folder.parent / PAGE_FILE
    may_be_replaced = not above.exists() or _MARK.encode() in above.read_bytes()
    if folder.name == content["version"] and may_be_replaced:
        results.write_text(above, _overview(folder.parent))
        written.append(above)
    return written


def remove(folder: Path) -> None:
    """Takes the summary of an earlier run out of a folder."""
    for name in (SUMMARY_FILE, PAGE_FILE):
        (folder / name).unlink(missing_ok=True)


def _program_page(content: dict[str, Any], folder: Path) -> str:
    outcomes = [Outcome(**fields) for fields in content["tools"]]
    facts = {name: content[name] for name in ("device", "configuration")}
    facts |= {"flags of the model": " ".join(content["model_flags"])}
    facts |= {"made": content["created"]}
    how = outcome_table("What each profiler answers, and how it ended here", outcomes, folder)
    parts: list[tuple[str, list[Table]]] = [("", [how])]
    for outcome in (outcome for outcome in outcomes if outcome.filled):
        own = [_files(folder / outcome.output, folder / outcome.log)]
        with contextlib.suppress(WorkshopError):
            table = kernel_file.read(folder / outcome.output / kernel_file.JSON_FILE)
            own.insert(0, show.short_list(table, _HOT))
        parts.append((outcome.tool, own))
    title = f"Profiles of {content['version']}: {content['title']}"
    return _page(title, parts, folder, facts, content)


def _overview(folder: Path) -> str:
    """The page of the programs whose summaries are below a folder."""
    lines = []
    for key in PROGRAMS:
        try:
            content = json.loads((folder / key / SUMMARY_FILE).read_text(encoding="utf-8"))
            counts = Counter(Outcome(**fields).shown_status for fields in content["tools"])
            facts = [content[name] for name in ("headline", "device", "configuration", "created")]
            program = Link(f"{content['version']}: {content['title']}", folder / key / PAGE_FILE)
        except (OSError, ValueError, KeyError, TypeError):  # not run yet, or by another checkout
            continue
        ended = ", ".join(f"{count} {status}" for status, count in counts.items())
        lines.append(Line([Cell("", [program]), ended, *facts]))
    header = ["program", "profilers", "what the profile says", "device", "configuration", "made"]
    title = "How the profilers ended, and what bounds each program"
    table = Table(title, header, lines, left=range(len(header)))
    return _page("Profiles of the programs", [("", [table])], folder, {}, {}) + _MARK


def _page(
    title: str,
    parts: list[tuple[str, list[Table]]],
    folder: Path,
    facts: dict[str, str],
    findings: dict[str, Any],
) -> str:
    """A page of titled parts with their tables, to which links are relative."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    template = environment.get_template("summary.html.j2")
    drawn = [(name, [(tables.html(t, folder), t.notes) for t in own]) for name, own in parts]
    return template.render(findings | {"title": title, "parts": drawn, "facts": facts})


def _files(output: Path, log: Path) -> Table:
    """The files of a tool, with what opens each."""
    lines = []
    for path in (*sorted(filter(Path.is_file, output.rglob("*"))), log):
        name = str(path.relative_to(output)) if path != log else "what the script printed"
        openers = (who for who, ends in _OPENED_BY.items() if path.name.endswith(ends))
        size = path.stat().st_size if path.is_file() else 0
        shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
        lines.append(Line([Cell("", [Link(name, path)]), next(openers, ""), shown]))
    return Table("Files", ["file", "opens in", "size"], lines, left=(0, 1))
