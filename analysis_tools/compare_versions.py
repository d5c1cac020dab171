"""Trains the versions side by side and prints what each is worth, or rebuilds that from results.

Each version runs in its own process, and the processes alternate (V1 V2 V4, V4 V2 V1, ...), so
that a machine that grows hot or busy does so for all. Each first run passes the gate before it
is timed; a version that fails it gets a row with the reason and no numbers, as does one that can't
run on this machine. V3 without a GPU runs once, in Triton's interpreter: its row has all but times.

--waterfall goes from V1 to V4 and V3 one change at a time; --sweep lets one size grow, up to where
each version's memory ends.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import (  # noqa: E402
    errors,
    records,
    results,
    tables,
    versions,
)
from workshop.arguments import parse  # noqa: E402
from workshop.compare import rows, sessions, sweep, waterfall  # noqa: E402
from workshop.compare.rows import Row  # noqa: E402
from workshop.compare.sessions import Plan, run_plans  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402
from workshop.request import USUAL  # noqa: E402
from workshop.results import RunResult  # noqa: E402
from workshop.run import interpreter, presets  # noqa: E402
from workshop.show import charts, comparisons  # noqa: E402
from workshop.tables import escape, escape_block  # noqa: E402

STEPS, WARMUP_STEPS, REPEATS = USUAL.timed, USUAL.warmup, 3


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 done, 1 a check or a version failed, 2 wrong usage, "
        "77 this machine can run none of them, 130 interrupted by Ctrl-C or SIGTERM (what was "
        "completed is saved and shown). A size at which memory runs out is no failure of a sweep.",
    )
    add_run_flags(parser, repeats=REPEATS)
    kinds = parser.add_mutually_exclusive_group()
    what = "from V1 to each of these versions one change at a time (default: v4 and, on a GPU, v3)"
    kinds.add_argument("--waterfall", nargs="*", metavar="V", help=what)
    what = (
        f"let one of {', '.join(sweep.AXES)} grow: `seq-len 128 256 512`, or `seq-len 128 ... "
        "8192` for each twice the one before; with --from-results all sizes there are, if none is "
        "given"
    )
    kinds.add_argument("--sweep", nargs="+", metavar=("SIZE", "N"), help=what)
    what = (
        "comparison.json, .csv, .md, .png and runs/ go there, or waterfall.* or sweep.* (default: "
        "results/ of this checkout); with --from-results nothing is written unless it is given"
    )
    add = parser.add_argument
    add("--output-dir", type=Path, help=what)
    what = (
        "rebuild everything from the result files in DIR, training nothing; --versions, --config "
        "and --precision choose the rows of its tables"
    )
    add("--from-results", type=Path, metavar="DIR", help=what)
    add("--format", choices=tables.FORMATS, default="table", help="of the output (default table)")
    return parser


def add_run_flags(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """The flags that say what is run; `repeats` is the default of --repeats."""
    every, peers = ", ".join(versions.available()), ", ".join(versions.PEERS)
    configs = f"of {', '.join(presets.PRESETS)} (default: tiny without a GPU, else small)"
    precisions = (
        "fp32, tf32, bf16, fp16, fp8, fp8-rowwise or auto: bf16 on a GPU that has it, else fp32 "
        "(default auto)"
    )
    add = parser.add_argument
    add("--versions", nargs="+", metavar="V", help=f"of {every} (default: all), and peers {peers}")
    add("--config", nargs="+", metavar="PRESET", help=configs)
    add("--precision", nargs="+", default=["auto"], metavar="P", help=precisions)
    for flag, default, what in (
        ("--num-steps", STEPS, "timed steps a run"),
        ("--warmup-steps", WARMUP_STEPS, "steps before them"),
        ("--repeats", repeats, "processes a version"),
        ("--jobs", 1, "processes that prepare at the same time; each is timed alone"),
    ):
        add(flag, type=int, default=default, metavar="N", help=f"{what} (default {default})")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add("--data", choices=("text", "synthetic"), default="text", help="default %(default)s")
    add("--seed", type=int, default=42, help="of weights and batches (default 42)")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: _compare(arguments),
        interrupted="interrupted: --from-results shows what was completed",
    )


def _compare(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    interrupted = False
    writes = arguments.from_results is None or arguments.output_dir is not None
    arguments.output_dir = arguments.output_dir or results.DEFAULT_FOLDER
    study = _study(arguments)
    if arguments.from_results is not None:
        runs = records.load_folder(arguments.from_results, RunResult)
        found = study.find(runs)
    else:
        runs, interrupted = study.run(results.new_session())
        found = study.build(runs)
    if interrupted and not found:
        print("interrupted before a run was complete: nothing saved", file=sys.stderr)
        return errors.INTERRUPTED
    report = study.report(found)
    names: list[str] = []
    try:
        # Before anything is shown: the output may be closed before its end.
        names = write(study, found, report, runs, arguments.output_dir) if writes else []
    finally:  # a full disk does not cost the table
        report.show(arguments.format)
    if writes:
        # Not in a form that a program reads.
        stream = sys.stdout if arguments.format == "table" else sys.stderr
        print(f"Written: {', '.join(names)}", file=stream)
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    if all(row.status == "skipped" for row in study.rows(found)):
        return errors.NOT_ON_THIS_MACHINE
    return errors.ANSWER_IS_NO if any(one.failed for one in found) else errors.DONE


# --- the kinds of comparison ---------------------------------------------------------------------

Outcome = tuple[list[RunResult], bool]
"""The runs, and whether Ctrl-C ended them."""


@dataclass(frozen=True)
class Study:
    """A kind of comparison: how it is run, made from runs, shown and written to files NAME.*."""

    name: str
    run: Callable[[str], Outcome]
    """Takes a session's name."""
    build: Callable[[list[RunResult]], list[Any]]
    """From the runs of one session."""
    find: Callable[[list[RunResult]], list[Any]]
    """From the runs of any sessions; raises WorkshopError if there is none in them."""
    report: Callable[[list[Any]], tables.Report]
    draw: Callable[[list[Any]], Any]
    rows: Callable[[list[Any]], list[Row]]


