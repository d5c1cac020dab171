"""What the compiler fused: the participant's profiles of V4, eager and compiled, against what was
predicted and read off."""

import re
from collections.abc import Callable, Iterator
from functools import partial

from workshop.errors import WorkshopError
from workshop.exercises.frame import RESULTS, Item, Work
from workshop.exercises.predict import prediction
from workshop.profilers import kernel_file
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import RunResult

EAGER, COMPILED = "eager", "pytorch_profiler"
"""Folders below results/profiles/v4."""
REFERENCE = RESULTS / "reference"
_FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_")
_PRODUCTS_ON_CPU = ("aten::mm", "aten::addmm", "aten::bmm")
_GRAPH = re.compile(r"^graph_\d+_")
"""Before a kernel's name in a profile of the CPU."""
_NAMED = 4
"""Kernels that a red Item names."""

GONE = (
    "What goes is all that lies between products and attention: element-wise operations, copies, "
    "views. Their number grows with the layers, and so does the number of fused kernels."
)
PRODUCTS = (
    "Inductor hands large products to the library, as eager code does: there is nothing to win. "
    "It fuses what lies around them."
)
FUSED = (
    "A product needs its whole input, and its whole result is there before the next kernel starts: "
    "so one kernel, at least, for each gap between products (or attention) that has work in it."
)
SWIGLU = "the forward kernel's name has mul and silu, and no silu_backward"


def check(work: Work) -> Iterator[Item]:
    _profiles(work)  # without them there is nothing to compare with
    yield from work.each(
        *(_predicted_calls, _predicted_products, _predicted_fused),
        *(partial(_count, name) for name in COUNTS),
        *(_swiglu, _addmm),
        *(partial(_graph, key) for key in ("graph_launches", "graph_kernels")),
        *(partial(_idle, version) for version in ("v2", "v4")),
        _graph_removes,
    )


# --- the participant's profiles ------------------------------------------------------------------


def _profiles(work: Work) -> tuple[KernelTable, KernelTable]:
    """V4 eager and compiled.

    Raises:
        WorkshopError: one is missing or of something else, or they can't be compared.
    """
    eager, was_eager = _profile(work, EAGER)
    compiled, was_compiled = _profile(work, COMPILED)
    if was_eager.options.get("compile") != "none" or was_eager.options.get("cuda_graph"):
        raise WorkshopError(
            "results/profiles/v4/eager is of a compiled or captured run: profile it again with "
            "-- --compile none --no-cuda-graph"
        )
    if was_compiled.options.get("compile") == "none":
        raise WorkshopError(
            "results/profiles/v4/pytorch_profiler is of an eager run: profile V4 again, without "
            "--compile none (is there a C++ compiler?)"
        )
    for name in ("config", "batch_size", "seq_len", "precision"):
        if getattr(was_eager, name) != getattr(was_compiled, name):
            raise WorkshopError(
                f"the two profiles of V4 differ in their {name}: profile both with the same flags"
            )
    if was_eager.device.get("name") != was_compiled.device.get("name"):
        raise WorkshopError("the two profiles of V4 are of different devices: profile both on one")
    if not any(_is_fused(kernel) for kernel in compiled.kernels):
        raise WorkshopError(
            "results/profiles/v4/pytorch_profiler does not name the compiler's kernels: profile "
            "it again with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 before the command"
        )
    return eager, compiled


def _profile(work: Work, folder: str) -> tuple[KernelTable, RunResult]:
    found = work.profile("v4", folder)
    table, record = found or (None, None)
    if table is None or record is None:
        raise WorkshopError(
            f"results/profiles/v4/{folder} is missing: profile V4 as the sheet says"
        )
    if not table.steps:
        raise WorkshopError(f"results/profiles/v4/{folder} knows no steps: profile V4 again")
    return table, record


def _is_fused(kernel: Kernel) -> bool:
    return _FUSED.search(kernel.name) is not None


def _is_product(table: KernelTable, kernel: Kernel) -> bool:
    if table.what == "operator":  # aten::matmul and aten::linear call one of these
        return kernel.name in _PRODUCTS_ON_CPU
    return kernel.category == "GEMM"


def _calls(table: KernelTable, which: Callable[[Kernel], bool] = lambda _: True) -> float:
    """Calls a step of the kernels (operators) that are counted."""
    assert table.steps
    return sum(kernel.calls for kernel in table.kernels if which(kernel)) / table.steps


def _products(table: KernelTable) -> float:
    return _calls(table, lambda kernel: _is_product(table, kernel))


def _fused(table: KernelTable) -> float:
    return _calls(table, _is_fused)


# --- predictions ---------------------------------------------------------------------------------


def _predicted_calls(work: Work) -> Iterator[Item]:
    eager, compiled = _profiles(work)
    gone = 100 * (1 - _calls(compiled) / _calls(eager))
    predicted = work.answers().number("predict.calls_gone_percent")
    yield prediction("calls that the compiler removes", predicted, gone, "%", why=GONE)


def _predicted_products(work: Work) -> Iterator[Item]:
    eager, compiled = _profiles(work)
    predicted = work.answers().number("predict.products_gone")
    gone = _products(eager) - _products(compiled)
    yield prediction("matrix products that it removes", predicted, gone, "", why=PRODUCTS)


