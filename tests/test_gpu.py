"""Behaviour that only a GPU can show: graphs, compiled gates, memory, the harness's own cost."""

import linecache
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton_kernels
import triton_linear
from kernel_cases import CASES, Case, as_tuple, drawn, heads, normal, tables, worst_excess

from workshop import results, versions
from workshop.gate import parity
from workshop.run import chips, data, hardware, presets, trainer
from workshop.run.precision import get_precision

pytestmark = pytest.mark.gpu


GPU = torch.device("cuda", 0)


def make(key: str, preset: str, *, compiled: bool = False):
    module = versions.load(key)
    config = module.TinyLlamaConfig(**presets.get_preset(preset).model())
    torch.manual_seed(0)
    model = module.TinyLlama(config).cuda()
    if compiled:
        model.compile(dynamic=False)
    return module, model


def text(preset: str, steps: int) -> torch.Tensor:
    sizes = presets.get_preset(preset)
    return data.text_batches(
        data.read_corpus(),
        steps=steps,
        batch_size=sizes.batch_size,
        seq_len=sizes.seq_len,
        vocab_size=sizes.vocab_size,
        seed=0,
    )


def _wide(width: int) -> dict[str, int]:
    sizes = presets.get_preset("small").model()
    sizes |= {"hidden_dim": width, "intermediate_dim": 4 * width, "num_layers": 4}
    return sizes | {"num_heads": width // 64, "num_kv_heads": width // 128}


WIDE = {
    "2048-bf16": (_wide(2048), 128),
    "4096-bf16": (_wide(4096), 128),
    "medium-tf32": (presets.get_preset("medium").model(), 512),
    "large-tf32": (presets.get_preset("large").model(), 512),
}


def check(key: str, sizes: dict[str, int], precision: str, seed: int, build=None, **more):
    module = versions.load(key)
    return parity.check(
        *(build or module.TinyLlama, module.TinyLlamaConfig(**sizes)),
        precision=precision,
        device="cuda",
        seed=seed,
        configure_optimizer=module.configure_optimizer,
        **more,
    )


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(("seed", "key"), list(enumerate(versions.available())))
def test_the_gate_raises_no_false_alarm_across_wide_models(seed, key, name) -> None:
    """Where training amplified roundings, if the learning rate did not fall with the width."""
    sizes, seq_len = WIDE[name]
    report = check(key, sizes, name.split("-")[1], seed, batch_size=8, seq_len=seq_len)
    assert report.passed, report.failures
    curve = report.measures["loss curve"]
    assert curve.error < 0.75 * curve.allowed, curve


@pytest.mark.parametrize(
    ("precision", "seeds"), [("bf16", 20), ("fp32", 5), ("tf32", 5), ("fp16", 5)]
)
@pytest.mark.parametrize("key", versions.available())
def test_the_gate_raises_no_false_alarm(key, precision, seeds) -> None:
    sizes = presets.get_preset("tiny").model() | {"num_layers": 2}
    alarms, closest = [], 0.0
    for seed in range(seeds):
        report = check(key, sizes, precision, seed)
        alarms += report.failures
        worst = report.worst[1]
        closest = max(closest, worst.error / worst.allowed)
    print(f"{key} {precision}: at most {closest:.2f} of what is allowed")
    assert not alarms


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_gate_passes_v4_as_it_is_timed_compiled_and_captured(precision) -> None:
    def build(config: object) -> torch.nn.Module:
        model = versions.load("v4").TinyLlama(config)
        model.compile(dynamic=False)
        return model

    for seed in range(3):
        sizes = presets.get_preset("tiny").model()
        report = check("v4", sizes, precision, seed, build=build, cuda_graph=True)
        print(f"v4 compiled, captured, {precision}: {report.summary()}")
        assert report.passed, report.failures


@pytest.mark.parametrize("key", ["v1", "v3", "v4"])
def test_a_captured_step_trains_as_the_eager_one(key) -> None:
    curves = []
    for cuda_graph in (False, True):
        module, model = make(key, "tiny")
        optimizer = module.configure_optimizer(model, 3e-4)
        batches = text("tiny", 200)
        precision = get_precision("fp32", GPU)
        precision.set_matmul_mode()
        curves.append(
            trainer.train_losses(model, optimizer, batches, precision, cuda_graph=cuda_graph)
        )
    apart = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
    print(f"{key}: losses of 200 steps at most {apart:.1e} apart")
    torch.testing.assert_close(curves[0], curves[1], rtol=2e-3, atol=0)
    assert curves[1][-1] < 0.6 * curves[1][0]


@pytest.mark.skipif(not triton_linear.has_wide_products(), reason="PyTorch below 2.8, or ROCm")
@pytest.mark.parametrize("key", ["v3", "v4"])
def test_the_gradients_of_weights_are_not_rounded(key) -> None:
    """At bf16 V2's pass through bf16, and so lie on its grid; V3's and V4's do not."""
    off_grid = {}
    for version in ("v2", key):
        _, model = make(version, "tiny", compiled=version == "v4")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*text("tiny", 1)[0].cuda())
        loss.backward()
        matrices = {n: p.grad for n, p in model.layers.named_parameters() if p.dim() == 2}
        off_grid[version] = {
            name for name, dw in matrices.items() if not torch.equal(dw, dw.bfloat16().float())
        }
    assert not off_grid["v2"]
    assert len(off_grid[key]) == 4 * {"v3": 4, "v4": 5}[key]


