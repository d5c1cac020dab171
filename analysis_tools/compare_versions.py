"""Trains the versions side by side and prints what each is worth, or rebuilds that from results.

Each version runs in its own process, and the processes alternate (V1 V2 V4, V4 V2 V1, ...), so
that a machine that grows hot or busy does so for all. Each first run passes the gate before it
is timed; a version that fails it gets a row with the reason and no numbers, as does one that can't
run on this machine. V3 without a GPU runs once, in Triton's interpreter: its row has all but times.

--waterfall goes from V1 to V4 and V3 one change at a time; --sweep lets one size grow, up to where
each version's memory ends.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, records, results, tables, versions
from workshop.arguments import option, run
from workshop.compare import rows, runner, sweep, waterfall
from workshop.compare.rows import Row
from workshop.compare.runner import Asked, Planned, run_plans
from workshop.errors import WorkshopError
from workshop.results import RunResult
from workshop.run import presets
from workshop.show import charts, comparisons, drawing
from workshop.tables import escape, escape_block


@dataclass
class Options(Asked):
    """The command line."""

    waterfall: list[str] | None = option(
        "from V1 to each of these versions one change at a time (default: v4 and, on a GPU, v3)",
        nargs="*",
        metavar="V",
    )
    sweep: list[str] | None = option(
        f"let one of {', '.join(sweep.AXES)} grow: `seq-len 128 256 512`, or `seq-len 128 ... "
        "8192` for each twice the one before; with --from-results all sizes there are by default",
        metavar=("SIZE", "N"),
    )
    output_dir: Path = option(
        "comparison.json, .csv, .md, .png and runs/ go there, or waterfall.* or sweep.* (default: "
        "results/ of this checkout); with --from-results nothing is written unless it is given",
        results.DEFAULT_FOLDER,
    )
    from_results: Path | None = option(
        "rebuild everything from the result files in DIR, training nothing; --versions, --config "
        "and --precision choose the rows of its tables",
        metavar="DIR",
    )
    format: str = option("of the output", "table", choices=tables.FORMATS)


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _compare,
        argv,
        interrupted="interrupted: --from-results shows what was completed",
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 done, 1 a check or a version failed, 2 wrong usage, "
        "77 this machine can run none of them, 130 interrupted by Ctrl-C or SIGTERM (what was "
        "completed is saved and shown). A size at which memory runs out is no failure of a sweep.",
    )


def _compare(options: Options) -> int:
    errors.require("rich")
    study, interrupted = _study(options), False
    writes = options.from_results is None or options.output_dir is not results.DEFAULT_FOLDER
    if options.from_results is not None:
        runs = records.load_folder(options.from_results, RunResult)
        found = study.find(runs)
        if not found:
            raise WorkshopError(f"results {options.from_results}: no {study.what}, in it")
    else:
        session = results.new_session()
        planned = study.plan(session)
        results.prepare_folder(options.output_dir)
        runs, interrupted = run_plans(planned, options, session)
        found = study.build(runs)
    if interrupted and not found:
        print("interrupted before a run was complete: nothing saved", file=sys.stderr)
        return errors.INTERRUPTED
    report = study.report(found)
    names: list[str] = []
    try:
        # Before anything is shown: the output may be closed before its end.
        names = write(study, found, report, runs, options.output_dir) if writes else []
    finally:  # a full disk does not cost the table
        report.show(options.format)
    if writes:
        # Not in a form that a program reads.
        stream = sys.stdout if options.format == "table" else sys.stderr
        print(f"Written: {', '.join(names)}", file=stream)
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    shown = found if study.name == "comparison" else [row for one in found for row in one.rows]
    if all(row.status == "skipped" for row in shown):
        return errors.NOT_ON_THIS_MACHINE
    return errors.ANSWER_IS_NO if any(one.failed for one in found) else errors.DONE


# --- the kinds of comparison ---------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """A kind of comparison: how it is run, made from runs, shown and written to files NAME.*."""

    name: str
    what: str
    """Words for it, in the error where results hold none."""
    plan: Callable[[str], Planned]
    """Takes a session's name."""
    build: Callable[[list[RunResult]], list[Any]]
    """From the runs of one session."""
    find: Callable[[list[RunResult]], list[Any]]
    """From the runs of any sessions."""
    report: Callable[[list[Any]], tables.Report]
    draw: Callable[[list[Any]], Any]


def _study(options: Options) -> Study:
    if options.waterfall is not None and options.sweep is not None:
        raise WorkshopError("--waterfall and --sweep: give one of them")
    if options.waterfall is not None:
        return _waterfall(options, options.waterfall)
    return _ladder(options) if options.sweep is None else _sweep(options, options.sweep)


def _ladder(options: Options) -> Study:
    def find(runs: list[RunResult]) -> list[Row]:
        shown = rows.preferred(runs)
        if skipped := len(runs) - len(shown):
            words = f"{skipped} runs are not shown: --waterfall or --sweep shows them"
            print(words, file=sys.stderr)
        return rows.build_rows(_asked_for(options, shown))

    what = "runs of the --versions, --config and --precision given"
    parts = rows.build_rows, find, comparisons.of_rows, charts.draw_rows
    return Study("comparison", what, lambda session: runner.plan(options), *parts)


def _waterfall(options: Options, ends: list[str]) -> Study:
    requested: waterfall.Requested | None = None

    def plan(session: str) -> Planned:
        nonlocal requested
        planned, requested = waterfall.plan(options, ends)
        return planned

    def build(runs: list[RunResult]) -> list[waterfall.Waterfall]:
        return waterfall.build(runs, requested)

    def find(runs: list[RunResult]) -> list[waterfall.Waterfall]:
        wanted = waterfall.targets(ends, on_gpu=True)
        return [one for one in waterfall.build(runs) if one.to in wanted]

    what = "waterfall: V1 at fp32 and the versions' single changes"
    parts = plan, build, find, comparisons.of_waterfalls, charts.draw_waterfalls
    return Study("waterfall", what, *parts)


def _sweep(options: Options, words: list[str]) -> Study:
    axis, sizes = sweep.parse(words)
    parts = (
        partial(sweep.plan, options, words),
        partial(sweep.build, axis=axis, least=1),
        partial(sweep.build, axis=axis, sizes=sizes),
    )
    what = f"sweep over {axis.flag}: two sizes of one session"
    return Study("sweep", what, *parts, comparisons.of_sweeps, charts.draw_sweeps)


def _asked_for(options: Options, runs: list[RunResult]) -> list[RunResult]:
    """The runs of the given versions and V1, presets and precisions: all where none is given."""
    keys = versions.baseline_first([versions.BASELINE, *(options.versions or [])])
    for name in {*(options.config or [])} - {"custom"}:
        presets.get_preset(name)
    return [
        run for run in runs
        if (not options.versions or run.version in keys)
        and (not options.config or run.config_name in options.config)
        and (options.precision == ["auto"] or run.precision in options.precision)
    ]  # fmt: skip


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
    contents: dict[str, results.Content] = {
        "json": results.json_text(report.as_json() | {"session": sessions[-1]}),
        "csv": report.as_csv(),
        "md": "\n\n".join(text) + "\n",
    }
    if study.name != "comparison" or any(row.step_ms for row in found):
        contents["png"] = lambda path: drawing.save(study.draw, list(found), path)
    paths = {folder / f"{study.name}.{suffix}": content for suffix, content in contents.items()}
    results.write_together(paths, gone=[folder / f"{study.name}.png"])
    return list(map(str, paths))


if __name__ == "__main__":
    sys.exit(main())
