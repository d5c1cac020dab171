"""Trains the versions side by side and prints what each is worth, or rebuilds that from results.

Each version runs in its own process, and the processes alternate (V1 V2 V4, V4 V2 V1, ...), so
that a machine that grows hot or busy does so for all. Each first run passes the gate before it
is timed; a version whose gate is red gets a row with the reason and no figures. So does one that
needs what this machine lacks. V3 without a GPU runs once, in Triton's interpreter: its row has
all but times.
"""

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workshop import (  # noqa: E402
    comparison,
    errors,
    hardware,
    interpreter,
    precision,
    presets,
    results,
    timing,
    versions,
)
from workshop.comparison import Row  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402
from workshop.results import RunResult  # noqa: E402

FORMATS = ("table", "markdown", "json", "csv")
SECONDS_TO_STOP = 20
SLOW = (
    "in Triton's interpreter on this machine, which takes a minute or more: one run of a step or "
    "two, to check it; its time is not compared"
)


@dataclass(frozen=True)
class Plan:
    """One process to run."""

    version: str
    config: str
    precision: str
    repeat: int
    interpreted: bool = False
    """Whether Triton's interpreter runs it: then it is one process that times a single step."""

    @property
    def label(self) -> str:
        return f"{self.version} {self.config} {self.precision}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 done, 1 a gate is red or a version failed, 2 wrong usage, "
        "77 this machine can run none of them, 130 interrupted (what was completed is saved and "
        "shown).",
    )
    add_run_flags(parser, repeats=3)
    add = parser.add_argument
    add(
        "--output-dir",
        type=Path,
        help="comparison.json, .md, .png and runs/ go there (default: results/ of this checkout); "
        "with --from-results nothing is written unless it is given",
    )
    add(
        "--from-results",
        type=Path,
        metavar="DIR",
        help="rebuild everything from the result files in DIR, training nothing",
    )
    add("--format", choices=FORMATS, default="table", help="of what is printed (default table)")
    return parser


