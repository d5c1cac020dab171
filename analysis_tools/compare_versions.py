"""Trains the versions side by side and prints what each is worth, or rebuilds that from results.

Each version runs in its own process, and the processes alternate (V1 V2 V4, V4 V2 V1, ...), so
that a machine that grows hot or busy does so for all. Each first run passes the gate before it
is timed; a version whose gate is red gets a row with the reason and no figures. So does one that
needs what this machine lacks. V3 without a GPU runs once, in Triton's interpreter: its row has
all but times.

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

from workshop import errors, results, versions  # noqa: E402
from workshop.arguments import parse  # noqa: E402
from workshop.compare import (  # noqa: E402
    comparison,
    comparison_figure,
    comparison_tables,
    sessions,
    studies,
    sweep,
    sweep_figure,
    sweep_tables,
    waterfall,
    waterfall_figure,
    waterfall_tables,
)
from workshop.compare.comparison import Row  # noqa: E402
from workshop.compare.comparison_tables import FORMATS  # noqa: E402
from workshop.compare.markdown import escape, escape_block  # noqa: E402
from workshop.compare.sessions import Plan, run_plans  # noqa: E402
from workshop.compare.sweep import Sweep  # noqa: E402
from workshop.compare.waterfall import Waterfall  # noqa: E402
from workshop.errors import WorkshopError  # noqa: E402
from workshop.results import RunResult  # noqa: E402
from workshop.run import hardware, interpreter, precision, presets  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 done, 1 a gate is red or a version failed, 2 wrong usage, "
        "77 this machine can run none of them, 130 interrupted by Ctrl-C or SIGTERM (what was "
        "completed is saved and shown). A size at which memory runs out is no failure of a sweep.",
    )
    add_run_flags(parser, repeats=3)
    add = parser.add_argument
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--waterfall",
        nargs="*",
        metavar="V",
        help="from V1 to each of these versions one change at a time (default: v4 and, on a GPU, "
        "v3)",
    )
    kinds.add_argument(
        "--sweep",
        nargs="+",
        metavar=("SIZE", "N"),
        help=f"let one of {', '.join(sweep.AXES)} grow: `seq-len 128 256 512`, or "
        "`seq-len 128 ... 8192` for each twice the one before; with --from-results all sizes there "
        "are, if none is given",
    )
    add(
        "--output-dir",
        type=Path,
        help="comparison.json, .md, .png and runs/ go there, or waterfall.* or sweep.* with .csv "
        "(default: results/ of this checkout); with --from-results nothing is written unless it "
        "is given",
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
        metavar="V",
        help=f"of {', '.join(versions.available())} (default: all), and of the peers "
        f"{', '.join(versions.PEERS)}",
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
        runs = results.load_folder(arguments.from_results)
        found = study.find(runs)
    else:
        runs, interrupted = study.run(results.new_session())
        found = study.build(runs)
    if interrupted and not found:
        print("interrupted before a run was complete: nothing saved", file=sys.stderr)
        return errors.INTERRUPTED
    # Before anything is shown: a reader may stop reading.
    names = study.write(found, runs, arguments.output_dir) if writes else []
    study.show(found, arguments.format)
    if writes:
        # Not among what a program is to read.
        stream = sys.stdout if arguments.format == "table" else sys.stderr
        print(f"Written: {', '.join(names)}", file=stream)
    if interrupted:
        print("interrupted: the table holds what was completed", file=sys.stderr)
        return errors.INTERRUPTED
    return _status(study.rows(found))


def _status(rows: Sequence[tuple[Row, bool]]) -> int:
    """Of rows, each with whether it failed."""
    if all(row.status == "skipped" for row, _ in rows):
        return errors.NOT_ON_THIS_MACHINE
    return errors.ANSWER_IS_NO if any(failed for _, failed in rows) else errors.DONE


# --- what can be asked for -----------------------------------------------------------------------

Outcome = tuple[list[RunResult], bool]
"""What the processes left, and whether Ctrl-C ended them."""


@dataclass(frozen=True)
class Study:
    """A kind of comparison: how it is run, made from runs, shown and written."""

    run: Callable[[str], Outcome]
    """Of a session's name."""
    build: Callable[[list[RunResult]], list[Any]]
    """From the runs of one session."""
    find: Callable[[list[RunResult]], list[Any]]
    """From the runs of any sessions; raises WorkshopError if there is none in them."""
    show: Callable[[list[Any], str], None]
    write: Callable[[list[Any], list[RunResult], Path], list[str]]
    """What was found, and runs among which are those it is made of."""
    rows: Callable[[list[Any]], list[tuple[Row, bool]]]
    """Each with whether it failed."""


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
        shown = studies.preferred(runs, among=runs)
        if len(shown) < len(runs):
            left_out = len(runs) - len(shown)
            _tell([f"{left_out} runs left out: --waterfall or --sweep shows what they are of"])
        return comparison.build_rows(shown)

    return Study(
        run=run,
        build=comparison.build_rows,
        find=find,
        show=comparison_tables.show,
        write=write_outputs,
        rows=lambda rows: [(row, row.failed) for row in rows],
    )