def _study(arguments: argparse.Namespace) -> Study:
    if arguments.waterfall is not None:
        return _waterfall(arguments)
    return _ladder(arguments) if arguments.sweep is None else _sweep(arguments)


def _ladder(arguments: argparse.Namespace) -> Study:
    def run(session: str) -> Outcome:
        plans = make_plans(arguments)
        results.prepare_folder(arguments.output_dir)
        return run_plans(plans, arguments, session)

    def find(runs: list[RunResult]) -> list[Row]:
        shown = rows.preferred(runs)
        if left_out := len(runs) - len(shown):
            words = f"{left_out} runs left out: --waterfall or --sweep shows them"
            print(words, file=sys.stderr)
        what = "runs of the --versions, --config and --precision given"
        return _some(rows.build_rows(_asked_for(arguments, shown)), arguments, what)

    return Study(
        "comparison",
        run,
        rows.build_rows,
        find,
        comparisons.of_rows,
        charts.draw_rows,
        list,
    )


def _waterfall(arguments: argparse.Namespace) -> Study:
    if arguments.versions is not None:
        raise WorkshopError("--versions: name a waterfall's end after --waterfall, as in v3")
    planned = None if arguments.from_results else waterfall.plan(arguments)

    def run(session: str) -> Outcome:
        assert planned is not None
        _prepare(arguments, planned.left_out)
        return run_plans(planned.plans, arguments, session)

    def build(runs: list[RunResult]) -> list[waterfall.Waterfall]:
        return waterfall.build(runs, planned.requested if planned else None)

    def find(runs: list[RunResult]) -> list[waterfall.Waterfall]:
        wanted = waterfall.targets(arguments.waterfall, on_gpu=True)
        found = [one for one in waterfall.build(runs) if one.to in wanted]
        return _some(found, arguments, "waterfall: V1 at fp32 and the versions' single changes")

    def all_rows(found: list[waterfall.Waterfall]) -> list[Row]:
        return [step.row for one in found for step in one.steps if step.row]

    return Study(
        "waterfall",
        run,
        build,
        find,
        comparisons.of_waterfalls,
        charts.draw_waterfalls,
        all_rows,
    )