def add_run_flags(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """The flags that say what is run; `repeats` is the default of --repeats."""
    add = parser.add_argument
    add(
        "--versions",
        nargs="+",
        default=versions.available(),
        metavar="V",
        help=f"of {', '.join(versions.available())} (default: all)",
    )
    add(
        "--config",
        nargs="+",
        metavar="PRESET",
        help=f"of {', '.join(presets.PRESETS)} (default: tiny without a GPU, else small)",
    )
    add(
        "--precision",
        nargs="+",
        default=["auto"],
        metavar="P",
        help="fp32, tf32, bf16, fp16 or auto: bf16 on a GPU that has it, else fp32 (default auto)",
    )
    add("--num-steps", type=int, default=20, metavar="N", help="timed steps a run (default 20)")
    add("--warmup-steps", type=int, default=5, metavar="N", help="before them (default 5)")
    add(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help="processes a version (default %(default)s)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add("--data", choices=("text", "synthetic"), default="text", help="default %(default)s")
    add("--seed", type=int, default=42, help="of weights and batches (default 42)")


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return errors.exit_status(
        lambda: _compare(arguments),
        interrupted="interrupted: --from-results shows what was completed",
    )


def _compare(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    interrupted = False
    writes = arguments.from_results is None or arguments.output_dir is not None
    arguments.output_dir = arguments.output_dir or results.DEFAULT_FOLDER
    if arguments.from_results is not None:
        runs = results.load_folder(arguments.from_results)
        session = runs[-1].session
    else:
        plans = make_plans(arguments)
        results.prepare_folder(arguments.output_dir)
        session = results.new_session()
        runs, interrupted = run_plans(plans, arguments, session)
    rows = comparison.build_rows(runs)
    if interrupted and not rows:
        print("interrupted before a run was complete: nothing saved", file=sys.stderr)
        return errors.INTERRUPTED
    show(rows, arguments.format)
    if writes:
        names = write_outputs(rows, runs, session, arguments.output_dir)
        # Not among what a program is to read.
        stream = sys.stdout if arguments.format == "table" else sys.stderr
        print(f"Written: {', '.join(names)}", file=stream)
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    if all(row.status == "skipped" for row in rows):
        return errors.NOT_ON_THIS_MACHINE
    return errors.ANSWER_IS_NO if any(row.failed for row in rows) else errors.DONE


# --- running -------------------------------------------------------------------------------------


def make_plans(arguments: argparse.Namespace) -> list[Plan]:
    """All processes of a comparison, alternating.

    Raises:
        WorkshopError: a version, preset, precision, device or count that can't be.
    """
    for name in ("num_steps", "warmup_steps", "repeats"):
        if getattr(arguments, name) < 1:
            value = getattr(arguments, name)
            raise WorkshopError(f"--{name.replace('_', '-')} {value}: it must be at least 1")
    if not 0 <= arguments.seed < 2**63:
        raise WorkshopError(f"--seed {arguments.seed}: it must lie between 0 and 2^63")
    device = hardware.get_device(arguments.device)
    keys = [versions.get_version(key).key for key in dict.fromkeys(arguments.versions)]
    configs = list(dict.fromkeys(arguments.config or [presets.default_preset(device.type)]))
    for config in configs:
        presets.get_preset(config)
    names = [precision.get_precision(name, device).name for name in arguments.precision]
    slow = {key for key in keys if interpreter.serves(versions.get_version(key), device)}
    plans = []
    for config in configs:
        for name in dict.fromkeys(names):
            for repeat in range(arguments.repeats):
                order = keys if repeat % 2 == 0 else keys[::-1]
                plans += [
                    Plan(key, config, name, repeat, interpreted=key in slow)
                    for key in order
                    if repeat == 0 or key not in slow
                ]
    return plans


def run_plans(
    plans: list[Plan], arguments: argparse.Namespace, session: str
) -> tuple[list[RunResult], bool]:
    """Runs the processes one after the other; what they left, and whether Ctrl-C ended them.

    A version that failed at a size is not run there again: it has its row.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    failed: set[str] = set()
    folder = arguments.output_dir / "runs" / session
    interrupted = False
    tell = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    plans = _skip_what_lacks(plans, arguments, session, tell)
    count = TextColumn("{task.completed}/{task.total}")
    what = TextColumn("{task.description}", markup=False)  # lines as the child printed them
    columns = (BarColumn(20), count, TimeElapsedColumn(), what)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(plans))
        for plan in plans:
            if plan.label not in failed:
                run = _Child(plan, arguments, session)
                try:
                    for line in run.lines():
                        progress.update(task, description=f"{plan.label}: {line[:70]}")
                    outcome = run.outcome(folder)
                except KeyboardInterrupt:
                    run.interrupt()
                    interrupted = True
                    break
                repeats = 1 if plan.interpreted else arguments.repeats
                tell(f"{plan.label}, run {plan.repeat + 1} of {repeats}: {outcome}")
                if run.failed:
                    failed.add(plan.label)
            progress.advance(task)
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [results.load(path) for path in paths], interrupted


def _skip_what_lacks(
    plans: list[Plan],
    arguments: argparse.Namespace,
    session: str,
    tell: Callable[[str], object],
) -> list[Plan]:
    """The plans of the versions that this machine has all for; each other one's row gets its
    record. Says so, and which versions will be interpreted."""
    keys = dict.fromkeys(plan.version for plan in plans)
    lacks = {key: versions.missing(versions.get_version(key)) for key in keys}
    slow = {plan.version for plan in plans if plan.interpreted}
    for key, lack in lacks.items():
        if lack or key in slow:
            tell(f"{key}: {f'skipped: {lack}' if lack else SLOW}")
    for plan in plans:
        lack = lacks[plan.version]
        if lack and plan.repeat == 0:
            save_record(plan, arguments, session, "skipped", lack)
    return [plan for plan in plans if not lacks[plan.version]]


class _Child:
    """One version's process: its output line by line, and what it left behind."""

    def __init__(self, plan: Plan, arguments: argparse.Namespace, session: str) -> None:
        self.plan, self.arguments, self.session = plan, arguments, session
        self.failed = False
        self._gate = self._result = ""
        self._stderr: list[str] = []
        version = versions.get_version(plan.version)
        command = [sys.executable, str(version.path), "--config", plan.config]
        steps, warmup = arguments.num_steps, arguments.warmup_steps
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if plan.interpreted:
            steps = warmup = 1  # the gate has shown what such a run can show
            environment[interpreter.VARIABLE] = "1"  # for a CPU that has a GPU beside it
        else:
            environment.pop(interpreter.VARIABLE, None)  # torch.compile's kernels obey it too
        command += ["--num-steps", str(steps), "--warmup-steps", str(warmup)]
        for flag in ("device", "data", "seed", "output_dir"):
            command += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
        command += ["--precision", plan.precision, "--session", session]
        if plan.repeat > 0:  # the first run has passed the gate, with the same code and sizes
            command.append("--no-gate")
        # A session of its own: a Ctrl-C at the terminal reaches us alone, and we pass it on once.
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self._stderr.extend(line.rstrip() for line in self._process.stderr if line.strip())

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip():
                self._gate = line.strip() if line.startswith("gate:") else self._gate
                self._result = line.strip() if line.startswith("Result: ") else self._result
                yield line.strip()
        self._process.wait()

    def interrupt(self) -> None:
        """Asks the process to end as at Ctrl-C, so that it saves what it has; then insists."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=SECONDS_TO_STOP)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()

    def outcome(self, folder: Path) -> str:
        """What to say of the finished process. One that left no result gets a record of its
        failure, so that its row can be rebuilt."""
        self._reader.join(timeout=SECONDS_TO_STOP)
        status = self._process.returncode
        if status == errors.DONE:
            result = results.load(Path(self._result.removeprefix("Result: ")))
            if result.interpreted:
                return f"{interpreter.NOT_COMPARABLE}; {self._gate}"
            return f"{timing.median(result.step_ms):.2f} ms a step"
        self.failed = True
        if status == errors.ANSWER_IS_NO and self._result:
            return self._gate
        reason = self._reason(status)
        if status == errors.NOT_ON_THIS_MACHINE:
            save_record(self.plan, self.arguments, self.session, "skipped", reason)
            return f"skipped: {reason}"
        log = folder / f"{self.plan.label.replace(' ', '_')}_{self.plan.repeat + 1}.log"
        results.prepare_folder(folder)
        results.write_text(log, "\n".join(self._stderr) + "\n")
        save_record(self.plan, self.arguments, self.session, "failed", reason)
        return reason

    def _reason(self, status: int) -> str:
        if status == -signal.SIGKILL:
            return "killed from outside (SIGKILL): most likely the machine ran out of memory"
        if status < 0:
            return f"crashed with {signal.Signals(-status).name}"
        last = self._stderr[-1] if self._stderr else "no message"
        told = (errors.ANSWER_IS_NO, errors.WRONG_USAGE, errors.NOT_ON_THIS_MACHINE)
        return last.removeprefix("error: ") if status in told else f"exit {status}: {last}"


def save_record(
    plan: Plan, arguments: argparse.Namespace, session: str, status: str, reason: str
) -> None:
    """Writes a result without figures, for a process that could not write its own or that was
    not started."""
    preset = presets.get_preset(plan.config)
    config = versions.load(versions.BASELINE).TinyLlamaConfig(**preset.model())
    record = RunResult(
        version=plan.version,
        session=session,
        config_name=plan.config,
        config=dataclasses.asdict(config),
        batch_size=preset.batch_size,
        seq_len=preset.seq_len,
        precision=plan.precision,
        warmup_steps=arguments.warmup_steps,
        device=hardware.describe(hardware.get_device(arguments.device)),
        software=results.describe_software(),
        git_commit=results.git_commit(),
        created=results.now(),
        status=status,
        error=reason,
    )
    results.save(record, arguments.output_dir)


# --- showing -------------------------------------------------------------------------------------


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that may be compared with each other, together."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return list(found.values())


def title(rows: list[Row]) -> str:
    row = rows[0]
    size = f"{row.config}: {row.batch_size} x {row.seq_len} tokens"
    return f"{size}, {row.precision}, {row.device}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def speed_cells(row: Row) -> list[str]:
    spread = "" if row.step_spread is None else f" ±{row.step_spread / 2:.1%}"
    return [
        row.label,
        _number(row.samples_per_s, ",.1f"),
        _number(row.tokens_per_s, ",.0f"),
        _number(row.step_ms, ",.2f") + spread,
        _number(row.forward_ms, ",.2f"),
        _number(row.backward_ms, ",.2f"),
        _number(row.optimizer_ms, ",.2f"),
        row.verdict(),
    ]


SPEED_HEADER = [
    "version",
    "samples/s",
    "tokens/s",
    "step ms",
    "forward",
    "backward",
    "optimizer",
    "speed-up [95%]",
]


def proof_cells(row: Row) -> list[str]:
    gradients = "-" if row.tensors_total is None else f"{row.tensors_with_grad}/{row.tensors_total}"
    loss = (
        "-" if row.loss_first is None else f"{row.loss_first:.3f} → {_number(row.loss_last, '.3f')}"
    )
    compared = row.memory_reduction is not None and row.verdict() != "baseline"
    reduction = f"{-row.memory_reduction:+.0%}" if compared and row.memory_reduction else "-"
    return [
        row.label,
        {"pass": "pass", "fail": "FAIL"}.get(row.parity, row.parity),
        gradients,
        loss,
        _number(row.peak_memory_mb, ",.0f"),
        reduction,
        _number(row.tflops, ",.3g"),
        "-" if row.peak_share is None else f"{row.peak_share:.1%}",
    ]


PROOF_HEADER = [
    "version",
    "gate",
    "gradients",
    "loss",
    "peak MB",
    "memory",
    "TFLOP/s",
    "of peak",
]


def notes(rows: list[Row]) -> list[str]:
    """What the figures alone would not say."""
    lines = [f"{row.label}: {row.note}" for row in rows if row.note]
    lines += [f"IMPLAUSIBLE: {sentence}" for row in rows for sentence in row.plausibility]
    sources = {
        f"{row.peak_tflops:,.3g} TFLOP/s ({row.peak_source})" for row in rows if row.peak_tflops
    }
    if len(sources) == 1:
        lines.append(f"peak: {sources.pop()}")
    elif sources:
        lines.append("peak: the highest a large matrix product reached in each version's runs")
    if any(row.peak_share is not None and row.peak_share > 1 for row in rows):
        lines.append("more than 100% of peak: other programs ran while the peak was measured")
    return lines


def show(rows: list[Row], form: str) -> None:
    if form == "json":
        print(json.dumps(as_json(rows), indent=1, allow_nan=False))
    elif form == "csv":
        print(as_csv(rows), end="")
    elif form == "markdown":
        print(as_markdown(rows))
    else:
        _show_tables(rows)


STYLES = {"failed": "red", "skipped": "dim"}


def _show_tables(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=120, highlight=False, markup=False)
    for group in groups(rows):
        for header, cells, caption in (
            (SPEED_HEADER, speed_cells, title(group)),
            (PROOF_HEADER, proof_cells, "the same model? and at what cost"),
        ):
            table = Table(title=caption, title_justify="left", title_style="bold")
            for index, name in enumerate(header):
                table.add_column(name, justify="left" if index == 0 else "right")
            for row in group:
                table.add_row(*cells(row), style=STYLES.get(row.status))
            console.print(table)
        for line in notes(group):
            console.print(line, markup=False)


def as_markdown(rows: list[Row]) -> str:
    parts = []
    for group in groups(rows):
        parts += [f"### {title(group)}", ""]
        for header, cells in ((SPEED_HEADER, speed_cells), (PROOF_HEADER, proof_cells)):
            parts.append("| " + " | ".join(header) + " |")
            parts.append("|" + " --- |" + " ---: |" * (len(header) - 1))
            parts += ["| " + " | ".join(cells(row)) + " |" for row in group]
            parts.append("")
        parts += [f"- {line}" for line in notes(group)]
        parts.append("")
    return "\n".join(parts).rstrip()


def as_json(rows: list[Row]) -> dict[str, object]:
    return {
        "schema_version": comparison.SCHEMA_VERSION,
        "created": results.now(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def as_csv(rows: list[Row]) -> str:
    import csv
    import io

    skipped = ("plausibility", "memory_mb")
    fields = [f.name for f in dataclasses.fields(Row) if f.name not in skipped]
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return text.getvalue()


# --- files ---------------------------------------------------------------------------------------


def write_outputs(rows: list[Row], runs: list[RunResult], session: str, folder: Path) -> list[str]:
    """comparison.json, .md and .png. They are derived from runs/, so where two comparisons share
    a folder the later one's stand there, and --from-results rebuilds the other's."""
    results.prepare_folder(folder)
    content = as_json(rows) | {"session": session}
    results.write_json(folder / "comparison.json", content)
    software = ", ".join(f"{k} {v}" for k, v in runs[0].software.items() if v)
    header = f"# Comparison {session}\n\n{software}\n\n"
    results.write_text(folder / "comparison.md", header + as_markdown(rows) + "\n")
    names = ["comparison.json", "comparison.md"]
    if any(row.step_ms for row in rows):
        plot(rows, folder / "comparison.png")
        names.append("comparison.png")
    return [str(folder / name) for name in names]


PHASES = (("forward_ms", "forward", "#3b7dd8"), ("backward_ms", "backward", "#e07b39"))
PHASE_COLOURS = (*PHASES, ("optimizer_ms", "optimizer", "#5aa469"))
MEMORY_COLOURS = (
    ("weights", "weights", "#3b7dd8"),
    ("gradients", "gradients", "#e07b39"),
    ("optimizer_state", "AdamW moments", "#5aa469"),
    ("rest", "activations and rest", "#b8b8b8"),
)


def plot(rows: list[Row], target: Path) -> None:
    """Throughput, the step's parts and memory, a line of panels a group, for a projector. An
    interpreted version has words in the place of its times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [
        [row for row in group if row.status in ("timed", "interpreted")]
        for group in groups(rows)
        if any(row.step_ms for row in group)
    ]
    plt.rcParams.update({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        len(shown), 3, figsize=(19.2, 5.4 * len(shown)), squeeze=False, layout="constrained"
    )
    for line, group in zip(axes, shown, strict=True):
        _plot_throughput(line[0], group)
        _plot_stack(line[1], group, PHASE_COLOURS, "time of a step, ms", _phase_value)
        _plot_stack(line[2], group, MEMORY_COLOURS, "peak memory, MB", _memory_value)
        for axis in line[:2]:
            _write_in_place_of_times(axis, group)
        line[0].set_title(title(group), loc="left", fontweight="bold", fontsize=15)
    with results.atomic_path(target) as path:
        figure.savefig(path, dpi=100)
    plt.close(figure)


def _phase_value(row: Row, name: str) -> float:
    return getattr(row, name) or 0.0


def _memory_value(row: Row, name: str) -> float:
    return float(row.memory_mb.get(name, 0.0))


def _plot_throughput(axis, group: list[Row]) -> None:  # type: ignore[no-untyped-def]
    values = [row.tokens_per_s or 0.0 for row in group]
    bars = axis.bar([row.label for row in group], values, color="#44546a", width=0.6)
    verdicts = [row.verdict().split(" [")[0] if row.step_ms else "" for row in group]
    short = [verdict.replace("no significant difference", "no difference") for verdict in verdicts]
    axis.bar_label(bars, short, padding=4, fontweight="bold")
    axis.set_ylabel("tokens a second")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.15)


def _plot_stack(axis, group, parts, label, value) -> None:  # type: ignore[no-untyped-def]
    names = [row.label for row in group]
    bottoms = [0.0] * len(group)
    for field, legend, colour in parts:
        heights = [value(row, field) for row in group]
        axis.bar(names, heights, bottom=bottoms, color=colour, label=legend, width=0.6)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        if not total:  # not measured
            continue
        axis.annotate(
            f"{total:,.3g}" if total < 1000 else f"{total:,.0f}",
            (index, total),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    axis.set_ylabel(label)
    if max(bottoms) >= 1000:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.3)
    axis.legend(frameon=False, fontsize=13, loc="upper right", ncols=2)


def _write_in_place_of_times(axis, group: list[Row]) -> None:  # type: ignore[no-untyped-def]
    for index, row in enumerate(group):
        if row.status == "interpreted":
            axis.annotate(
                interpreter.NOT_COMPARABLE.replace(", ", ",\n"),
                (index, 0),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                color="#707070",
                fontsize=14,
            )


if __name__ == "__main__":
    sys.exit(main())
