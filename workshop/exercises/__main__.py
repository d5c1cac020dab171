"""The command line of the exercises."""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from workshop import errors
from workshop.arguments import count, parse
from workshop.exercises import frame, runner, sheet
from workshop.versions import ROOT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.exercises",
        description="The workshop's exercises: the list, a check of your answer, a hint.",
        epilog="Exit status: 0 done, and all of a check green; 1 something is red or not answered "
        "yet; 2 wrong usage; 77 this machine does not have what the check needs.",
    )
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=frame.RESULTS,
        metavar="DIR",
        help="where your results and your progress are (default: results/)",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parser.set_defaults(command="list")
    commands.add_parser(
        "list", aliases=["progress"], help="all exercises, what you passed, the next one (default)"
    )
    check = commands.add_parser("check", help="check your answer; at first, begin the exercise")
    check.add_argument(
        "--limit",
        type=count,
        default=int(runner.LIMIT_S),
        metavar="SECONDS",
        help="for a slow machine (default %(default)s)",
    )
    hint = commands.add_parser("hint", help="the next hint")
    reset = commands.add_parser("reset", help="start again; what you wrote is kept as *.old")
    for command in (check, hint, reset):
        command.add_argument("name", metavar="NAME", help="the exercise, as `list` shows it")
    return parser


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs a command; its exit status.

    Args:
        root: the folder of the versions' folders.
    """
    parser, words = build_parser(), sys.argv[1:] if argv is None else argv
    if words and any(words[0] == folder.name for folder in sheet.folders(root)):
        parser.error(f"did you mean: check {words[0]}")
    arguments = parse(parser, argv)

    def work() -> int:
        errors.require("rich")
        from workshop.exercises import commands

        return commands.run(arguments, root)

    return errors.exit_status(work, interrupted="interrupted")


if __name__ == "__main__":
    sys.exit(main())