def _sweep(arguments: argparse.Namespace) -> Study:
    axis, sizes = sweep.parse(arguments.sweep)
    if arguments.jobs > 1:
        raise WorkshopError("--jobs: no more than 1 with --sweep, where a size may fill the memory")
    scope = None if arguments.from_results else sweep.plan(arguments)

    def run(session: str) -> Outcome:
        assert scope is not None
        _prepare(arguments, scope.left_out)
        plans = sweep.plans(scope, arguments, session)
        points = len(scope.sizes) * len(scope.keys) * len(scope.presets) * len(scope.precisions)
        total = points * arguments.repeats
        return run_plans(plans, arguments, session, keys=scope.keys, total=total)

    def build(runs: list[RunResult]) -> list[sweep.Sweep]:
        return sweep.build(runs, axis, least=1)

    def find(runs: list[RunResult]) -> list[sweep.Sweep]:
        found = sweep.build(runs, axis, sizes=sizes)
        return _some(found, arguments, f"sweep over {axis.flag}: two sizes of one session")

    def all_rows(found: list[sweep.Sweep]) -> list[Row]:
        return [p.row for one in found for curve in one.curves for p in curve.points]

    return Study(
        "sweep",
        run,
        build,
        find,
        comparisons.of_sweeps,
        charts.draw_sweeps,
        all_rows,
    )


def _prepare(arguments: argparse.Namespace, left_out: list[str]) -> None:
    results.prepare_folder(arguments.output_dir)
    for line in left_out:
        print(line, file=sys.stderr)


def _asked_for(arguments: argparse.Namespace, runs: list[RunResult]) -> list[RunResult]:
    """The runs of the given versions and V1, presets and precisions: all where none is given."""
    keys = versions.baseline_first([versions.BASELINE, *(arguments.versions or [])])
    return [
        run for run in runs
        if (not arguments.versions or run.version in keys)
        and (not arguments.config or run.config_name in arguments.config)
        and (arguments.precision == ["auto"] or run.precision in arguments.precision)
    ]  # fmt: skip


def _some(found: list[Any], arguments: argparse.Namespace, what: str) -> list[Any]:
    if not found:
        raise WorkshopError(f"results {arguments.from_results}: no {what}, in it")
    return found


# --- the ladder ----------------------------------------------------------------------------------


def make_plans(arguments: argparse.Namespace) -> list[Plan]:
    """All processes of a comparison, alternating.

    Raises:
        WorkshopError: an invalid version, preset, precision, device or count.
    """
    device, configs, precisions = sessions.check(arguments)
    keys = versions.baseline_first(arguments.versions or versions.available())
    slow = {key for key in keys if interpreter.serves(versions.get_version(key), device)}
    plans = []
    for config, name in itertools.product(configs, precisions):
        own = [Plan(key, config, name, interpreted=key in slow) for key in keys]
        plans += sessions.alternate(own, arguments.repeats)
    return plans


# --- files ---------------------------------------------------------------------------------------


def write(
    study: Study, found: Sequence[Any], report: tables.Report, runs: list[RunResult], folder: Path
) -> list[str]:
    """Writes NAME.json, .csv, .md and .png; their paths. They are derived from runs/: a later
    comparison in the same folder replaces them, and --from-results rebuilds the others."""
    results.prepare_folder(folder)
    sessions = sorted({one.session for one in found})
    software = {
        ", ".join(f"{name} {version}" for name, version in run.software.items() if version)
        for run in runs
        if run.session in sessions
    }
    heading = f"# {study.name.capitalize()} {escape(', '.join(sessions))}"
    text = [heading, *map(escape_block, sorted(software)), tables.markdown(report.tables)]
    content = report.as_json() | {"session": sessions[-1]}
    contents: dict[str, results.Content] = {
        "json": results.json_text(content),
        "csv": report.as_csv(),
        "md": "\n\n".join(text) + "\n",
    }
    if study.name != "comparison" or any(row.step_ms for row in found):
        contents["png"] = lambda path: charts.save(study.draw, list(found), path)
    paths = {folder / f"{study.name}.{suffix}": content for suffix, content in contents.items()}
    results.write_together(paths, gone=[folder / f"{study.name}.png"])
    return list(map(str, paths))


if __name__ == "__main__":
    sys.exit(main())
