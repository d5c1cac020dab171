"""The compiler's fusions: the participant's profiles of V4, eager and compiled, against what was
predicted and read off."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from workshop.errors import WorkshopError
from workshop.exercises.frame import RESULTS, Item, Work
from workshop.exercises.predict import Chosen, Found, Predicted, Question, Written, ask
from workshop.profilers import kernel_file
from workshop.profilers.table import Kernel, KernelTable

EAGER, COMPILED = "eager", "pytorch_profiler"
"""Folders below results/profiles/v4."""
REFERENCE = RESULTS / "reference/nvidia_h200/profiles"
_FUSED = re.compile(r"(?:cpp|triton_\w+?)_fused_")
_PRODUCTS_ON_CPU = ("aten::mm", "aten::addmm", "aten::bmm")
_GRAPH = re.compile(r"^graph_\d+_")
"""Before a kernel's name in a profile of the CPU."""
_NAMED = 4
"""Kernels that a red Item names."""

Measured = dict[str, KernelTable]
"""The participant's profiles of V4, EAGER and COMPILED, and the H200's of "v2" and "v4"."""


def check(work: Work) -> Iterator[Item]:
    tables = measured(work)  # without the profiles there is nothing to compare with
    yield from ask(work, lambda _: tables, QUESTIONS)


def measured(work: Work) -> Measured:
    """Raises WorkshopError: a profile is missing or of something else, or they differ in more."""
    tables, runs = {}, {}
    for folder in (EAGER, COMPILED):
        table, run = work.profile("v4", folder) or (None, None)
        if table is None or run is None or not table.steps:
            raise WorkshopError(
                f"results/profiles/v4/{folder} is missing, or has no steps: profile V4 as the "
                "sheet says"
            )
        tables[folder], runs[folder] = table, run
    if runs[EAGER].options.get("compile") != "none" or runs[EAGER].options.get("cuda_graph"):
        raise WorkshopError(
            "results/profiles/v4/eager is of a compiled or captured run: profile it again with "
            "-- --compile none --no-cuda-graph"
        )
    if runs[COMPILED].options.get("compile") == "none":
        raise WorkshopError(
            "results/profiles/v4/pytorch_profiler is of an eager run: profile V4 again, without "
            "--compile none (is there a C++ compiler?)"
        )
    one, other = (
        {name: getattr(run, name) for name in ("config", "batch_size", "seq_len", "precision")}
        | {"device": run.device.get("name")}
        for run in runs.values()
    )
    for name in one:
        if one[name] != other[name]:
            raise WorkshopError(
                f"the two profiles of V4 differ in their {name}: profile both with the same flags, "
                "on one device"
            )
    if not any(map(_is_fused, tables[COMPILED].kernels)):
        raise WorkshopError(
            "results/profiles/v4/pytorch_profiler does not name the compiler's kernels: profile "
            "it again with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 before the command"
        )
    for version in ("v2", "v4"):
        path = REFERENCE / version / "pytorch_profiler" / kernel_file.JSON_FILE
        tables[version] = kernel_file.read(path)
    return tables


# --- numbers of one step -------------------------------------------------------------------------


def _steps(table: KernelTable) -> int:
    assert table.steps
    return table.steps


def _calls(table: KernelTable, which: Callable[[Kernel], bool] = lambda _: True) -> float:
    """Calls of the kernels (operators) that are counted."""
    return sum(kernel.calls for kernel in table.kernels if which(kernel)) / _steps(table)


def _is_fused(kernel: Kernel) -> bool:
    return _FUSED.search(kernel.name) is not None


def _fused(table: KernelTable) -> float:
    return _calls(table, _is_fused)


def _products(table: KernelTable) -> float:
    if table.what == "operator":  # aten::matmul and aten::linear call one of these
        return _calls(table, lambda kernel: kernel.name in _PRODUCTS_ON_CPU)
    return _calls(table, lambda kernel: kernel.category == "GEMM")


def _graph_launches(table: KernelTable) -> float:
    return table.host_calls["cudaGraphLaunch"].calls / _steps(table)


def _idle_ms(table: KernelTable) -> float:
    assert table.timeline
    return table.timeline.idle_ns / _steps(table) / 1e6


def _not_swiglu(m: Measured, answer: str) -> str:
    names = [_GRAPH.sub("", kernel.name) for kernel in m[COMPILED].kernels if _is_fused(kernel)]
    name = _GRAPH.sub("", answer)
    if name not in names:
        with_silu = [name for name in names if "silu" in name][:_NAMED]
        return "\n".join([f"no kernel is called {answer!r}; look among", *with_silu])
    if "silu" in name and "silu_backward" not in name:
        return ""
    return (
        f"{answer} is another one: the forward kernel's name has mul and silu, and no silu_backward"
    )


# --- the questions -------------------------------------------------------------------------------


def _read(
    key: str, what: str, table: str, value: Callable[[KernelTable], float], how: str, **more: Any
) -> Found[Measured]:
    """A number of one step that is read off a profile: right up to rounding."""

    def of_all_steps(m: Measured) -> list[tuple[float, str]]:
        steps = _steps(m[table])
        return [(steps * value(m[table]), f"that is of all {steps} steps")]

    rounding: dict[str, Any] = {"within": 0, "margin": 0.5, "unit": ""} | more
    return Found(
        key, what, value=lambda m: value(m[table]), how=how, slips=of_all_steps, **rounding
    )


ALL_CALLS = "the first row of `workshop.profilers diff` has it"
QUESTIONS: tuple[Question[Measured], ...] = (
    Predicted(
        "predict.calls_gone_percent", "calls that the compiler removes", "%",
        lambda m: 100 * (1 - _calls(m[COMPILED]) / _calls(m[EAGER])),
        "What goes is all that lies between products and attention: element-wise operations, "
        "copies, views. Their number grows with the layers, and so does the number of fused "
        "kernels.",
    ),
    Predicted(
        "predict.products_gone", "matrix products that it removes", "",
        lambda m: _products(m[EAGER]) - _products(m[COMPILED]),
        "Inductor hands large products to the library, as eager code does: there is nothing to "
        "gain. It fuses the operations between them.",
    ),
    Predicted(
        "predict.fused_calls", "calls of fused kernels", "", lambda m: _fused(m[COMPILED]),
        "A product needs its whole input, and its whole result is there before the next kernel "
        "starts: so one kernel, at least, for each gap between products (or attention) that has "
        "work in it.",
    ),
    _read("findings.eager_calls", "all calls of eager V4", EAGER, _calls, ALL_CALLS),
    _read("findings.compiled_calls", "all calls of compiled V4", COMPILED, _calls, ALL_CALLS),
    _read(
        "findings.eager_products", "products of eager V4", EAGER, _products,
        "a linear layer has one product forward and two backward",
    ),
    _read(
        "findings.compiled_products", "products of compiled V4", COMPILED, _products,
        "aten::addmm is one, too",
    ),
    _read(
        "findings.compiled_fused_calls", "fused kernels' calls", COMPILED, _fused,
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
