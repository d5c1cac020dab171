"""The command line of the exercises."""

import argparse
import difflib
import sys
from pathlib import Path

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from workshop import errors
from workshop.arguments import count, parse
from workshop.errors import WorkshopError
from workshop.exercises import copies, frame, runner, sheet
from workshop.exercises.progress import Progress
from workshop.exercises.sheet import Sheet
from workshop.versions import ROOT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.exercises",
        description="The workshop's exercises: which there are, whether yours is right, a hint.",
        epilog="Exit status: 0 done, and all of a check green; 1 something is red or not answered "
        "yet; 2 wrong usage; 77 this machine does not have what the check needs.",
    )
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=frame.RESULTS,
        metavar="DIR",
        help="where your results and your progress lie (default: results/)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="all exercises, in their order")
    check = commands.add_parser("check", help="check your answer; at first, begin the exercise")
    check.add_argument(
        "--limit",
        type=count,
        default=int(runner.LIMIT_S),
        metavar="SECONDS",
        help="for a slow machine (default %(default)s)",
    )
    hint = commands.add_parser("hint", help="the next hint")
    commands.add_parser("progress", help="what is passed, and what comes next")
    reset = commands.add_parser("reset", help="start again; what you wrote is kept as *.old")
    for command in (check, hint, reset):
        command.add_argument("name", metavar="NAME", help="of an exercise, as `list` shows it")
    return parser


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs a command; its exit status.

    Args:
        root: the folder of the versions' folders.
    """
    arguments = parse(build_parser(), argv)

    def work() -> int:
        errors.require("rich")
        from workshop.exercises import terminal

        progress = Progress(arguments.results_dir)
        if arguments.command == "list":
            terminal.show(terminal.table(_sheets(root), progress))
        elif arguments.command == "progress":
            terminal.show(terminal.summary(_sheets(root), progress))
        else:
            command = {"check": _check, "hint": _hint, "reset": _reset}[arguments.command]
            return command(_find(arguments.name, root), progress, arguments, root)
        return errors.DONE

    return errors.exit_status(work, interrupted="interrupted")


def _check(one: Sheet, progress: Progress, arguments: argparse.Namespace, root: Path) -> int:
    from workshop.exercises import terminal

    made = copies.make(one.folder)
    if made:
        terminal.show(terminal.begun(one, made))
        return errors.ANSWER_IS_NO
    with terminal.waiting(f"checking {one.name} ..."):
        outcome = runner.run(one.folder, results=arguments.results_dir, limit_s=arguments.limit)
    terminal.show(terminal.verdict(one, outcome))
    if outcome.missing is None:
        green = sum(item.ok for item in outcome.items)
        progress.checked(one.name, green, len(outcome.items))
    if outcome.passed:
        terminal.show(terminal.what_comes_next(_sheets(root), progress, behind=one.name))
    if outcome.missing is not None:
        return errors.NOT_ON_THIS_MACHINE
    return errors.DONE if outcome.passed else errors.ANSWER_IS_NO


def _hint(one: Sheet, progress: Progress, _: argparse.Namespace, root: Path) -> int:
    from workshop.exercises import terminal

    if not one.hints:
        raise WorkshopError(f"{one.name} has no hints: its sheet is all there is")
    number = min(progress[one.name].hints, len(one.hints) - 1)
    terminal.show(terminal.hint(one, number))
    progress.hinted(one.name)
    return errors.DONE


def _reset(one: Sheet, progress: Progress, _: argparse.Namespace, root: Path) -> int:
    from workshop.exercises import terminal

    kept = copies.set_aside(one.folder)
    progress.forget(one.name)
    terminal.show(terminal.begun(one, copies.make(one.folder), kept))
    return errors.DONE


def _sheets(root: Path) -> list[Sheet]:
    """All exercises; the errors of sheets that can't be read go to stderr."""
    sheets, problems = sheet.read_all(root)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return sheets


def _find(name: str, root: Path) -> Sheet:
    """Raises WorkshopError: there is no such exercise, or its sheet can't be read."""
    folders = {folder.name: folder for folder in sheet.folders(root)}
    if name not in folders:
        near = difflib.get_close_matches(name, folders, n=1)
        known = f"did you mean {near[0]}?" if near else f"known are {', '.join(folders)}"
        raise WorkshopError(f"no exercise is called {name!r}: {known}")
    return sheet.read(folders[name])


if __name__ == "__main__":
    sys.exit(main())