def test_the_learning_rate_lives_inside_the_graph() -> None:
    """A rate set to zero on the device stops training without a new capture."""
    module, model = make("v4", "tiny")
    optimizer = module.configure_optimizer(model, 3e-4)
    precision = get_precision("bf16", GPU)
    runner = trainer.Runner(model, optimizer, text("tiny", 20), precision, cuda_graph=True)
    runner.warm_up(10)
    optimizer.param_groups[0]["lr"].zero_()
    before = model.norm.weight.clone()
    runner.advance()
    assert torch.equal(before, model.norm.weight)


def test_a_graphs_memory_is_counted() -> None:
    peaks = {}
    for cuda_graph in (False, True):
        module, model = make("v2", "small")
        precision = get_precision("bf16", GPU)
        optimizer = module.configure_optimizer(model, 3e-4)
        runner = trainer.Runner(
            model, optimizer, text("small", 20), precision, cuda_graph=cuda_graph
        )
        runner.warm_up(10)
        for _ in range(5):
            runner.advance()
        peaks[cuda_graph] = float(runner.memory_mb()["peak"])
        del runner, model, optimizer
    print(f"peak eager {peaks[False]:.0f} MB, captured {peaks[True]:.0f} MB")
    assert 0.9 < peaks[True] / peaks[False] < 1.3


@pytest.mark.alone
def test_measured_ceilings_stay_below_the_data_sheets() -> None:
    peaks = chips.find_peaks(hardware.device_name(GPU))
    if peaks is None:
        pytest.skip("chip not listed")
    tflops = hardware.measure_matmul_tflops(GPU, torch.bfloat16)
    bandwidth = hardware.measure_copy_gbs(GPU)
    print(f"measured {tflops:.0f} TFLOP/s bf16, {bandwidth:.0f} GB/s")
    assert 0.5 * peaks.tflops["bf16"] < tflops < peaks.tflops["bf16"]
    assert 0.5 * peaks.bandwidth_gbs < bandwidth < peaks.bandwidth_gbs


