"""Attention in Gluon: lines and recorded times as count.py finds them, products as the kernels have
them, and exponentials in machine code that the check compiles itself."""

import ast
import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from version3_triton.exercises.gluon_attention import count
from workshop import versions
from workshop.errors import NotOnThisMachine
from workshop.exercises.frame import Item, Work
from workshop.exercises.predict import Chosen, Found, NotCompared, Predicted, Question, ask
from workshop.kernels import inspect

WORTH = 1.05
"""Times as fast, from which on a pass counts as faster."""
KEYS, TOKENS = 128, 2048
"""Keys of a program of the backward pass, and the tokens of the question about them."""


def check(work: Work) -> Iterator[Item]:
    yield from ask(work, lambda _: None, QUESTIONS)


# --- the machine code ----------------------------------------------------------------------------


@functools.cache
def compiled() -> dict[str, str]:
    """Machine code of the forward kernels in Triton and Gluon, by the kernel's name."""
    if missing := versions.missing(versions.get_version("v3")):
        raise NotCompared(missing)
    with tempfile.TemporaryDirectory() as folder:
        options = inspect.Options(
            target=["sm_90"], config=["small", "very_large"], precision=["bf16"],
            kernel="attention_forward", asm=Path(folder),
        )  # fmt: skip
        try:
            (answer,) = inspect.inspect_all(options)
        except NotOnThisMachine as missing:  # the assembler, where Triton is AMD's
            raise NotCompared(str(missing)) from None
        return {
            kernel.kernel: Path(folder, name).read_text(encoding="utf-8")
            for kernel in answer.kernels
            for name in kernel.assembly
            if name.endswith(".sass")
        }


