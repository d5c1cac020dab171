"""Runs a version's profilers one after the other, and sums up what came out: a table, index.html
that links every output, and summary.json. `run_all_profilers.sh` of a version calls it.

Each script runs in a process of its own, what it prints goes to a log, and one that fails or that
the machine has no tool for is no end.
"""

import argparse
import dataclasses
import fnmatch
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from workshop import errors, versions
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.versions import Version

SCHEMA_VERSION = 1
SUMMARY_FILE, PAGE_FILE = "summary.json", "index.html"
SECONDS_TO_STOP = 20
QUESTIONS = {
    "pytorch_profiler": "which operators and kernels run, when, with how much memory?",
    "deepspeed_flops": "how many operations is a step, and what share of the chip is that?",
    "rocprofv3": "which kernels take the time on an AMD GPU, and what do they move and compute?",
    "rocprof_sys": "what does the host do while an AMD GPU works or waits?",
    "rocprof_compute": "how well does each kernel use the parts of an AMD GPU?",
    "ncu": "what does each kernel move and compute on an NVIDIA GPU, against its limits?",
    "nsys": "when does what run on an NVIDIA GPU, and where does it wait?",
    "proton": "which kernels take the time, told in seconds and with Triton alone?",
}
"""By tool: what its script answers, in the order of the ladder of tools."""

