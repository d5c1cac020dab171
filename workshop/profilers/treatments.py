"""Remedies for the advisor's findings: in general, by the versions of the workshop that are not in
the run yet, and by the flags of a lab."""

import re
from collections.abc import Callable

from workshop.profilers.metrics import Figures, digits
from workshop.profilers.table import Kernel, KernelTable
from workshop.versions import VERSIONS

FEWEST_PASSES = 3
"""Kernels of an update that goes operation by operation: SGD's is a single one as it is."""
# The computation of these kernels is in their template arguments: they follow an I in a mangled
# name, and are missing in one that rocprofv3 has truncated.
_UNFUSED = re.compile(r"multi_tensor_apply_kernel[<I](?!.*fused_?adam)", re.IGNORECASE | re.DOTALL)
_LONGEST_NAME = 1 << 14


def treatment(figures: Figures, finding: str) -> str:
    """The remedy for a finding, named without "-bound"."""
    if figures.lab:
        own = _LABS.get(figures.lab.lab, {})
        if finding == "GEMM" and own:
            finding = "GEMM in fp32" if figures.precision == "fp32" else "GEMM in 16 bits"
        if finding in own:
            return own[finding]
    general = _GENERAL.get(finding, "")
    text = general if isinstance(general, str) else general(figures)
    sentences = _beyond(figures, _BY_VERSION.get(finding, {}))
    if not text and not sentences and figures.run:
        return f"This is what {_where(figures.run.version)} leaves of it."
    return " ".join(filter(None, [text, *sentences]))


def unfused_update(table: KernelTable) -> list[Kernel]:
    """The kernels of an optimizer that goes operation by operation; none of another."""
    found = [k for k in table.kernels if _UNFUSED.search(k.name, 0, _LONGEST_NAME)]
    return found if len(found) >= FEWEST_PASSES else []


def _where(version: str) -> str:
    return f"{version.upper()} ({VERSIONS[version].folder}/README.md)"


def _beyond(figures: Figures, sentences: dict[str, str]) -> list[str]:
    """The sentences, by version, of those that can treat the run: on which its version is not
    built, and which this kind of machine can time; {} becomes the version's name and README."""
    built_on, key = set(), figures.run.version if figures.run else None
    while key is not None:
        built_on.add(key)
        key = VERSIONS[key].parent
    return [
        sentence.format(_where(version))
        for version, sentence in sentences.items()
        if version not in built_on and not (figures.on_host and VERSIONS[version].triton)
    ]


def _gate(figures: Figures) -> str:
    version = f" --version {figures.run.version}" if figures.run else ""
    return (
        f"No time of such a step counts. python -m workshop.parity{version} (the gate, "
        "workshop/gate/parity.py) compares every parameter's gradient with V1's; look for a "
        "detach(), a no_grad(), a kernel without a backward pass."
    )


def _workers(figures: Figures) -> str:
    loading = figures.table.loading
    first = (
        "Workers first, as many as there are free cores, with persistent_workers=True, or each "
        "epoch starts them again."
        if loading and loading.in_thread
        else "More workers first, while there are free cores; a larger prefetch_factor helps only "
        "where some batches take longer than others."
    )
    return (
        f"{first} Then cheaper batches: files decoded once and packed into one, augmentation on "
        "the GPU (pin_memory=True for the copies), or all data kept there."
    )


def _products(figures: Figures) -> str:
    run = figures.run
    if figures.on_host:
        return (
            "The CPU's library computes them. Most of what the workshop's versions change lies "
            "between them: profile on a GPU, where that takes more of the time."
        )
    if run is None:
        return (
            "If they run in fp32, bf16 or tf32 is faster (--precision here); else larger products "
            f"are: a larger batch, and weights stacked as in {_where('v2')}."
        )
    faster = {"fp32": ["tf32", "bf16"], "tf32": ["bf16"]}.get(run.precision)
    if faster is None:
        larger = (
            "What is left is the products' own rate, which is higher for larger ones: "
            "--batch-size, --config."
        )
        stacked = {"v2": "{} makes one product of q, k and v, and one of gate and up."}
        return " ".join([larger, *_beyond(figures, stacked)])
    rates = figures.peaks.tflops if figures.peaks else {}
    faster = [name for name in faster if name in rates or not rates]
    facts = [f"{name} {digits(rates[name])}" for name in (run.precision, *faster) if name in rates]
    sheet = f" (TFLOP/s on the data sheet: {', '.join(facts)})" if facts else ""
    return (
        f"--precision {' or '.join(faster)} uses faster units{sheet}; PERFORMANCE_RESULTS.md "
        "has every version's times at both."
    )


def _update(figures: Figures) -> str:
    if unfused_update(figures.table):
        return f"AdamW(fused=True) makes a single pass: configure_optimizer of {_where('v2')}."
    return (
        "An update costs the same however many tokens it follows: a larger --batch-size makes "
        "it a smaller part (compare the sizes in PERFORMANCE_RESULTS.md)."
    )


