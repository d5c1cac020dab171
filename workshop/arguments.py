"""Command lines. A program declares its options as a dataclass, a field for each flag:

    @dataclass
    class Options:
        paths: list[Path] = argument("result files")
        top: int = option("rows that are shown", 10)

`run(Options, work, argv, ...)` reads one and does the work; `--top` is a whole number then, and its
help ends in "(default 10)". An empty value is wrong usage for every flag.
"""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from workshop import errors
from workshop.versions import ROOT

MOST = 10**6
O = TypeVar("O")


def option(help: str, default: Any = None, **how: Any) -> Any:
    """A field of an options' class: a flag of that name.

    Args:
        default: where it is not None, the help ends with it, unless `help` says "default".
        how: more of argparse's `add_argument`, such as `metavar`, `choices` or `nargs`.
    """
    metadata = {"help": help, "default": default, **how}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def argument(help: str, **how: Any) -> Any:
    """A field that the command line gives by its place; one that is a list takes the rest."""
    return dataclasses.field(metadata={"help": help, "positional": True, **how})


def some_of(known: Iterable[str], metavar: str, default: Iterable[str] = ()) -> Any:
    """A field that takes one or more of the known words: by default these, or else all."""
    help = f"of {', '.join(known)}" + ("" if default else " (default: all)")
    return option(help, [*(default or known)], choices=[*known], metavar=metavar)


def add_options(parser: argparse._ActionsContainer, kind: type[Any]) -> None:
    """Adds a flag for each field of an options' class. The field's type is the value's: a list
    takes one or more, a bool is switched on by its flag, and a whole number, a float or a path is
    read as such."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        how = dict(field.metadata)
        flag = field.name if how.pop("positional", False) else f"--{field.name.replace('_', '-')}"
        value_type, is_list = _value_type(hints[field.name])
        if value_type is bool:
            how = {"action": "store_true"} | how | ({} if "action" in how else {"default": False})
        else:
            how = _of_values(value_type, is_list) | how
            if "action" in how:  # which takes the values one by one
                how.pop("nargs", None)
            if "default" not in how["help"] and (default := how.get("default")) not in (None, ""):
                shown = " ".join(map(str, default)) if is_list else default
                how["help"] += f" (default {shown})".replace("%", "%%")
        parser.add_argument(flag, **how)


def _of_values(value_type: Any, is_list: bool) -> dict[str, Any]:
    """A flag's settings that follow from the type of its values."""
    how: dict[str, Any] = {"nargs": "+"} if is_list else {}
    if value_type is not str:
        how["type"] = value_type
    return how | {int: {"metavar": "N"}, float: {"metavar": "X"}}.get(value_type, {})


def _value_type(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether the flag takes several: of `list[int] | None` int, yes."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def parser_of(kind: type[Any], **parser: Any) -> argparse.ArgumentParser:
    """The parser of a program's options; `parser` is of argparse.ArgumentParser: `description`,
    `epilog`, `prog`."""
    made = argparse.ArgumentParser(**parser)
    add_options(made, kind)
    return made


def read(kind: type[O], argv: Sequence[str] | None = None, **parser: Any) -> O:
    """The options that a command line asks for, `sys.argv` if none is given."""
    return kind(**vars(parse(parser_of(kind, **parser), argv)))


def run(
    kind: type[O],
    work: Callable[[O], int],
    argv: Sequence[str] | None = None,
    *,
    interrupted: str,
    **parser: Any,
) -> int:
    """A program: reads its options, does its work, and gives its exit status, as
    `errors.exit_status` has it."""
    options = read(kind, argv, **parser)
    return errors.exit_status(lambda: work(options), interrupted=interrupted)


Command = tuple[Callable[[Any], int], type[Any], str]
"""A subcommand's work, which takes its options; their class; and what it does, in words."""


def read_command(
    commands: Mapping[str, Command], argv: Sequence[str] | None = None, **parser: Any
) -> tuple[Callable[[Any], int], Any]:
    """The work of the subcommand that a command line names, such as "check" or "baseline save",
    and its options."""
    made = argparse.ArgumentParser(**parser)
    places = {"": made.add_subparsers(required=True, metavar="COMMAND")}
    for name, (work, kind, what) in commands.items():
        above, _, last = name.rpartition(" ")
        if above not in places:
            group = places[""].add_parser(above, help=f"`{name}`: {what}")
            places[above] = group.add_subparsers(required=True, metavar=last)
        own = places[above].add_parser(last, help=what, description=what)
        add_options(own, kind)
        own.set_defaults(chosen=(work, kind))
    arguments = vars(parse(made, argv))
    work, kind = arguments.pop("chosen")
    return work, kind(**arguments)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, `sys.argv` if none is given.

    No flag has a use for an empty value, which comes from `--output-dir "$UNSET"`: a path would be
    the current folder, and `given or default` would take it for none.
    """
    words = sys.argv[1:] if argv is None else argv
    if argv is None and (other := _other_checkout()):
        parser.error(f"{sys.argv[0]} is {other}'s, but Python finds the workshop in {ROOT}: "
                     "activate that checkout's own environment, or unset PYTHONPATH")  # fmt: skip
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


def _other_checkout() -> Path | None:
    """The checkout that the running program lies in, if it is not the one whose package runs: the
    environment, or PYTHONPATH, of another checkout leads to that one's code."""
    program = Path(sys.argv[0]).resolve()
    if program.suffix != ".py" or "site-packages" in program.parts:
        return None
    above = (place for place in program.parents if (place / "workshop" / "versions.py").is_file())
    found = next(above, ROOT)
    return None if found == ROOT else found


def count(text: str, most: int = MOST, least: int = 1) -> int:
    """An argument's type: a whole number from `least` to `most`."""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} to {most:,}")
    return int(text)


def seed_number(text: str) -> int:
    """An argument's type: a seed that every generator of PyTorch takes."""
    return count(text, most=2**63 - 1, least=0)