def _predicted_fused(work: Work) -> Iterator[Item]:
    _, compiled = _profiles(work)
    predicted = work.answers().number("predict.fused_calls")
    yield prediction("calls of fused kernels", predicted, _fused(compiled), "", why=FUSED)


# --- findings ------------------------------------------------------------------------------------

ALL_CALLS = "the first row of `workshop.profilers diff` has it"
COUNTS: dict[str, tuple[str, Callable[[KernelTable, KernelTable], float], str]] = {
    "eager_calls": ("all calls of eager V4", lambda eager, _: _calls(eager), ALL_CALLS),
    "compiled_calls": ("all calls of compiled V4", lambda _, compiled: _calls(compiled), ALL_CALLS),
    "eager_products": (
        "products of eager V4",
        lambda eager, _: _products(eager),
        "a linear layer has one product forward and two backward",
    ),
    "compiled_products": (
        "products of compiled V4",
        lambda _, compiled: _products(compiled),
        "aten::addmm is one, too",
    ),
    "compiled_fused_calls": (
        "fused kernels' calls",
        lambda _, compiled: _fused(compiled),
        "add up the calls of all names with _fused_ in them that the compiler made",
    ),
}
"""What is counted, how, and where to find it."""


def _count(name: str, work: Work) -> Iterator[Item]:
    what, count, how = COUNTS[name]
    said, (eager, compiled) = work.answers().number(f"findings.{name}"), _profiles(work)
    table = eager if name.startswith(EAGER) else compiled
    yield _read(what, said, count(eager, compiled), steps=table.steps, how=how)


def _read(
    what: str,
    said: float,
    found: float,
    *,
    steps: int | None,
    how: str,
    within: float = 0.5,
    unit: str = "",
) -> Item:
    """A number of one step that was read off a profile: right up to rounding.

    Args:
        steps: that the profile has.
        how: where to find it.
        within, unit: of `found`.
    """
    if abs(said - found) <= within:
        return Item(True, what, f"{found:,.4g}{unit} a step")
    if steps and abs(said / steps - found) <= within:
        return Item(False, what, f"you wrote {said:,.4g}, which is of all {steps} steps")
    side = "high" if said > found else "low"
    return Item(False, what, f"you wrote {said:,.4g}, which is too {side}: {how}")


def _swiglu(work: Work) -> Iterator[Item]:
    _, compiled = _profiles(work)
    what = "the kernel of SwiGLU, forward"
    said = work.answers().text("findings.swiglu_kernel")
    names = [_GRAPH.sub("", kernel.name) for kernel in compiled.kernels if _is_fused(kernel)]
    name = _GRAPH.sub("", said)
    if name in names and "silu" in name and "silu_backward" not in name:
        yield Item(True, what)
    elif name not in names:
        with_silu = [name for name in names if "silu" in name][:_NAMED]
        yield Item(
            False, what, "\n".join([f"no kernel is called {said!r}; look among", *with_silu])
        )
    else:
        yield Item(False, what, f"{said} is another one: {SWIGLU}")


# --- the recorded profiles -----------------------------------------------------------------------


def _recorded(device: str, version: str) -> KernelTable:
    folder = REFERENCE / device / "profiles" / version / "pytorch_profiler"
    return kernel_file.read(folder / kernel_file.JSON_FILE)


def _addmm(work: Work) -> Iterator[Item]:
    said = work.answers().choice("puzzles.addmm_adds", ("residual", "gradient", "mask"))
    why = {
        "residual": "in training the residual stream is added by the next norm's kernel: see the "
        "add in the names of the fused norms; and there would be two a layer, not one a step",
        "mask": "the causal mask is inside of attention, and is never added to a product",
        "gradient": "the embedding is the head too: its two gradients are added up, and the "
        "compiler adds the first while it computes the second",
    }[said]
    yield Item(said == "gradient", "what the one addmm adds", why)


def _graph(key: str, work: Work) -> Iterator[Item]:
    table = _recorded("nvidia_h200", "v4")
    assert table.steps
    what, found, how = {
        "graph_launches": (
            "launches of a graph on the H200",
            table.host_calls["cudaGraphLaunch"].calls / table.steps,
            "look for cudaGraphLaunch in kernels.json",
        ),
        "graph_kernels": ("kernels that they run", _calls(table), "the end of `show` has them"),
    }[key]
    said = work.answers().number(f"puzzles.{key}")
    yield _read(what, said, found, steps=table.steps, how=how)


def _idle(version: str, work: Work) -> Iterator[Item]:
    table = _recorded("nvidia_h200", version)
    assert table.steps and table.timeline
    found = table.timeline.idle_ns / table.steps / 1e6
    said = work.answers().number(f"puzzles.idle_ms_{version}")
    what, how = (
        f"idle time of the H200 in {version.upper()}",
        "the end of `show` has it, of all steps",
    )
    yield _read(what, said, found, steps=table.steps, how=how, within=0.05 * found, unit=" ms")


def _graph_removes(work: Work) -> Iterator[Item]:
    said = work.answers().choice("puzzles.graph_removes", ("bytes", "kernels", "launches"))
    why = {
        "bytes": "the same kernels run on the same tensors: they move the same bytes",
        "kernels": "the graph replays the kernels that were captured, each of them",
        "launches": "and with them the time in which the GPU waits for the host; kernels and bytes "
        "stay",
    }[said]
    yield Item(said == "launches", "what a graph removes", why)