def _waterfall(arguments: argparse.Namespace) -> Study:
    if arguments.versions is not None:
        raise WorkshopError("--versions: name a waterfall's end after --waterfall, as in v3")
    climb = waterfall.plan(arguments) if arguments.from_results is None else None

    def run(session: str) -> Outcome:
        assert climb is not None
        results.prepare_folder(arguments.output_dir)
        _tell(climb.left_out)
        return run_plans(climb.plans, arguments, session)

    def build(runs: list[RunResult]) -> list[Waterfall]:
        assert climb is not None
        return waterfall.build(runs, climb.asked)

    def find(runs: list[RunResult]) -> list[Waterfall]:
        wanted = waterfall.targets(arguments.waterfall, on_gpu=True)
        found = [one for one in waterfall.build(runs) if one.to in wanted]
        return _some(found, arguments, "waterfall: V1 at fp32 and the versions' single changes")

    return Study(
        run=run,
        build=build,
        find=find,
        show=waterfall_tables.show,
        write=_writer("waterfall", waterfall_tables, waterfall_figure.plot),
        rows=lambda found: [
            (step.row, step.row.failed)
            for step in itertools.chain.from_iterable(one.steps for one in found)
            if step.row is not None
        ],
    )


def _sweep(arguments: argparse.Namespace) -> Study:
    axis, sizes = sweep.parse(arguments.sweep)
    asked = sweep.plan(arguments) if arguments.from_results is None else None

    def run(session: str) -> Outcome:
        assert asked is not None
        results.prepare_folder(arguments.output_dir)
        _tell(asked.left_out)
        return run_plans(
            sweep.plans(asked, arguments, session),
            arguments,
            session,
            keys=asked.keys,
            total=asked.most_runs * arguments.repeats,
        )

    def find(runs: list[RunResult]) -> list[Sweep]:
        found = sweep.build(runs, axis, sizes=sizes)
        return _some(found, arguments, f"sweep over {axis.flag}: two sizes of one session")

    return Study(
        run=run,
        build=lambda runs: sweep.build(runs, axis, least=1),
        find=find,
        show=sweep_tables.show,
        write=_writer("sweep", sweep_tables, sweep_figure.plot),
        rows=lambda found: [
            (point.row, point.failed)
            for curve in itertools.chain.from_iterable(one.curves for one in found)
            for point in curve.points
        ],
    )


def _tell(lines: list[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _some(found: list[Any], arguments: argparse.Namespace, what: str) -> list[Any]:
    if not found:
        raise WorkshopError(f"results {arguments.from_results}: no {what}, in it")
    return found


# --- the ladder ----------------------------------------------------------------------------------


def make_plans(arguments: argparse.Namespace) -> list[Plan]:
    """All processes of a comparison, alternating.

    Raises:
        WorkshopError: a version, preset, precision, device or count that can't be.
    """
    sessions.check_counts(arguments)
    device = hardware.get_device(arguments.device)
    asked = arguments.versions or versions.available()
    keys = versions.baseline_first(asked)
    configs = list(dict.fromkeys(arguments.config or [presets.default_preset(device.type)]))
    for config in configs:
        presets.get_preset(config)
    names = [precision.get_precision(name, device).name for name in arguments.precision]
    slow = {key for key in keys if interpreter.serves(versions.get_version(key), device)}
    plans = []
    for config, name in itertools.product(configs, dict.fromkeys(names)):
        own = [Plan(key, config, name, repeat=0, interpreted=key in slow) for key in keys]
        plans += sessions.alternate(own, arguments.repeats)
    return plans


# --- files ---------------------------------------------------------------------------------------


def write_outputs(rows: list[Row], runs: list[RunResult], folder: Path) -> list[str]:
    """comparison.json, .md and .png. They are derived from runs/, so where two comparisons share
    a folder the later one's stand there, and --from-results rebuilds the other's."""
    results.prepare_folder(folder)
    content = comparison_tables.as_json(rows) | {"session": max(row.session for row in rows)}
    text = _headed("Comparison", rows, runs, comparison_tables.as_markdown(rows))
    picture = folder / "comparison.png"
    contents: dict[Path, results.Content] = {
        folder / "comparison.json": results.json_text(content),
        folder / "comparison.md": text,
    }
    if any(row.step_ms for row in rows):
        contents[picture] = lambda path: comparison_figure.plot(rows, path)
    results.write_together(contents, gone=[picture])
    return list(map(str, contents))


def _headed(
    what: str, found: Sequence[Row | Waterfall | Sweep], runs: list[RunResult], text: str
) -> str:
    """The text below the names of the sessions that it tells of, and the software of these."""
    sessions = sorted({one.session for one in found})
    software = {
        ", ".join(f"{name} {version}" for name, version in run.software.items() if version)
        for run in runs
        if run.session in sessions
    }
    heading = f"# {what} {escape(', '.join(sessions))}"
    return "\n\n".join([heading, *map(escape_block, sorted(software)), text]) + "\n"


def _writer(
    name: str, tables: Any, plot: Callable[[list[Any], Path], None]
) -> Callable[[list[Any], list[RunResult], Path], list[str]]:
    """Of NAME.json, .csv, .md and .png, which are derived from runs/ as the comparison's are."""

    def write(found: list[Any], runs: list[RunResult], folder: Path) -> list[str]:
        results.prepare_folder(folder)
        contents: dict[str, results.Content] = {
            "json": results.json_text(tables.as_json(found)),
            "csv": tables.as_csv(found),
            "md": _headed(name.capitalize(), found, runs, tables.as_markdown(found)),
            "png": lambda path: plot(found, path),
        }
        paths = {folder / f"{name}.{suffix}": content for suffix, content in contents.items()}
        results.write_together(paths)
        return list(map(str, paths))

    return write


if __name__ == "__main__":
    sys.exit(main())