_GENERAL: dict[str, str | Callable[[Figures], str]] = {
    "severed-gradient": _gate,
    "short-backward": _gate,
    "backward-unplaced": "run_pytorch_profiler.py places the backward pass right, in each "
    "version's folder.",
    "missing-products": lambda figures: (
        "Profile whole steps, as the run_* scripts do: a range of one thread misses the backward "
        f"pass. {_gate(figures)}"
    ),
    "data": _workers,
    "launch": "--cuda-graph captures the step, and one launch replays all of it: it works with "
    f"every version, and {_where('v4')} does so by default.",
    "host": "Look at what the host's threads do in the gaps of the timeline, which "
    "run_pytorch_profiler.py writes in each version's folder; workshop/run/data.py makes all "
    "batches before the first step.",
    "latency": "Only fewer kernels, or longer ones, make this less: --batch-size and --config give "
    "each of them more to do.",
    "idle": "Compare the span of a step here with its time without a profiler, which "
    "analysis_tools/compare_versions.py measures.",
    "mixed": "Take the findings one by one, the largest first; README.md lists what each version "
    "does.",
    "no-timeline": "run_pytorch_profiler.py writes a timeline, in each version's folder.",
    "GEMM": _products,
    "attention": _products,
    "optimizer": _update,
    "copy": "Keep on the device what is used again; pin the host's memory and copy with "
    "non_blocking=True, as Runner does with the batches (workshop/run/trainer.py).",
    "communication": "The workshop's versions train on one device and have none. Send gradients in "
    "larger buckets, while the backward pass still runs: DistributedDataParallel does both.",
    "synchronisations": "Leave out of the loop what reads a result on the host: .item(), .cpu(), "
    "printing a tensor, copies without non_blocking=True. Runner (workshop/run/trainer.py) looks "
    "at the losses after the run.",
    "occupancy": "A low one is a fault only of a kernel that is far from both the memory's and the "
    "products' rate: run_ncu.sh has all three. Products reach theirs with few warps, since each "
    "holds much in registers.",
    "unrecognised": "workshop/profilers/categories.py assigns categories by name: add what is "
    "missing.",
}
_V2_FUSES = "{} has fused forms of norm and attention."
_V4 = "{} has the compiler join what lies between the products."
_BY_VERSION = {
    "launch": {"v2": "{} does the same in fewer kernels."},
    "latency": {"v2": _V2_FUSES, "v3": "{} does more in each kernel of its own.", "v4": _V4},
    "elementwise": {
        "v2": _V2_FUSES,
        "v3": "{} passes over memory once, in kernels of its own.",
        "v4": _V4,
    },
    "device-copies": {
        "v3": "{} reads and writes the products' precision in its own kernels.",
        "v4": "{} has the compiler cast in the kernel before or after.",
    },
    "materialised-attention": {
        "v2": "{} calls F.scaled_dot_product_attention, which keeps them on the chip.",
        "v3": "{} does so in a Triton kernel that one can read.",
    },
}
_LABS = {
    "inference_benchmark": {
        "launch": "--cuda-graph captures the network, and one launch replays it; --fold-norms and "
        "--compile make fewer kernels; a larger --batch-size gives each more to do.",
        "host": "Look at what the host's threads do in the gaps of the timeline, which "
        "run_pytorch_profiler.py writes.",
        "latency": "Only fewer or longer kernels make this less: --compile, --fold-norms, a larger "
        "--batch-size.",
        "idle": "Compare the span of a step here with its time without a profiler, which the "
        "benchmark prints.",
        "mixed": "Take the findings one by one, the largest first; --ladder shows what each switch "
        "is worth.",
        "GEMM in fp32": "--fp16 1 (or --precision tf32, bf16) uses faster units.",
        "GEMM in 16 bits": "What is left is the products' own rate: --channels-last, a larger "
        "--batch-size, --compile --compileContext \"{'mode': 'max-autotune'}\".",
        "attention": "A larger --batch-size makes larger products; --fp16 1 uses faster units.",
        "elementwise": "--fold-norms takes the batch norms out; --compile joins what lies between "
        "the products.",
        "device-copies": "--channels-last spares the libraries' changes of layout; --fp16 1 casts "
        "the weights once.",
        "materialised-attention": "--compile joins softmax with what surrounds it.",
        "optimizer": "An update costs the same for any batch: a larger --batch-size makes it a "
        "smaller part.",
        "copy": "The benchmark's images lie on the device before the first iteration: look in the "
        "timeline for what is copied.",
        "synchronisations": "Leave out of the loop what reads a result on the host: .item(), "
        ".cpu(), printing a tensor.",
    }
}
"""By lab and finding."""
