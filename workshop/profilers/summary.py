"""Sums up what a program's profilers left: summary.json, a page that links every output, and
above it a page that links the programs' pages. Both pages need nothing beside themselves."""

import contextlib
import dataclasses
import fnmatch
import json
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop import results
from workshop.errors import WorkshopError
from workshop.labs import LabRun
from workshop.profilers import advisor, kernel_file
from workshop.profilers.load import load_with_doubts, recorded
from workshop.profilers.names import display_name
from workshop.profilers.programs import PROGRAMS, Program
from workshop.results import RunResult

SCHEMA_VERSION = 1
SUMMARY_FILE, PAGE_FILE = "summary.json", "index.html"
_MARK = "<!-- the versions' profiles -->"
"""In the page above the versions' folders: what it may replace."""

_PERFETTO = ("Perfetto", "https://ui.perfetto.dev")
_SHEET = ("a spreadsheet", "")
# By pattern of a file's name, the first that fits: what it is, what opens it, and where that is.
_KINDS = (
    ("kernels.csv", "the kernel table", *_SHEET),
    ("kernels.json", "the kernel table, for programs", "", ""),
    ("run.jsonl", "what was profiled", "", ""),
    ("command.txt", "the commands that were run", "", ""),
    ("output.txt", "what they printed", "", ""),
    ("*.pt.trace.json*", "timeline of a few steps", *_PERFETTO),
    ("*.pftrace", "timeline", *_PERFETTO),
    ("*.proto", "timeline", *_PERFETTO),
    ("*.pickle", "every allocation on the GPU", "the visualiser", "https://pytorch.org/memory_viz"),
    ("*.nsys-rep", "timeline", "nsys-ui", ""),
    ("*.ncu-rep", "metrics of every launch", "ncu-ui", ""),
    ("*.hatchet", "time by kernel", "proton-viewer -m time/ms FILE", ""),
    ("*.db", "database of the trace", "rocpd convert -i FILE -f pftrace, or sqlite3", ""),
    ("*.sqlite", "database of the trace", "sqlite3", ""),
    ("operators*", "time and memory by operator", "", ""),
    ("flops.*", "operations of a step", "", ""),
    ("*_cuda_gpu_kern_sum.csv", "time by kernel", *_SHEET),
    ("*_kernel_stats.csv", "time by kernel", *_SHEET),
    ("*_kernel_trace.csv", "every launch", *_SHEET),
    ("*_counter_collection.csv", "counters of every launch", *_SHEET),
    ("roofline.csv", "the chip's ceilings, measured", *_SHEET),
    ("*.csv", "table", *_SHEET),
    ("*.html", "page", "this browser", ""),
    ("*", "", "", ""),
)


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


def skipped(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """Tools that were skipped, by the reason: many have the same one."""
    tools: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.status == "skipped":
            tools.setdefault(outcome.reason, []).append(outcome.tool)
    return tools


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
    tables = (output / kernel_file.JSON_FILE for output in outputs)
    path = next(filter(Path.is_file, tables), None)
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
    """Args:
    folder: the page's, to which links are relative.
    """
    outcomes = [Outcome(**fields) for fields in content["tools"]]
    tools = []
    for outcome in outcomes:
        output, table = folder / outcome.output, None
        if outcome.filled:
            with contextlib.suppress(WorkshopError):
                table = kernel_file.read(output / kernel_file.JSON_FILE)
        files = _files(output, folder) if outcome.filled else []
        log = _link(folder / outcome.log, folder)
        tools.append({"outcome": outcome, "log": log, "files": files, "table": table})
    return _render("summary.html.j2", content, tools=tools, skipped=skipped(outcomes))


def _overview(folder: Path) -> str:
    """The page of the programs whose summaries lie below a folder."""
    summaries = []
    for key in PROGRAMS:
        try:
            content = json.loads((folder / key / SUMMARY_FILE).read_text(encoding="utf-8"))
            statuses = [Outcome(**fields).shown_status for fields in content["tools"]]
        except (OSError, ValueError, KeyError, TypeError):  # not run yet, or by another checkout
            continue
        counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
        summaries.append(content | {"page": f"{key}/{PAGE_FILE}", "counts": counts})
    return _render("overview.html.j2", {"mark": _MARK, "summaries": summaries})


def _render(template: str, content: dict[str, Any], **more: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["moment"] = lambda iso: f"{iso[:10]} {iso[11:16]} UTC"
    environment.filters["short"] = display_name
    return environment.get_template(template).render(content, **more)


def _files(output: Path, folder: Path) -> list[dict[str, str]]:
    """Each file's link and name, what it is, what opens it, where that is, and its size."""
    files = []
    for path in sorted(filter(Path.is_file, output.rglob("*"))):
        _, what, opener, url = next(k for k in _KINDS if fnmatch.fnmatch(path.name, k[0]))
        size = path.stat().st_size
        shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
        found = {"href": _link(path, folder), "name": str(path.relative_to(output))}
        files.append(found | {"what": what, "opener": opener, "url": url, "size": shown})
    return files


def _link(path: Path, folder: Path) -> str:
    return urllib.parse.quote(path.relative_to(folder).as_posix())
