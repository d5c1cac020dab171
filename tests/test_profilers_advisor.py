"""The advisor: what bounds tables like those of the versions, each finding on both sides of its
threshold, and no figure in a sentence that the table does not give."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_results import make_result
from torch.profiler import profile as torch_profile
from torch.profiler import record_function

from workshop.profilers import advisor, kineto
from workshop.profilers.advisor import NOTE, WARNING, Advice, advise, headline
from workshop.profilers.load import load, recorded_run
from workshop.profilers.table import HostCall, Kernel, KernelTable, Timeline
from workshop.results import Gradients
from workshop.run import flops
from workshop.run.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]

FOREACH = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<{}>, PointwiseOpFunctor>()"
FUSED = "void at::native::multi_tensor_apply_kernel<Metadata<4>, FusedAdamMathFunctor<float>>()"


def kernel(category: str, calls: int, ms: float, name: str = "", **counted: float) -> Kernel:
    return Kernel(name or f"some_{category}", category, calls, ms * 1e6, **counted)


def foreach_update(ms: float) -> list[Kernel]:
    """An AdamW that goes operation by operation."""
    return [kernel("optimizer", 10, ms / 8, FOREACH.format(i)) for i in range(8)]


def table(kernels: Iterable[Kernel], span_ms: float | None = None, **fields: Any) -> KernelTable:
    """A table of kernels that run one after the other, in a timeline of `span_ms`."""
    kernels = sorted(kernels, key=lambda k: -k.total_ns)
    line = None
    if span_ms is not None:
        line = Timeline(span_ms * 1e6, min(sum(k.total_ns for k in kernels), span_ms * 1e6))
    facts = {"tool": "torch.profiler", "device": "NVIDIA H200", "timeline": line} | fields
    return KernelTable(Path("trace.json"), kernels=kernels, **facts)


def record(version: str, preset: str = "medium", precision: str = "bf16", **changes: Any):
    """Record that the runners write beside a profile on an H200."""
    sizes = PRESETS[preset]
    parameters = flops.parameter_count(flops.Sizes(**sizes.model()))
    run = {
        "config": {**sizes.model(), "max_seq_len": 2048},
        "batch_size": sizes.batch_size,
        "seq_len": sizes.seq_len,
        "precision": precision,
        "device": {"type": "cuda", "name": "NVIDIA H200"},
        "status": "profiled",
        "step_ms": [],
        "gradients": Gradients(110, 110, parameters, parameters),
        "options": {"compile": "none", "cuda_graph": version in ("v3", "v4"), "num_steps": 1},
    }
    return make_result(version, **(run | changes))


def launches(calls: int, each_us: float = 5.0, name: str = "cudaLaunchKernel") -> dict:
    return {name: HostCall(calls, calls * each_us * 1e3)}


def phases(forward: float, backward: float, optimizer: float) -> dict[str, float]:
    parts = {"forward": forward, "backward": backward, "optimizer": optimizer}
    return {name: ms * 1e6 for name, ms in parts.items()}


def names(advices: Iterable[Advice]) -> list[str]:
    return [advice.finding for advice in advices]


def found_in(kernels: KernelTable | Iterable[Kernel]) -> list[str]:
    return names(advise(kernels if isinstance(kernels, KernelTable) else table(kernels)))


def find(advices: Iterable[Advice], finding: str) -> Advice:
    return next(advice for advice in advices if advice.finding == finding)


def numbers(pattern: str, sentence: str) -> list[float]:
    """The figures in the one place of a sentence that the pattern matches."""
    match = re.search(pattern, sentence)
    assert match, sentence
    return [float(group.replace(",", "")) for group in match.groups()]


# --- rates ---------------------------------------------------------------------------------------

V4_MEDIUM = table(
    [
        kernel("GEMM", 200, 12.4),
        kernel("attention", 36, 2.4),
        kernel("norm", 50, 1.6),
        kernel("elementwise", 260, 5.2),
        kernel("optimizer", 4, 1.5, FUSED),
    ],
    span_ms=23.5,
    steps=1,
    host_calls=launches(1, 300.0, "cudaGraphLaunch") | launches(1),
)


def test_the_rate_of_products_is_that_of_the_models_operations() -> None:
    sentence = find(advise(V4_MEDIUM, record("v4")), "GEMM-bound").sentence
    gemm, attention, tera, rate, share, peak = numbers(
        r"GEMM 54%: ([\d.]+) ms a step; attention 10%: ([\d.]+) ms .* needs ([\d.]+) TFLOP.*: "
        r"([\d,]+) TFLOP/s, (\d+)% of the ([\d,]+) that the data sheet gives for bf16",
        sentence,
    )
    assert (gemm, attention, peak) == (12.4, 2.4, 989)
    work = flops.step_flops(flops.Sizes(**PRESETS["medium"].model()), 16, 512).total
    assert tera == pytest.approx(work / 1e12, rel=0.005)
    assert rate == pytest.approx(tera / (gemm + attention) * 1e3, rel=0.005)
    assert share == pytest.approx(100 * rate / peak, abs=0.6)


def test_counters_come_before_the_models_operations() -> None:
    kernels = [kernel("GEMM", 20, 10.0, flops=6.0e12), kernel("elementwise", 20, 5.0, bytes=12e9)]
    found = advise(table(kernels, 15.0, steps=1), record("v4"))
    sentence = find(found, "GEMM-bound").sentence
    assert "The profiler counted 6 TFLOP in 10 ms of it: 600 TFLOP/s, 61% of the 989" in sentence
    sentence = find(found, "elementwise").sentence
    assert "counted 12 GB in 5 ms of it: 2,400 GB/s, 50% of the 4,800" in sentence
    # Where the counters cover a small part of them, their rate is not the group's.
    kernels[0] = kernel("GEMM", 20, 1.0, flops=6.0e11)
    kernels += [kernel("GEMM", 20, 9.0, "another_gemm"), kernel("elementwise", 9, 4.0, "more")]
    for advice in advise(table(kernels, 19.0)):
        assert "counted" not in advice.sentence


# --- the step is not what it seems to be ---------------------------------------------------------


def test_a_severed_gradient_comes_first() -> None:
    """As the public V3: its norm passed no gradient on, and next to nothing trained."""
    severed = table(V4_MEDIUM.kernels, 21.9, steps=1, phases_ns=phases(21.0, 0.06, 1.5))
    run = record("v3", gradients=Gradients(110, 1, 189_793_280, 1_024_000))
    found = advise(severed, run)
    assert names(found)[:2] == ["severed-gradient", "short-backward"]
    assert [advice.severity for advice in found[:3]] == [WARNING, WARNING, NOTE]
    assert "1,024,000 of 189,793,280 parameters (0.5%), in 1 of 110 tensors" in found[0].sentence
    assert "python -m workshop.parity --version v3" in found[0].treatment
    rate = find(found, "GEMM-bound").sentence
    assert "TFLOP" not in rate, "the model's operations were not done"
    # Without a record the ranges alone show it.
    alone = advise(severed)
    assert alone[0].finding == "short-backward"
    assert "take 60 µs a step, 0.00 of the forward's 21 ms a step" in alone[0].sentence


@pytest.mark.parametrize(
    ("parts", "finding"),
    [
        (phases(10.0, 5.0, 1.0), None),
        (phases(10.0, 4.9, 1.0), "short-backward"),
        ({"forward": 15e6, "optimizer": 1e6}, "short-backward"),
        (phases(4.0, 0.0, 1.0), "backward-unplaced"),  # 11 of 16 ms lie in no range
        ({"forward": 16e6}, None),  # inference
        ({"optimizer": 16e6}, None),
        ({}, None),  # a whole step in one graph
    ],
)
def test_the_backward_range(parts, finding) -> None:
    profile = table([kernel("GEMM", 50, 16.0)], 17.0, phases_ns=parts, steps=1)
    found = set(names(advise(profile))) & {"short-backward", "backward-unplaced"}
    assert found == ({finding} if finding else set())


def test_products_that_the_counters_or_the_clock_miss() -> None:
    """ncu with a range of one thread: the backward pass is not in the table."""
    work = flops.step_flops(flops.Sizes(**PRESETS["medium"].model()), 16, 512).total

    def counted(part: float, ms: float = 15.0, steps: int = 1) -> list[Advice]:
        kernels = [
            kernel("GEMM", 200, ms, flops=part * work),
            kernel("GEMM", 20, ms / 50, "splitk"),
        ]
        run = record("v4", options={"num_steps": steps})
        return advise(table(kernels, tool="ncu"), run)

    assert "missing-products" not in names(counted(0.76))
    assert "missing-products" not in names(counted(1.52, 30.0, steps=2))
    found = counted(0.34)
    assert found[0].finding == "missing-products"
    assert found[0].severity == WARNING
    got, share, needed = numbers(
        r"counted ([\d.]+) TFLOP in 1 steps, ([\d.]+) of the ([\d.]+) that", found[0].sentence
    )
    assert got / needed == pytest.approx(share, abs=0.006)
    assert needed == pytest.approx(work / 1e12, rel=0.005)
    # No counters: 9.64 TFLOP in 9 ms are more than the chip can do, in 11 ms they are not.
    for ms, finding in ((9.0, True), (11.0, False)):
        profile = table([kernel("GEMM", 200, ms)], ms, steps=1)
        assert ("missing-products" in names(advise(profile, record("v4")))) is finding


# --- each finding on both sides of its threshold -------------------------------------------------


def mostly(share: float, *, of: Kernel, rest: str = "GEMM", **fields: Any) -> KernelTable:
    """A table in which `of` takes this share of 100 ms, and a kernel of category `rest` the
    others; there is no timeline."""
    taken = Kernel(of.name, of.category, of.calls, share * 100e6)
    return table([taken, kernel(rest, 100, (1 - share) * 100, "the_rest")], **fields)


HOST_COPY = kernel("copy", 5, 0, "Memcpy HtoD (Pageable -> Device)")
CAST = kernel("copy", 90, 0, "elementwise_kernel<direct_copy_kernel_cuda>")
SOFTMAX = kernel(
    "elementwise", 20, 0, "softmax_warp_backward<float, float, float, 9, false, false>"
)


LEAST = advisor.LEAST_SHARES


@pytest.mark.parametrize(
    ("finding", "of", "threshold", "rest"),
    [
        ("elementwise", kernel("norm", 90, 0), LEAST["elementwise"], "GEMM"),
        ("GEMM", kernel("GEMM", 90, 0), LEAST["products"], "elementwise"),
        ("attention", kernel("attention", 90, 0), LEAST["products"], "elementwise"),
        ("device-copies", CAST, LEAST["device-copies"], "GEMM"),
        ("copy", HOST_COPY, LEAST["copy"], "GEMM"),
        ("copy", kernel("copy", 5, 0, "[CUDA memcpy Host-to-Device]"), 0.05, "GEMM"),
        ("communication", kernel("communication", 9, 0), LEAST["communication"], "GEMM"),
        ("materialised-attention", SOFTMAX, LEAST["materialised-attention"], "GEMM"),
        ("unrecognised", kernel("other", 90, 0), LEAST["unrecognised"], "GEMM"),
        ("elementwise-bound", kernel("norm", 90, 0), 0.5, "GEMM"),
        ("optimizer-bound", kernel("optimizer", 9, 0, FUSED), 0.5, "GEMM"),
        ("communication-bound", kernel("communication", 90, 0), 0.5, "GEMM"),
        ("copy-bound", HOST_COPY, 0.5, "GEMM"),
    ],
)
def test_a_finding_needs_a_share_above_its_threshold(finding, of, threshold, rest) -> None:
    assert finding in found_in(mostly(threshold + 0.002, of=of, rest=rest))
    assert finding not in found_in(mostly(threshold - 0.002, of=of, rest=rest))


MANGLED = "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorListMetadataILi{}E"


@pytest.mark.parametrize(
    ("update", "unfused"),
    [
        (foreach_update(3.1), True),
        (foreach_update(2.9), False),
        ([kernel("optimizer", 8, 9.0, FUSED)], False),
        ([kernel("optimizer", 10, 2.0, MANGLED.format(i)) for i in range(4)], True),
        (
            [
                kernel("optimizer", 10, 2.0, f"{MANGLED}NS1_20FusedAdamMathFunctorIfLi4EEE{i}")
                for i in range(4)
            ],
            False,
        ),
    ],
)
def test_only_an_update_in_many_passes_is_called_unfused(update, unfused: bool) -> None:
    assert ("optimizer" in found_in([kernel("GEMM", 100, 97.0), *update])) is unfused


@pytest.mark.parametrize(
    ("of_attention", "name"),
    [
        (False, "cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>"),
        (False, "softmax_warp_forward<float, float, float, 10, true, false>"),
        (False, "_ZN12_GLOBAL__N_120softmax_warp_forwardIfffLi10ELb1ELb0EEEvPT0_PKT_iiiPKbib"),
        (False, "cunn_SoftMaxForward"),
        (True, "softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false, false>"),
        (True, "_ZN12_GLOBAL__N_120softmax_warp_forwardIN3c108BFloat16ES2_fLi9ELb0ELb1EEEvPT0_PK"),
    ],
)
def test_the_losss_softmax_is_not_attentions(of_attention: bool, name: str) -> None:
    profile = mostly(0.2, of=kernel("elementwise", 20, 0, name))
    assert ("materialised-attention" in found_in(profile)) is of_attention


def idle(share: float, gap_us: float = 20.0, **fields: Any) -> KernelTable:
    """A table whose GPU idles for this share of the time, in gaps of `gap_us`."""
    calls = 1000
    idle_ms = calls * gap_us / 1e3
    busy_ms = idle_ms * (1 - share) / share
    return table([kernel("GEMM", calls, busy_ms)], span_ms=idle_ms + busy_ms, **fields)


@pytest.mark.parametrize(
    ("profile", "finding"),
    [
        (idle(0.24), None),
        (idle(0.26), "idle"),
        (idle(0.59), "idle"),
        (idle(0.61), "launch-bound"),
        (idle(0.61, gap_us=99), "launch-bound"),
        (idle(0.61, gap_us=101), "host-bound"),
        (idle(0.61, host_calls=launches(1, name="hipGraphLaunch")), "host-bound"),
        (idle(0.61, gap_us=3.1), "launch-bound"),
        (idle(0.61, gap_us=3.0), "latency-bound"),
        (idle(0.61, host_calls=launches(1000, name="hipExtModuleLaunchKernel")), "launch-bound"),
        (idle(0.95, what="operator"), None),
    ],
)
def test_idle_time(profile, finding) -> None:
    bounds = {"launch-bound", "host-bound", "latency-bound"}
    found = set(names(advise(profile))) & {"idle", *bounds}
    assert found == ({finding} if finding else set())
    if finding in (None, "idle"):
        assert headline(advise(profile)).finding == "GEMM-bound"


@pytest.mark.parametrize(
    ("calls", "each_us", "share", "found"),
    [
        ({"cudaStreamSynchronize": 13}, 500, 0.5, True),
        ({"cudaStreamSynchronize": 12}, 500, 0.5, False),  # one a step, and the profiler's two
        ({"hipMemcpyWithStream": 9, "hipEventSynchronize": 4}, 500, 0.5, True),
        ({"cudaStreamSynchronize": 13}, 1, 0.5, False),  # short: the GPU was done before
        ({"cudaStreamSynchronize": 13}, 500, 0.05, False),  # it never ran dry
    ],
)
def test_synchronisations(calls, each_us, share, found) -> None:
    host_calls = {name: HostCall(n, n * each_us * 1e3) for name, n in calls.items()}
    advices = advise(idle(share, steps=10, host_calls=host_calls))
    assert ("synchronisations" in names(advices)) is found
    if found:
        sentence = find(advices, "synchronisations").sentence
        assert "waits for the GPU 1.3 times a step" in sentence and "650 µs a step" in sentence


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        ({"GEMM": 35, "attention": 6, "elementwise": 35, "optimizer": 24}, "GEMM-bound"),
        ({"GEMM": 20, "elementwise": 30, "norm": 11, "optimizer": 39}, "elementwise-bound"),
        ({"GEMM": 39, "elementwise": 37, "optimizer": 24}, "mixed"),
        ({"other": 60, "GEMM": 40}, "mixed"),
    ],
)
def test_the_largest_part_bounds_the_run_if_it_is_large_enough(parts, bound) -> None:
    first = headline(advise(table([kernel(name, 50, ms) for name, ms in parts.items()])))
    assert first is not None
    assert first.finding == bound
    if bound == "mixed":
        largest = sorted(parts, key=lambda name: -parts[name])
        shares = ", ".join(f"{name} {parts[name]}%" for name in largest)
        assert first.sentence.endswith(f"of their time: {shares}.")


def test_a_table_without_a_timeline() -> None:
    long, short = (table([kernel("GEMM", 100, ms)], tool="ncu") for ms in (0.51, 0.49))
    assert "is launch-bound" not in find(advise(long), "no-timeline").sentence
    sentence = find(advise(short), "no-timeline").sentence
    assert sentence.startswith("This table, of ncu, has no timeline")
    assert "4.9 µs long on average" in sentence
    assert "unless they come out of a graph, this run is launch-bound" in sentence
    assert "is launch-bound" not in find(advise(short, record("v4")), "no-timeline").sentence
    assert "no-timeline" not in names(advise(V4_MEDIUM))


def test_a_cpus_operators() -> None:
    operators = [
        kernel("GEMM", 90, 700.0, "aten::mm"),
        kernel("elementwise", 500, 250.0, "aten::mul"),
        kernel("elementwise", 8, 50.0, "aten::_softmax"),
    ]
    cpu = {"type": "cpu", "name": "Some CPU"}
    profile = table(operators, 1100.0, what="operator", device=None, steps=1)
    found = advise(profile, record("v1", "tiny", "fp32", device=cpu))
    assert names(found) == ["GEMM-bound", "elementwise", "materialised-attention"]
    assert "70% of the operators' time on the CPU (GEMM 70%: 700 ms a step)" in found[0].sentence
    assert "profile on a GPU" in found[0].treatment
    assert "version3_triton" not in found[1].treatment, "it can't be timed on a CPU"


# --- real profiles, and any ----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_the_checked_in_profiles(version: str) -> None:
    bound = "elementwise-bound" if version in ("v1", "v2") else "GEMM-bound"
    folder = ROOT / "results/reference/nvidia_h200/profiles" / version / "pytorch_profiler"
    profile, run = load(folder), recorded_run(folder)
    assert run is not None
    found = advise(profile, run)
    first = headline(found)
    assert first is not None and first.finding == bound
    assert first.sentence.startswith(f"{bound}: ")
    assert {advice.severity for advice in found} == {NOTE}
    for advice in found:  # a treatment names what the run does not have, and files that exist
        own = f"{version.upper()} (version" in advice.treatment
        assert not own or advice.treatment.startswith("This is what")
        for path in re.findall(r"[\w/]+\.(?:md|py)\b", advice.treatment):
            assert (ROOT / path).exists() or path.startswith("run_"), advice.treatment
    # The same profile of a run whose gradients reached 0.5% of the parameters.
    reached = run.gradients.params_total // 200
    run.gradients = replace(run.gradients, params_with_grad=reached, tensors_with_grad=1)
    found = advise(profile, run)
    assert (found[0].finding, found[0].severity) == ("severed-gradient", WARNING)


@pytest.mark.parametrize(
    ("profile", "run", "expected"),
    [
        (idle(0.9), record("v1"), "launch-bound"),
        (idle(0.9), record("v4"), "host-bound"),  # it is captured already
        (idle(0.9, host_calls=launches(1000)), record("v4"), "launch-bound"),  # what really ran
        (table([]), None, "too-few"),
        (table([kernel("GEMM", 9, 5.0)], 100.0), None, "too-few"),
        (table([kernel("GEMM", 50, 5.0)], what="operator"),
         record("v3", "tiny", "fp32", device={"type": "cpu", "name": "CPU"}), "interpreted"),
    ],
)  # fmt: skip
def test_what_comes_first(profile, run, expected) -> None:
    assert advise(profile, run)[0].finding == expected


@pytest.mark.parametrize("severed", [False, True])
def test_a_backward_pass_that_is_cut_is_seen_in_the_trace(
    copy_of, odd_config, tmp_path, severed
) -> None:
    """On the CPU, without a record: by the ranges around the operators."""
    module = copy_of("v1")
    if severed:
        whole = module.RMSNorm.forward
        module.RMSNorm.forward = lambda self, x: whole(self, x).detach()
    model = module.TinyLlama(odd_config)
    optimizer = module.configure_optimizer(model, 1e-3)
    tokens = torch.randint(odd_config.vocab_size, (2, 2, 63))
    model(*tokens).backward()  # the first pass of all is slow, forward above all
    with torch_profile() as profiler:
        for _ in range(10):  # of which other programs may disturb one
            with record_function("forward"):
                loss = model(*tokens)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = advise(kineto.read(tmp_path / "trace.json"))
    assert [a.finding for a in found if a.severity == WARNING] == ["short-backward"] * severed
