"""The compiler's fusions: the participant's profiles of V4, eager and compiled, against what was
predicted and read off."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workshop.errors import WorkshopError
from workshop.exercises.frame import RESULTS, Item, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, Written, ask
from workshop.profilers import kernel_file
from workshop.profilers.table import Kernel, KernelTable
from workshop.results import RunResult

EAGER, COMPILED = "eager", "pytorch_profiler"
"""Folders below results/profiles/v4."""
REFERENCE = RESULTS / "reference/nvidia_h200/profiles"
_FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_")
_PRODUCTS_ON_CPU = ("aten::mm", "aten::addmm", "aten::bmm")
_GRAPH = re.compile(r"^graph_\d+_")
"""Before a kernel's name in a profile of the CPU."""
_NAMED = 4
"""Kernels that a red Item names."""


def check(work: Work) -> Iterator[Item]:
    measured(work)  # without the profiles there is nothing to compare with
    yield from ask(work, measured, QUESTIONS)


# --- the participant's profiles ------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Profiles of V4, of the same model."""

    eager: KernelTable
    compiled: KernelTable
    v2: KernelTable
    """Recorded on an H200, as is the next."""
    v4: KernelTable


def measured(work: Work) -> Measured:
    """Raises WorkshopError: a profile is missing or of something else, or they differ in more."""
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
    return Measured(eager, compiled, *map(_recorded, ("v2", "v4")))


def _profile(work: Work, folder: str) -> tuple[KernelTable, RunResult]:
    table, record = work.profile("v4", folder) or (None, None)
    if table is None or record is None or not table.steps:
        raise WorkshopError(
            f"results/profiles/v4/{folder} is missing, or has no steps: profile V4 as the sheet "
            "says"
        )
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


def _graph_launches(table: KernelTable) -> float:
    assert table.steps
    return table.host_calls["cudaGraphLaunch"].calls / table.steps


def _idle_ms(table: KernelTable) -> float:
    assert table.steps and table.timeline
    return table.timeline.idle_ns / table.steps / 1e6


def _products(table: KernelTable) -> float:
    return _calls(table, lambda kernel: _is_product(table, kernel))


def _fused(table: KernelTable) -> float:
    return _calls(table, _is_fused)


def _not_swiglu(m: Measured, answer: str) -> str:
    names = [_GRAPH.sub("", kernel.name) for kernel in m.compiled.kernels if _is_fused(kernel)]
    name = _GRAPH.sub("", answer)
    if name not in names:
        with_silu = [name for name in names if "silu" in name][:_NAMED]
        return "\n".join([f"no kernel is called {answer!r}; look among", *with_silu])
    if "silu" in name and "silu_backward" not in name:
        return ""
    return (
        f"{answer} is another one: the forward kernel's name has mul and silu, and no silu_backward"
    )


def _recorded(version: str) -> KernelTable:
    folder = REFERENCE / version / "pytorch_profiler"
    return kernel_file.read(folder / kernel_file.JSON_FILE)


# --- the questions -------------------------------------------------------------------------------


def _read(
    key: str, what: str, table: str, value: Callable[[KernelTable], float], how: str, **more: Any
) -> Found[Measured]:
    """A number of one step that is read off a profile: right up to rounding."""

    def of_all_steps(m: Measured) -> list[tuple[float, str]]:
        steps = getattr(m, table).steps
        return [(steps * value(getattr(m, table)), f"that is of all {steps} steps")]

    rounding: dict[str, Any] = {"within": 0, "margin": 0.5, "unit": ""} | more
    return Found(
        key, what, value=lambda m: value(getattr(m, table)), how=how, slips=of_all_steps, **rounding
    )


ALL_CALLS = "the first row of `workshop.profilers diff` has it"
QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.calls_gone_percent", "calls that the compiler removes", "%",
        lambda m: 100 * (1 - _calls(m.compiled) / _calls(m.eager)),
        "What goes is all that lies between products and attention: element-wise operations, "
        "copies, views. Their number grows with the layers, and so does the number of fused "
        "kernels.",
    ),
    Predicted(
        "predict.products_gone", "matrix products that it removes", "",
        lambda m: _products(m.eager) - _products(m.compiled),
        "Inductor hands large products to the library, as eager code does: there is nothing to "
        "gain. It fuses the operations between them.",
    ),
    Predicted(
        "predict.fused_calls", "calls of fused kernels", "", lambda m: _fused(m.compiled),
        "A product needs its whole input, and its whole result is there before the next kernel "
        "starts: so one kernel, at least, for each gap between products (or attention) that has "
        "work in it.",
    ),
    _read("findings.eager_calls", "all calls of eager V4", "eager", _calls, ALL_CALLS),
    _read("findings.compiled_calls", "all calls of compiled V4", "compiled", _calls, ALL_CALLS),
    _read(
        "findings.eager_products", "products of eager V4", "eager", _products,
        "a linear layer has one product forward and two backward",
    ),
    _read(
        "findings.compiled_products", "products of compiled V4", "compiled", _products,
        "aten::addmm is one, too",
    ),
    _read(
        "findings.compiled_fused_calls", "fused kernels' calls", "compiled", _fused,
        "add up the calls of all names with _fused_ in them that the compiler made",
    ),
    Written("findings.swiglu_kernel", "the kernel of SwiGLU, forward", _not_swiglu),
    Chosen(
        "puzzles.addmm_adds", "what the one addmm adds",
        {
            "residual": "in training the residual stream is added by the next norm's kernel: see "
            "the add in the names of the fused norms; and there would be two a layer, not one a "
            "step",
            "gradient": "the embedding is the head too: its two gradients are added up, and the "
            "compiler adds the first while it computes the second",
            "mask": "the causal mask is inside of attention, and is never added to a product",
        },
        lambda _: "gradient",
    ),
    _read(
        "puzzles.graph_launches", "launches of a graph on the H200", "v4", _graph_launches,
        "look for cudaGraphLaunch in kernels.json",
    ),
    _read(
        "puzzles.graph_kernels", "kernels that they run", "v4", _calls,
        "the end of `show` has them",
    ),
    *(
        _read(
            f"puzzles.idle_ms_{version}", f"idle time of the H200 in {version.upper()}", version,
            _idle_ms, "the end of `show` has it, of all steps", unit="ms", within=0.05, margin=0,
        )
        for version in ("v2", "v4")
    ),
    Chosen(
        "puzzles.graph_removes", "what a graph removes",
        {
            "bytes": "the same kernels run on the same tensors: they move the same bytes",
            "kernels": "the graph replays the kernels that were captured, each of them",
            "launches": "and with them the time in which the GPU waits for the host; kernels and "
            "bytes stay",
        },
        lambda _: "launches",
    ),
)  # fmt: skip
