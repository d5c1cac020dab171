"""timm's network of the same name, in a loop as timm's own benchmark has it: one fixed batch on the
device, and each step timed by the host's clock, with the device idle before and after it.

Its weights are those of our network, so that its timed logits have the same truth. timm compiles
with torch.compile as it is.
"""

import math
import time

import torch
from torch import Tensor, nn

from labs import shared
from labs.inference_benchmark import measure, modes
from labs.inference_benchmark.measure import Bench, Measured
from workshop.errors import WorkshopError
from workshop.profilers.table import STEP
from workshop.run import memory, startup


def build(name: str, ours: nn.Module) -> nn.Module:
    """timm's network with our network's weights, in fp32 on the same device, for inference.

    Raises:
        WorkshopError: timm has no network of that name, or its weights have other names or shapes.
    """
    shared.import_torchvision()  # timm imports it
    import timm

    if not timm.is_model(name):
        raise WorkshopError(f"--peer timm: timm has no network {name}; it has resnet50")
    theirs: nn.Module = timm.create_model(name)
    state = ours.state_dict()
    shapes, given = (_shapes(one) for one in (theirs.state_dict(), state))
    if differing := sorted({key for key, _ in shapes ^ given}):
        raise WorkshopError(
            f"--peer timm: of {name}'s weights timm has {len(differing)} by another name or in "
            f"another shape, as {differing[0]}; take a ResNet or a DenseNet"
        )
    theirs.load_state_dict(state)
    return theirs.to(next(ours.parameters()).device).eval()


def _shapes(state: dict[str, Tensor]) -> set[tuple[str, torch.Size]]:
    return {(name, tensor.shape) for name, tensor in state.items()}


def measure_timm(bench: Bench, iterations: int, warmup: int, say: measure.Notify) -> Measured:
    """As `measure.measure_inference`."""
    run, setting, variant = bench.run, bench.setting, bench.variant
    device = setting.device
    startup.watch_compilers(torch_compile=variant.compile is not None)
    if variant.compile is not None:
        say("Compiling model (this may take minutes the first time) ...")
    inputs = measure.Inputs(setting, warmup + iterations, variant, variant.dtype)
    batch = inputs.batch
    measure.count_peak_anew(device)
    model = modes.prepare(build(setting.network.name, bench.model), variant)
    step = modes.inference_step(model, variant, batch, device)

    def timed(into: list[float]) -> Tensor:
        measure.wait(device)
        start = time.perf_counter()
        output = step()
        measure.wait(device)
        into.append((time.perf_counter() - start) * 1e3)
        return output

    measure.take_turn(step, bench)
    measured = Measured()
    for _ in range(warmup):
        timed(measured.warmup_ms)
    compile_s = startup.compile_seconds()
    run.setup_s |= {"compile": compile_s, "warm_up": sum(measured.warmup_ms) / 1e3}
    if not variant.captures_itself:
        measure.count_peak_anew(device)  # a graph's memory is seen only while it is captured
    inputs.take(bench.turn.begin().tensors)
    inputs.read(0)
    try:
        for _ in range(iterations):
            with bench.range_(STEP):
                output = timed(measured.step_ms)
    except KeyboardInterrupt:
        run.status = "interrupted"
    bench.turn.end(measured.step_ms, {"sums": output[None].flatten(2).sum(2, dtype=torch.float32)})
    if not measured.step_ms:
        raise KeyboardInterrupt
    measured.take_peak(device)
    output = output.clone()  # a graph's next replay takes its place
    others = len(measured.warmup_ms) + len(measured.step_ms) - 1
    targets = inputs.data.targets[inputs.data.window(0)]
    loss = float(setting.network.loss(output.cpu().float(), targets))
    measured.losses = [math.nan] * others + [loss]  # of the last step alone
    run.step_ms = measured.step_ms
    bench.turn.answer(lambda places: ({"0": output[places["0"]].float()}, {}), run)
    weights = memory.tensor_bytes([*model.parameters(), *model.buffers()])
    held, spare = inputs.bytes()
    bench.iteration = lambda index: step()
    run.memory_mb = measure.memory_of(
        *(bench, measured, bench.iteration, weights, lambda: weights + held, held, spare)
    )
    return measured
