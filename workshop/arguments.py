"""Parts that all command lines share: an empty value is wrong usage for every flag."""

import argparse
import sys
from collections.abc import Sequence

from workshop import errors

MOST = 10**6


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, `sys.argv` if none is given.

    No flag has a use for an empty value, which comes from `--output-dir "$UNSET"`: a path would be
    the current folder, and `given or default` would take it for none.
    """
    words = sys.argv[1:] if argv is None else argv
    flag = "an argument"
    for word in words:
        if word.startswith("-"):
            flag, equals, word = word.partition("=")
            if not equals:
                continue
        if not word.strip():
            parser.error(f"{flag}: it is empty")
    try:
        arguments, unknown = parser.parse_known_args(words)
    except BrokenPipeError:  # of a --help that is not read, from Python 3.10's argparse
        errors.discard_output()
        sys.exit(errors.DONE)
    if unknown:  # argparse would print it as it is, with what steers a terminal
        parser.error(f"unrecognized arguments: {' '.join(map(errors.printable, unknown))}")
    return arguments


def count(text: str, most: int = MOST) -> int:
    """An argument's type: a whole number from 1 to `most`."""
    if not text.isdecimal() or not 1 <= float(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 to {most:,}")
    return int(text)
