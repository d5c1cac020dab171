"""Counts what attention in Gluon costs in lines, and what it gains in time, from V3's files and the
times recorded on an H100.

A line is synchronisation if its statement has a word of WAITS, else placement (where data are, or
which warps do what) if it has one of PLACES, else algorithm. Counted are the bodies of functions
that run on the GPU, without comments, docstrings, and helpers that other kernels share.
"""

import ast
import json
import re
import statistics
import sys
from dataclasses import dataclass

from workshop import errors

if __name__ == "__main__":
    errors.begin()

from workshop.arguments import option, run
from workshop.errors import WorkshopError
from workshop.versions import ROOT

WAITS = re.compile("barrier|fence|wait|vote|gdc_|TURNS|PASS_ON|ASM|_computed_here")
PLACES = re.compile(r"(?i)layout|shared|tma\.|matrix\(|\.index\(|permute|fragments|warp_specialize")
ALGORITHM, PLACE, WAIT = KINDS = ("algorithm", "placement", "synchronisation")
TRITON, FORWARD, BACKWARD = FILES = tuple(
    f"triton_attention{end}.py" for end in ("", "_hopper", "_hopper_backward")
)
TRITON_FORWARD = ("_attend", "_attention_forward_kernel")
"""The forward pass in TRITON; its other kernels are the backward pass."""
TIMES = ROOT / "experiments/prototypes_h100/attention_hopper.jsonl"
LONG = 2048
"""Tokens from which on a size counts for a median."""


def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file of V3 that run on the GPU."""
    tree = ast.parse((ROOT / "version3_triton" / file).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name: f for f in found if any("jit" in ast.unparse(d) for d in f.decorator_list)}


def marks(function: ast.FunctionDef) -> dict[int, str]:
    """The kind of each line of a function's body, by its number in the file."""
    found = {}
    for node in ast.walk(function):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and node is not function and not docstring:
            head = isinstance(node, (ast.For, ast.If))
            text = ast.unparse(node).split("\n")[0] if head else ast.unparse(node)
            kind = WAIT if WAITS.search(text) else PLACE if PLACES.search(text) else ALGORITHM
            last = node.lineno if head else node.end_lineno or node.lineno
            found.update(dict.fromkeys(range(node.lineno, last + 1), kind))
    return found


def lines() -> dict[str, dict[str, int]]:
    """Lines by kind, for each pass in Triton and in Gluon."""
    triton = functions(TRITON)
    parts = {
        "forward, Triton": [triton.pop(name) for name in TRITON_FORWARD],
        "forward, Gluon": list(functions(FORWARD).values()),
        "backward, Triton": list(triton.values()),
        "backward, Gluon": list(functions(BACKWARD).values()),
    }
    return {
        part: {kind: sum(list(marks(f).values()).count(kind) for f in its) for kind in KINDS}
        for part, its in parts.items()
    }


def gains() -> dict[tuple[int, ...], tuple[float, float]]:
    """For each recorded size (B, H, K, T, D): how many times as fast the forward and the backward
    pass are in Gluon as in Triton, by their medians."""
    ms: dict[tuple[int, ...], dict[str, list[float]]] = {}
    for line in TIMES.read_text(encoding="utf-8").splitlines()[1:]:
        row = json.loads(line)
        size = tuple(row["B H K T D"])
        passes = [statistics.median(row[f"{name}_ms"]) for name in ("forward", "backward")]
        ms.setdefault(size, {})[row["what"]] = passes
    return {
        size: (row["V3"][0] / row["Hopper"][0], row["V3"][1] / row["Hopper"][1])
        for size, row in ms.items()
    }


def medians(D: int) -> tuple[float, float]:
    """The medians of `gains`, forward and backward, over the long sizes of a head size."""
    forward, backward = zip(
        *(gain for size, gain in gains().items() if size[3] >= LONG and size[4] == D), strict=True
    )
    return statistics.median(forward), statistics.median(backward)


def show_function(name: str) -> None:
    found = {file: its[name] for file in FILES if name in (its := functions(file))}
    if not found:
        raise WorkshopError(f"--function {name}: no function of {', '.join(FILES)}")
    for file, function in found.items():
        text = (ROOT / "version3_triton" / file).read_text(encoding="utf-8").splitlines()
        print(f"\n{file}")
        for number, kind in sorted(marks(function).items()):
            print(f"{kind:>15} |{text[number - 1]}")


def show_lines() -> None:
    print(f"{'lines of the kernels':24}{'all':>6}", *(f"{kind:>16}" for kind in KINDS))
    for part, its in lines().items():
        print(f"{part:24}{sum(its.values()):>6}", *(f"{its[kind]:>16}" for kind in KINDS))


def show_gains() -> None:
    print("\nTimes as fast in Gluon as in Triton, on an H100")
    print(f"{'batch x heads/kv heads x tokens, head size':44}{'forward':>9}{'backward':>9}")
    for (B, H, K, T, D), (forward, backward) in gains().items():
        print(f"{f'{B} x {H}/{K} x {T}, {D}':44}{forward:>9.2f}{backward:>9.2f}")
    for D in (64, 128):
        forward, backward = medians(D)
        what = f"median from {LONG:,} tokens on, {D}"
        print(f"{what:44}{forward:>9.2f}{backward:>9.2f}")


@dataclass
class Options:
    function: str = option("show the functions of this name, a mark for each line", metavar="NAME")


def main(argv: list[str] | None = None) -> int:
    return run(Options, _show, argv, interrupted="interrupted", description=__doc__)


def _show(options: Options) -> int:
    if options.function:
        show_function(options.function)
    else:
        show_lines()
        show_gains()
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