def hidden(code: str) -> tuple[int, int]:
    """A turn of the softmax's loop: exponentials while a product is running, and all of them.

    Products run in groups, each of which ends at an HGMMA with gsb0; WARPGROUP.DEPBAR waits until
    no more groups than it says are running.
    """
    lines = code.splitlines()
    labels = {line[:-1]: n for n, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    loops = []
    for n, line in enumerate(lines):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        body = lines[labels[jump[1]] : n] if jump else []
        if all(any(word in line for line in body) for word in ("HGMMA", "MUFU.EX2")):
            loops.append(body)
    running = found = every = 0
    for line in min(loops, key=len):
        if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", line):
            running = min(running, int(wait[1], 16))
        running += "HGMMA" in line and "gsb0" in line
        every += "MUFU.EX2" in line
        found += "MUFU.EX2" in line and running > 0
    return found, every


def _hidden(name: str) -> tuple[int, int]:
    code = compiled().get(name)
    if code is None:
        raise NotCompared("it takes Triton 3.6 or newer, and nvdisasm, which comes with it")
    return hidden(code)


# --- the products --------------------------------------------------------------------------------


def _products(file: str, pattern: str, *names: str) -> list[str]:
    functions = count.functions(file)
    return [one for name in names for one in re.findall(pattern, ast.unparse(functions[name]))]


def triton_products() -> list[str]:
    return _products(count.TRITON, r"(\w+) = dot\(", "_gather_dq", "_gather_dk_dv")


def gluon_products() -> list[str]:
    """Names of the products' results in the code: twice where each of two branches has one."""
    return _products(count.BACKWARD, r"(\w+) = warpgroup_mma\(", "_gather")


# --- the questions -------------------------------------------------------------------------------


def _lines(part: str) -> int:
    return sum(count.lines()[f"forward, {part}"].values())


def _gain(D: int, place: int) -> Callable[[None], float]:
    """How many times as fast a pass (0: forward, 1: backward) is in Gluon."""
    return lambda _: count.medians(D)[place]


def _faster(place: int) -> str:
    """The head sizes at which a pass is faster in Gluon."""
    sizes = [str(D) for D in (64, 128) if count.medians(D)[place] >= WORTH]
    return "both" if len(sizes) == 2 else sizes[0] if sizes else "neither"


TABLE = "the column `all` of count.py's first table, the rows of the forward pass"
MEDIANS = "the last two rows of count.py's tables: the column of the pass, the row of the head size"
PRODUCTS = "count what a turn of _gather's loop computes with warpgroup_mma"
LAST = f"a program has {KEYS} keys, and the last query sees all {TOKENS:,}"
SIZES = ("64", "128", "both", "neither")
BOUND = f"a median of {WORTH} or more; your four medians say where"
QUESTIONS: tuple[Question[None], ...] = (
    Predicted(
        "predict.lines_times", "predicted: the forward kernel's lines in Gluon over Triton's", "x",
        lambda _: _lines("Gluon") / _lines("Triton"),
        "The algorithm takes about as many lines in both. Triton's compiler decides the rest; in "
        "Gluon you write it.",
    ),
    Predicted(
        "predict.forward_64", "predicted: the forward pass, heads of 64", "x", _gain(64, 0),
        "With 64 numbers a head a tile's exponentials take as long as its products, and Triton's "
        "kernel already hides some: several programs fit on a multiprocessor.", within=0.05,
    ),
    Predicted(
        "predict.forward_128", "predicted: the forward pass, heads of 128", "x", _gain(128, 0),
        "The products take twice as long as the exponentials: who hides the shorter part keeps the "
        "matrix units busy.", within=0.05,
    ),
    Found("lines.triton_lines", "lines in Triton", "", lambda _: _lines("Triton"), TABLE, within=0),
    Found("lines.gluon_lines", "lines in Gluon", "", lambda _: _lines("Gluon"), TABLE, within=0),
    Found(
        "lines.gluon_algorithm", "of them algorithm", "",
        lambda _: count.lines()["forward, Gluon"][count.ALGORITHM],
        "its column, the row of the forward pass in Gluon", within=0,
    ),
    Found(
        "overlap.triton_exponentials", "exponentials beside a product in Triton", "",
        lambda _: _hidden("attention_forward")[0],
        "DEPBAR ... 0x0 waits for all products: what is running between it and the next HGMMA?",
        within=0,
        slips=lambda _: [
            (_hidden("attention_forward")[1], "that is all of the loop's: does a product run then?")
        ],
        note=lambda _: "{} of {} a turn".format(*_hidden("attention_forward")),
    ),
    Found(
        "overlap.gluon_exponentials", "exponentials beside a product in Gluon", "",
        lambda _: _hidden("hopper_attention_forward")[0],
        "the loop has both products, 16 HGMMA: DEPBAR ... 0x1 leaves the later one running, and "
        "DEPBAR ... 0x0 waits for it", within=0,
        slips=lambda _: [(64, "the diagonal's block, before the loop; the loop has 16 HGMMA")],
        note=lambda _: "{} of {} a turn: 64 scores a thread, and for each of its two rows what "
        "the sums so far are multiplied by".format(*_hidden("hopper_attention_forward")),
    ),
    Found(
        "backward.triton_products", "products in Triton", "", lambda _: len(triton_products()),
        "count the calls of dot in _gather_dq and in _gather_dk_dv", within=0,
        note=lambda _: "scores and dweights twice; dq, dk, dv",
    ),
    Found(
        "backward.gluon_products", "products in Gluon", "",
        lambda _: len(set(gluon_products())), PRODUCTS, within=0,
        slips=lambda _: [(len(gluon_products()), f"all calls, of both branches: {PRODUCTS}")],
        note=lambda _: ", ".join(dict.fromkeys(gluon_products())),
    ),
    Chosen(
        "backward.summed", "added up in memory", ("scores", "dq", "dk", "delta"), lambda _: "dq",
        "a program has keys: dk and dv of them gather in its registers, except for very long "
        "sequences of shared heads. Whose gradient needs all keys?",
    ),
    Found(
        "backward.adders", "programs that add to the last query's gradient", "",
        lambda _: TOKENS // KEYS, LAST, within=0,
        slips=lambda _: [(TOKENS // 64, f"64 are the queries of a block: {LAST}")],
    ),
    Chosen(
        "backward.last_bits", "why the last bits differ",
        ("bf16", "exp2", "order", "fewer products"), lambda _: "order",
        "it is the same in each run. What is not, when several programs add to one number?",
    ),
    Chosen(
        "backward.deterministic", "with --deterministic", ("triton", "gluon"), lambda _: "triton",
        "look for must_repeat in attend_backward of triton_attention.py",
    ),
    *(
        Found(
            f"gain.{name}_{D}", f"{name}, heads of {D}: times as fast", "x",
            _gain(D, place), MEDIANS, within=0.005,
        )
        for D in (64, 128) for place, name in enumerate(("forward", "backward"))
    ),
    Chosen("gain.forward", "where the forward pass is faster", SIZES, lambda _: _faster(0), BOUND),
    Chosen("gain.backward", "where the backward pass is", SIZES, lambda _: _faster(1), BOUND),
)  # fmt: skip
