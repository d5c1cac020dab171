"""`python -m workshop.profilers show|diff|draw|advise`: reads what profilers wrote."""

import argparse
import sys
from pathlib import Path

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import count, parse


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.profilers",
        description="Reads what a profiler wrote: a file, or the folder of one tool's outputs. "
        "The content says which tool it was.",
        epilog="Exit status: 0 done, 2 wrong usage or nothing that can be read, 77 a package is "
        "missing.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="the hot list: which kernels take the time")
    profile = "a file that a profiler wrote, or the folder of one tool's outputs"
    show.add_argument("path", type=Path, metavar="PATH", help=profile)
    show.add_argument("--limit", type=count, default=15, help="rows (default %(default)s)")
    show.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="also write kernels.csv and kernels.json"
    )
    diff = commands.add_parser("diff", help="what changed from one profile to another")
    diff.add_argument("a", type=Path, metavar="A", help=f"the profile before: {profile}")
    diff.add_argument("b", type=Path, metavar="B", help="the profile after, likewise")
    draw = commands.add_parser("draw", help="a step of a torch.profiler trace as a picture")
    draw.add_argument(
        "path", type=Path, metavar="PATH", help="a trace (.json, .json.gz), or a folder with one"
    )
    draw.add_argument(
        "--categories", action="store_true", help="instead, where each step's time goes"
    )
    draw.add_argument("--output", type=Path, metavar="FILE", required=True, help="a .png")
    draw.add_argument("--step", type=count, metavar="N", help="which one (default: the first)")
    draw.add_argument("--from", type=float, dest="start", metavar="MS", help="or a stretch, from")
    draw.add_argument("--to", type=float, dest="end", metavar="MS", help="to, in the axis's ms")
    advise = commands.add_parser("advise", help="what bounds a run, in sentences, and what helps")
    advise.add_argument("paths", type=Path, metavar="PATH", nargs="+", help=profile)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(build_parser(), argv)
    command = {"show": _show, "diff": _diff, "draw": _draw, "advise": _advise}[arguments.command]
    return errors.exit_status(lambda: command(arguments), interrupted="interrupted")


def _show(arguments: argparse.Namespace) -> int:
    from workshop.profilers import show

    return show.show(arguments.path, limit=arguments.limit, output_dir=arguments.output_dir)


def _diff(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    from workshop import tables
    from workshop.profilers import diff, show
    from workshop.profilers.load import load_with_doubts, recorded_run

    places = {"A": arguments.a, "B": arguments.b}
    a, b = map(load_with_doubts, places.values())
    difference = diff.compare(a, b, *map(recorded_run, places.values()))
    for name, table in zip(places, (a, b), strict=True):
        tables.print_notes([f"{name}: {table.path}", *show.warnings(table)])
    tables.print_tables(diff.render(difference))
    return errors.DONE


def _draw(arguments: argparse.Namespace) -> int:
    from workshop.profilers import picture
    from workshop.show import step_pictures

    part = {"step": arguments.step, "start_ms": arguments.start, "end_ms": arguments.end}
    if not arguments.categories:
        picture.draw(arguments.path, arguments.output, **part)
    elif any(value is not None for value in part.values()):
        raise errors.WorkshopError("--categories shows all steps: leave out --step, --from, --to")
    else:
        step_pictures.draw_steps(arguments.path, arguments.output)
    print(f"Written: {arguments.output}")
    return errors.DONE


def _advise(arguments: argparse.Namespace) -> int:
    errors.require("rich")
    from workshop import tables
    from workshop.profilers import advisor, show
    from workshop.profilers.load import load_with_doubts, recorded

    for path in arguments.paths:
        table = load_with_doubts(path)
        tables.print_notes([str(path), *show.warnings(table)])
        tables.terminal().print(advisor.render(advisor.advise(table, recorded(path))))
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