# By pattern of a file's name, the first that fits: what it is, what opens it, and where that is.
_KINDS = (
    ("kernels.csv", "the kernel table", "a spreadsheet", ""),
    ("kernels.json", "the kernel table, for programs", "", ""),
    ("run.json", "what was profiled", "", ""),
    ("command.txt", "the commands that were run", "", ""),
    ("output.txt", "what they printed", "", ""),
    ("*.pt.trace.json*", "timeline of a few steps", "Perfetto", "https://ui.perfetto.dev"),
    ("*.pftrace", "timeline", "Perfetto", "https://ui.perfetto.dev"),
    ("*.proto", "timeline", "Perfetto", "https://ui.perfetto.dev"),
    ("*.pickle", "every allocation on the GPU", "the visualiser", "https://pytorch.org/memory_viz"),
    ("*.nsys-rep", "timeline", "nsys-ui", ""),
    ("*.ncu-rep", "metrics of every launch", "ncu-ui", ""),
    ("*.hatchet", "time by kernel", "proton-viewer -m time/ms FILE", ""),
    ("*.db", "database of the trace", "rocpd convert -i FILE -f pftrace, or sqlite3", ""),
    ("*.sqlite", "database of the trace", "sqlite3", ""),
    ("operators*", "time and memory by operator", "", ""),
    ("flops.*", "operations of a step", "", ""),
    ("*_cuda_gpu_kern_sum.csv", "time by kernel", "a spreadsheet", ""),
    ("*_kernel_stats.csv", "time by kernel", "a spreadsheet", ""),
    ("*_kernel_trace.csv", "every launch", "a spreadsheet", ""),
    ("*_counter_collection.csv", "counters of every launch", "a spreadsheet", ""),
    ("roofline.csv", "the chip's ceilings, measured", "a spreadsheet", ""),
    ("*.csv", "table", "a spreadsheet", ""),
    ("*.html", "page", "this browser", ""),
)
_HOT_KERNELS = 8
_STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x00-\x1f\x7f-\x9f]")
_TAIL = 1 << 14


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
    """Or "ok", "skipped" (the machine lacks what it needs), "failed", "interrupted"."""
    reason: str = ""
    """Why it was skipped or has failed, in its own words."""
    seconds: float = 0.0
    exit_status: int | None = None

    @property
    def shown_status(self) -> str:
        return "FAILED" if self.status == "failed" else self.status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.profilers.run_all",
        description=__doc__.split("\n\n")[0],
        usage="%(prog)s --folder DIR --output-dir DIR [options] SCRIPT... [-- flags of the model]",
        epilog="Exit status: 0 done (what the machine has no tool for is skipped), 1 a script "
        "failed, 2 wrong usage, 130 interrupted (the table has what was completed).",
    )
    add = parser.add_argument
    add("scripts", nargs="+", metavar="SCRIPT", help="run_*.py or run_*.sh of the folder")
    add("--folder", type=Path, required=True, metavar="DIR", help="of the version")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="a folder a tool below it")
    add("--steps", metavar="N", help="training steps (default: each script's own)")
    add("--dry-run", action="store_true", help="print every script's commands and run nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    arguments = build_parser().parse_args(words[:split])
    arguments.model_flags = words[split + 1 :]
    arguments.output_dir = arguments.output_dir.absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's Ctrl-C
    return errors.exit_status(
        lambda: _profile(arguments), interrupted="interrupted before a profiler was started"
    )


def _profile(arguments: argparse.Namespace) -> int:
    version = _version_of(arguments.folder)
    outcomes = [_planned(arguments.folder, script) for script in arguments.scripts]
    if arguments.dry_run:
        return _dry_run(outcomes, arguments)
    errors.require_rich()
    if importlib.util.find_spec("jinja2") is None:
        raise NotOnThisMachine("jinja2 is missing, which PyTorch brings: run `make setup`")
    _prepare_folder(arguments.output_dir)
    interrupted = _run_each(outcomes, arguments)
    _show(version, outcomes, arguments.output_dir)
    for path in write_summary(version, outcomes, arguments):
        print(f"Written: {path}")
    if interrupted:
        print("interrupted: the table has what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    failed = any(outcome.status == "failed" for outcome in outcomes)
    return errors.ANSWER_IS_NO if failed else errors.DONE


def _version_of(folder: Path) -> Version:
    for version in versions.VERSIONS.values():
        if version.folder == folder.resolve().name:
            return version
    raise WorkshopError(f"--folder {folder}: no version lives there")


def _planned(folder: Path, script: str) -> Outcome:
    tool = Path(script).stem.removeprefix("run_")
    if tool not in QUESTIONS or not (folder / script).is_file():
        known = ", ".join(QUESTIONS)
        raise WorkshopError(f"{folder / script}: no such script of a profiler; there are {known}")
    return Outcome(tool, script, QUESTIONS[tool], output=tool, log=f"{tool}.log")


# --- running -------------------------------------------------------------------------------------


def _command(outcome: Outcome, arguments: argparse.Namespace) -> list[str]:
    program = sys.executable if outcome.script.endswith(".py") else "bash"
    command = [program, str(arguments.folder / outcome.script)]
    command += ["--output-dir", str(arguments.output_dir / outcome.output)]
    command += ["--steps", arguments.steps] if arguments.steps else []
    command += ["--dry-run"] if arguments.dry_run else []
    return [*command, "--", *arguments.model_flags]


def _environment() -> dict[str, str]:
    # The table in a log is as wide as a page.
    return {"COLUMNS": "132"} | os.environ | {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}


def _dry_run(outcomes: list[Outcome], arguments: argparse.Namespace) -> int:
    worst = errors.DONE
    for outcome in outcomes:
        print(f"# --- {outcome.script}: {outcome.question}", flush=True)
        command = _command(outcome, arguments)
        status = subprocess.run(command, env=_environment(), check=False).returncode
        if status != errors.NOT_ON_THIS_MACHINE:
            worst = worst or status
    return worst


def _prepare_folder(folder: Path) -> None:
    """Makes the folder, and takes the summary of an earlier run out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY_FILE, PAGE_FILE):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(path: Path, error: OSError) -> WorkshopError:
    return WorkshopError(f"{path} can't be written ({error.strerror}): choose another --output-dir")


def _run_each(outcomes: list[Outcome], arguments: argparse.Namespace) -> bool:
    """Runs the scripts, and fills their outcomes; whether Ctrl-C ended them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    console = Console(stderr=True)
    count = TextColumn("{task.completed}/{task.total}")
    what = TextColumn("{task.description}", markup=False)  # lines as the script printed them
    columns = (BarColumn(20), count, TimeElapsedColumn(), what)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(outcomes))
        for outcome in outcomes:
            started = time.monotonic()
            log = arguments.output_dir / outcome.log
            process = _start(_command(outcome, arguments), log)
            try:
                while process.poll() is None:
                    line = next(_last_lines(log), "")
                    progress.update(task, description=f"{outcome.script}: {line[:70]}")
                    _wait(process, seconds=0.5)
            except KeyboardInterrupt:
                _stop(process)
                outcome.status = "interrupted"
            outcome.seconds = time.monotonic() - started
            outcome.exit_status = process.returncode
            if outcome.status == "interrupted":
                return True
            _judge(outcome, log)
            reason = f": {outcome.reason}" if outcome.reason else ""
            line = f"{outcome.script}: {outcome.shown_status}{reason} ({outcome.seconds:.0f} s)"
            console.print(Text(line), soft_wrap=True)
            progress.advance(task)
    return False


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a script as the head of its own process group: Ctrl-C reaches us alone, and we end
    all of the group, however deep a profiler has put the program."""
    try:
        with log.open("wb") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
    except OSError as error:
        raise _unwritable(log, error) from None


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits for the process to end, but no longer than that."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a script and all that it has started: as Ctrl-C would, then for good."""
    for signal_, seconds in ((signal.SIGINT, SECONDS_TO_STOP), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, signal_)
            _wait(process, seconds)
        except ProcessLookupError:
            break
        except KeyboardInterrupt:
            continue
    process.wait()


def _judge(outcome: Outcome, log: Path) -> None:
    status = outcome.exit_status
    assert status is not None
    if status == errors.DONE:
        outcome.status = "ok"
        return
    outcome.status = "skipped" if status == errors.NOT_ON_THIS_MACHINE else "failed"
    if status < 0:
        outcome.reason = f"ended by {signal.Signals(-status).name}"
        return
    lines = list(_last_lines(log))
    told = (line for line in lines if line.startswith(("skipped: ", "error: ")))
    last = next(told, lines[0] if lines else f"exit status {status}, no message")
    outcome.reason = last.removeprefix("skipped: ").removeprefix("error: ")


def _last_lines(log: Path) -> Iterator[str]:
    """The lines at the end of a log, the last one first, without terminal codes."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        text = file.read().decode(errors="replace")
    for line in reversed(re.split(r"[\r\n]+", text)):
        plain = _CONTROL.sub("", line).strip()
        if plain:
            yield plain


# --- summing up ----------------------------------------------------------------------------------


def _show(version: Version, outcomes: list[Outcome], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=132)
    title = Text(f"profilers of {version.key} ({version.title}); outputs in {folder}")
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("tool", no_wrap=True)
    table.add_column("question it answers", ratio=3)
    table.add_column("result", ratio=3)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("output", no_wrap=True)
    for outcome in outcomes:
        result = outcome.shown_status + (f": {outcome.reason}" if outcome.reason else "")
        where = {"ok": f"{outcome.output}/", "failed": outcome.log}.get(outcome.status, "-")
        seconds = f"{outcome.seconds:.0f}" if outcome.exit_status is not None else "-"
        cells = (outcome.tool, outcome.question, result, seconds, where)
        table.add_row(*(Text(cell) for cell in cells), style=_STYLES.get(outcome.status))
    console.print(table)


def write_summary(
    version: Version, outcomes: list[Outcome], arguments: argparse.Namespace
) -> list[Path]:
    """Writes SUMMARY_FILE and PAGE_FILE; their paths."""
    folder = arguments.output_dir
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = {
        "schema_version": SCHEMA_VERSION,
        "created": created,
        "version": version.key,
        "model_flags": arguments.model_flags,
        "tools": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    page = render_page(version, outcomes, created, arguments.model_flags, folder)
    _write(folder / SUMMARY_FILE, json.dumps(content, indent=1) + "\n")
    _write(folder / PAGE_FILE, page)
    return [folder / SUMMARY_FILE, folder / PAGE_FILE]


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all. The package's own function for that is not for here: it
    comes with PyTorch, and this must also tell of a machine where PyTorch can't be imported."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def render_page(
    version: Version, outcomes: list[Outcome], created: str, flags: list[str], folder: Path
) -> str:
    """The summary page, which needs nothing beside itself.

    Args:
        folder: the summary's, to which links are relative.
    """
    import jinja2

    template = Path(__file__).with_name("summary.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    tools = [
        {
            "outcome": outcome,
            "log": _link(folder / outcome.log, folder),
            "files": _files(folder / outcome.output, folder) if _has_outputs(outcome) else [],
            "kernels": _hot_list(folder / outcome.output) if _has_outputs(outcome) else [],
        }
        for outcome in outcomes
    ]
    return environment.from_string(template).render(
        version=version, created=created, flags=" ".join(flags), tools=tools
    )


def _has_outputs(outcome: Outcome) -> bool:
    """A tool that was skipped may have outputs too, but of another day."""
    return outcome.status in ("ok", "failed", "interrupted")


def _files(output: Path, folder: Path) -> list[dict[str, str]]:
    return [
        {"href": _link(path, folder), "name": str(path.relative_to(output))} | describe(path)
        for path in sorted(output.rglob("*"))
        if path.is_file()
    ]


def _link(path: Path, folder: Path) -> str:
    return urllib.parse.quote(path.relative_to(folder).as_posix())


def describe(path: Path) -> dict[str, str]:
    """What a profiler's file is, what opens it, where that is, and the file's size."""
    fitting = (rest for pattern, *rest in _KINDS if fnmatch.fnmatch(path.name, pattern))
    what, opener, url = next(fitting, ("", "", ""))
    size = path.stat().st_size
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    return {"what": what, "opener": opener, "url": url, "size": shown}


def _hot_list(output: Path) -> list[dict[str, str]]:
    """The longest kernels of the kernel table that a script left; none if it left none."""
    from workshop.profilers.names import display_name

    try:
        kernels = json.loads((output / "kernels.json").read_text(encoding="utf-8"))["kernels"]
        return [
            {
                "name": display_name(kernel["name"], 90),
                "category": kernel["category"],
                "calls": f"{kernel['calls']:,}",
                "total": f"{kernel['total_ns'] / 1e6:,.3f}",
                "share": f"{kernel['share']:.1%}",
            }
            for kernel in kernels[:_HOT_KERNELS]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


if __name__ == "__main__":
    sys.exit(main())