def bare_loop(module, model, batches: torch.Tensor, *, graph: bool) -> Callable[[int], float]:
    """The step as one writes it by hand, with nothing around it; milliseconds of n steps."""
    optimizer = module.configure_optimizer(model, 3e-4)
    inputs = batches[0].cuda()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(inputs[0], inputs[1])
        loss.backward()
        optimizer.step()
        return loss

    run = step
    if graph:
        module.make_capturable(optimizer)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        run = module.capture_step(step, stream)
    pinned = batches.pin_memory()

    def timed(steps: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for index in range(steps):
            inputs.copy_(pinned[index], non_blocking=True)
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps

    timed.needs = (model, optimizer, step)  # a graph does not keep what it reads alive
    return timed


def harness_loop(module, model, batches: torch.Tensor, *, graph: bool) -> Callable[[int], float]:
    """The same through the harness, every mark and every loss included."""
    precision = get_precision("bf16", GPU)
    optimizer = module.configure_optimizer(model, 3e-4)
    runner = trainer.Runner(model, optimizer, batches, precision, cuda_graph=graph)
    runner.warm_up(5)

    def timed(steps: int) -> float:
        runner.done = 0
        clock = trainer.StepClock(runner.device)
        torch.cuda.synchronize()
        trainer.timed_steps(runner, clock, steps, lambda *_: None)
        return sum(clock.durations_ms()) / steps

    return timed


@pytest.mark.alone
@pytest.mark.parametrize(("key", "compiled"), [("v1", False), ("v2", False), ("v4", True)])
def test_the_harness_costs_under_1_percent_of_a_medium_step(
    key, compiled, tmp_path, request
) -> None:
    batches = text("medium", 20)
    times: dict[str, list[float]] = {"bare": [], "harness": []}
    loops = {}
    # The harness first: it gives up the memory in which cuBLAS works, also that of another graph.
    for name, loop in (("harness", harness_loop), ("bare", bare_loop)):
        module, model = make(key, "medium", compiled=compiled)
        loops[name] = loop(module, model, batches, graph=compiled)
    for repeat in range(10):
        for name in ("bare", "harness") if repeat % 2 else ("harness", "bare"):
            times[name].append(loops[name](15))
    bare, harness = (statistics.median(times[name][1:]) for name in ("bare", "harness"))
    print(f"{key} medium bf16: bare loop {bare:.3f} ms, harness {harness:.3f} ms")
    folder = request.config.getoption("--keep-figures")
    if folder:
        record = {"version": key, "config": "medium", "precision": "bf16"}
        record |= {f"{name}_ms": samples for name, samples in times.items()}
        record |= {"device": hardware.describe(GPU), "software": results.describe_software()}
        results.write_json(results.prepare_folder(folder) / f"harness_{key}.json", record)
    assert harness < 1.01 * bare


# --- V3's kernels at real sizes ---------------------------------------------------------------


def attention_of(B: int, H: int, K: int, T: int, D: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return drawn((B, H, T, D), (B, K, T, D), (B, K, T, D), how=heads)


REAL_SIZES = [
    ("rms_norm", drawn((16384, 4096), (4096,)), lambda: {"eps": 1e-5}),
    ("add_rms_norm", drawn((8192, 1024), (8192, 1024), (1024,)), lambda: {"eps": 1e-5}),
    ("swiglu", drawn((8191, 4096), (8191, 4096)), dict),
    ("apply_rope", drawn((16, 16, 512, 64), (16, 8, 512, 64), how=heads), lambda: tables(512, 64)),
    ("qkv_attention", lambda: (normal(4, 511, 1024), normal(2048, 1024) / 32),
     lambda: tables(511, 64) | {"num_heads": 16, "num_kv_heads": 8}),
    ("linear", lambda: (normal(8191, 1024), normal(2048, 1024) / 32), dict),
    ("feed_forward", lambda: (normal(8191, 512), normal(2048, 512) / 22, normal(512, 1024) / 32),
     dict),
    ("embedding", drawn((1000, 1024)),
     lambda: {"tokens": torch.randint(1000, (16, 512), device="cuda")}),
    ("flash_attention", attention_of(2, 16, 8, 2047, 64), dict),
    ("flash_attention", attention_of(1, 4, 2, 8191, 64), dict),
    ("flash_attention", attention_of(1, 8, 4, 2049, 128), dict),
    ("flash_attention", attention_of(3, 8, 8, 1025, 32), dict),
    ("linear_cross_entropy", lambda: (normal(8191, 256), 0.1 * normal(4099, 256)),
     lambda: {"targets": torch.randint(4099, (8191,), device="cuda")}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "make", "fixed"), REAL_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_at_real_sizes(op, make, fixed, dtype) -> None:
    torch.manual_seed(0)
    # The fp32 sums of large sizes differ in their order from the plain version's.
    assert worst_excess(Case(op, "real size", make, fixed(), roundings=32.0), dtype) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_many_widths(dtype) -> None:
    """Every row of the tiles' table, each program with several turns; rows that vectors of 16 bytes
    fit and don't."""
    torch.manual_seed(0)
    sizes = ((8191, 500), (8191, 512), (4097, 1024), (3001, 1536), (2047, 1025), (1023, 5120))
    for R, C in (*sizes, (777, 8192), (300, 16385)):
        for op, shapes in (("rms_norm", [(R, C)]), ("add_rms_norm", [(R, C), (R, C)])):
            case = Case(op, f"{R}x{C}", drawn(*shapes, (C,)), {"eps": 1e-5}, 32.0)
            assert worst_excess(case, dtype) <= 1.0, case.label


HOPPER_HEADS = (  # every configuration of `triton_attention_hopper`; T cuts a block
    *((2, 2, 1, 77, 64), (1, 3, 3, 1111, 64), (1, 2, 2, 4099, 64)),
    *((2, 2, 2, 129, 128), (1, 4, 2, 1111, 128), (1, 4, 1, 4097, 128)),
)


@pytest.mark.parametrize(("B", "H", "K", "T", "D"), HOPPER_HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_on_hopper(B, H, K, T, D, dtype) -> None:
    attention = sys.modules["triton_attention"]
    hopper, hopper_backward = attention.hopper, attention.hopper_backward
    if hopper is None or torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    torch.manual_seed(0)
    C, rows = 128, (H + 2 * K) * D
    calls = (
        Case("flash_attention", "", attention_of(B, H, K, T, D)),
        Case(
            *("qkv_attention", "", lambda: (normal(B, T, C), normal(rows, C) / C**0.5)),
            tables(T, D) | {"num_heads": H, "num_kv_heads": K},
        ),
    )
    with (
        mock.patch.dict(hopper.FORWARD_FROM, {D: 1}),
        mock.patch.dict(hopper_backward.BACKWARD_FROM, {D: 1}),
        mock.patch.object(hopper, "attend", wraps=hopper.attend) as forward,
        mock.patch.object(
            hopper_backward, "attend_backward", wraps=hopper_backward.attend_backward
        ) as backward,
    ):
        for case in calls:
            assert worst_excess(case, dtype) <= 1.0, case.op
    assert forward.called and backward.called


@pytest.mark.parametrize("M, C, F", [(8192, 1024, 1024), (8191, 64, 1152), (9001, 576, 1024)])
def test_swiglu_in_a_product_on_hopper(M, C, F) -> None:
    """The last tile is cut. As by a product and a kernel, and the same each time."""
    swiglu = sys.modules["triton_swiglu"]
    if swiglu.hopper is None or torch.cuda.get_device_capability(GPU) != (9, 0):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    torch.manual_seed(0)
    shapes = (M, C), (2 * F, C), (C, F)
    x, up, down = (torch.randn(shape, device=GPU).bfloat16() for shape in shapes)
    up /= C**0.5
    gate_up, _ = swiglu.linear_swiglu(x, up)
    for call, *inputs in (
        (swiglu.linear_swiglu, x, up),
        (swiglu.linear_swiglu_backward, x, down, gate_up),
    ):
        assert swiglu.hopper.takes(*inputs[:2], F)
        fused = call(*inputs)
        for _ in range(5):
            assert all(map(torch.equal, fused, call(*inputs)))
        with mock.patch.object(swiglu, "on_hopper", return_value=False):
            plain = call(*inputs)
        for ours, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_every_kernel_can_be_captured_and_replayed_on_new_data() -> None:
    for case in {case.op: case for case in CASES.values()}.values():
        operator = getattr(triton_kernels, case.op)
        arguments = [x.detach().clone().requires_grad_() for x in case.make()]

        def step(operator=operator, arguments=arguments, case=case) -> list[torch.Tensor]:
            outputs = as_tuple(operator(*arguments, **case.fixed))
            ones = [torch.ones_like(output) for output in outputs]
            return [*outputs, *torch.autograd.grad(outputs, arguments, ones)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured_results = step()
        with torch.no_grad():
            for argument in arguments:
                argument.normal_()
        graph.replay()
        for found, expected in zip(captured_results, step(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool, type_command) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer here")
    run = type_command(
        "compute-sanitizer", "--tool", tool, sys.executable, "tests/launch_kernels.py",
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        PYTHONPATH="version3_triton:.:tests",
    )  # fmt: skip
    races = [line for line in run.stdout.splitlines() if " access at " in line]
    print(*races, run.stdout[-600:], sep="\n")
    assert "launched" in run.stdout, run.stdout[-3000:] + run.stderr[-500:]
    # racecheck complains of cuBLAS's own kernels (nvjet) and of Triton's dispatch.
    accused = [*races, *re.findall(r"    at \w+\+0x.*", run.stdout)]
    assert not [line for line in accused if "nvjet" not in line and not _is_dispatch(line)]
    assert "SUMMARY: 0 errors" in run.stdout or accused or " 0 hazards" in run.stdout


def _is_dispatch(accusation: str) -> bool:
    """Whether racecheck accuses Triton's own start and end of `warp_specialize`: it writes each
    worker warp's partition into shared memory, where the warp reads it. In the machine code a
    barrier of all warps is between any such write and read, which racecheck does not see.

    They are the only accesses with a line of the kernel itself: of its `def` (the warps' reads and
    the first write) or of the statement at its end (the last write). What its partitions access
    has their own lines, and both sides of a race have to be dispatch.
    """
    found = re.search(
        r" access at _hopper_\w+_(?:forward|backward)_kernel\+0x\w+ in (\w+\.py):(\d+)", accusation
    )
    if found is None:
        return False
    path = versions.get_version("v3").path.with_name(found[1])
    line = linecache.getline(str(path), int(found[2])).strip()
    return line.startswith(("def _hopper_", "gl.warp_specialize([", "if CONSUMERS == 1:"))


SANITIZED = ("attend_forward", "attend_backward", "swiglu_forward", "swiglu_backward")


@pytest.mark.parametrize("words", [*SANITIZED, "attend_forward fault", "swiglu_forward fault"])
def test_warps_wait_for_each_other_on_hopper(words, type_command) -> None:
    if not sys.modules["triton_launch"].on_hopper():
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    run = type_command(
        "python", "tests/launch_sanitized.py", *words.split(),
        CUDA_LAUNCH_BLOCKING="1",
        PYTHONPATH="version3_triton:.:tests",
    )  # fmt: skip
    printed = run.stdout + run.stderr
    found = "Accessing buffer with pending" in printed or "Buffer being accessed" in printed
    expected = (True, False) if "fault" in words else (False, True)
    assert (found, "launched" in run.stdout) == expected, run.stdout[-500:] + run.stderr[-3000:]
