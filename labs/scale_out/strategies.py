"""Training one model in several processes: DDP, FSDP2 and DeepSpeed's ZeRO around the versions' own
modules, and the step that all of them share.

What a strategy splits over the processes, besides the batch:
    ddp     nothing: each has all weights, and the gradients are averaged
    fsdp    weights, gradients and AdamW's moments (PyTorch's fully_shard)
    zero1   AdamW's moments            (DeepSpeed)
    zero2   moments and gradients
    zero3   moments, gradients and weights
The peer is Hugging Face's accelerate around their Llama, as its users train it.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from workshop.gate import canonical
from workshop.request import Request
from workshop.run import markers, trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a weight, besides the number of steps."""
PARTS = ("weight", *MOMENTS)
PASSES_BEFORE_CAPTURE = 11
"""Passes of DDP, from PyTorch's notes on CUDA semantics ("Usage with DistributedDataParallel"): it
orders its buckets in the second, and times the first ten with events."""
Weights = Mapping[str, Tensor]


class Strategy(nn.Module):
    """A version's model, and how several processes train it. This class itself is for one process.

    Call `prepare` first. The strategy is called like the version's model, with this process's
    sequences; the step is `train_step` of this file, which the harness finds.

    Args:
        asked: the run; its batch size is that of all processes together.
        accumulate: parts of a process's batch that run one after the other before an update.
        reduce_dtype: the dtype in which gradients are sent, for engines that have a choice; fp32
            where the gate runs in fp32.
    """

    plain: nn.Module
    """The version's own model; the engine may have changed its parameters."""
    engine: Any
    """The module that runs the passes."""
    optimizer: torch.optim.Optimizer

    def __init__(
        self, asked: Request, accumulate: int, reduce_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.asked, self.accumulate = asked, accumulate
        self.reduce_dtype = reduce_dtype if asked.precision.name == "bf16" else torch.float32

    def forward(self, *batch: Tensor) -> Tensor:
        out: Tensor = self.engine(*batch)
        return out

    def prepare(self, weights: Weights, learning_rate: float) -> torch.optim.Optimizer:
        """Starts a training from weights under V1's names, and drops an earlier one; returns the
        optimizer."""
        self.engine = None
        self.plain = self.optimizer = None  # type: ignore[assignment]
        self.plain = self.build()
        canonical.load_canonical(self.plain, weights)
        self.engine = self.wrap(self.plain)
        self.optimizer = self.configure_optimizer(learning_rate)
        return self.optimizer

    # Different in each engine:

    def build(self) -> nn.Module:
        """The version's model on the device, compiled if asked."""
        return self.asked.build()

    def wrap(self, plain: nn.Module) -> Any:
        """The engine's module around the version's model."""
        return plain

    def configure_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.asked.module.configure_optimizer(
            self.plain, learning_rate
        )
        return optimizer

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one part's passes: gradients are sent with the last part."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        return self.asked.precision.autocast(self.asked.device.type)

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Backward pass of one part's mean loss."""
        (loss / self.accumulate).backward()

    def update(self) -> None:
        self.optimizer.step()

    def whole(self, tensor: Tensor) -> Tensor:
        """A weight, gradient or moment as one tensor, from all processes that have a shard."""
        return tensor

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        return None if weight.grad is None else self.whole(weight.grad)

    def weight(self, weight: nn.Parameter) -> Tensor:
        """The weight that the next forward pass uses."""
        return self.whole(weight.detach())

    # The same for all engines:

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients of the last backward pass, whole, under V1's names. All processes call it."""
        return canonical.take_apart(self.plain, self.gradient)

    def weights(self) -> dict[str, Tensor]:
        """Whole weights under V1's names. All processes have to call it."""
        found = canonical.take_apart(self.plain, self.weight)
        return {name: weight for name, weight in found.items() if weight is not None}

    def mean_gradients(self) -> dict[str, Tensor]:
        """AdamW's first moments, whole, under V1's names. All processes have to call it."""
        state = self.state()
        own = {weight: name for name, weight in self.plain.named_parameters()}
        found = canonical.take_apart(
            self.plain, lambda weight: self.whole(state[f"{MOMENTS[0]}.{own[weight]}"])
        )
        return {name: moment for name, moment in found.items() if moment is not None}

    def passes(self, tokens: Tensor, targets: Tensor, phase: markers.Range = nullcontext) -> Tensor:
        """Forward and backward over this process's sequences, (B, T) each; their mean loss."""
        losses = []
        parts = [batch.chunk(self.accumulate) for batch in (tokens, targets)]
        for i, part in enumerate(zip(*parts, strict=True), start=1):
            with self.synchronised(last=i == self.accumulate):
                with phase("forward"), self.autocast():
                    loss = self(*part)
                with phase("backward"):
                    self.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments under the version's own names, for checkpoints; as DTensors, if the
        engine shards with them."""
        state = {}
        for name, weight in self.plain.named_parameters():
            state[f"weight.{name}"] = weight.detach()
            for moment in MOMENTS:
                state[f"{moment}.{name}"] = self.optimizer.state[weight][moment]
        return state

    def resume(self, steps: int, read: Callable[[dict[str, Tensor]], object]) -> None:
        """Continues a prepared training after `steps` steps.

        Args:
            read: fills the tensors of a `state` with the saved values.
        """
        self._begin_state(self.plain.parameters(), steps)
        read(self.state())

    def _begin_state(self, weights: Iterable[Tensor], steps: int) -> None:
        """Makes AdamW's state, with moments of 0."""
        fused = self.optimizer.defaults.get("fused") or self.optimizer.defaults.get("capturable")
        for weight in weights:
            self.optimizer.state[weight] = {
                "step": torch.tensor(float(steps), device=weight.device if fused else "cpu"),
                **{moment: torch.zeros_like(weight.detach()) for moment in MOMENTS},
            }


class Ddp(Strategy):
    """Weights on all processes; gradients averaged in buckets during the backward pass."""

    def prepare(self, weights: Weights, learning_rate: float) -> torch.optim.Optimizer:
        if not self.asked.cuda_graph:
            return super().prepare(weights, learning_rate)
        # On the stream of the capture: DDP's gradient accumulators stay on the stream on which they
        # were made. These passes train nothing.
        device, size = self.asked.device, torch.distributed.get_world_size()
        shape = self.asked.batch_size // size, self.asked.seq_len
        # The gate's passes run on another stream than the capture. They are not timed.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        stream = trainer.capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer = super().prepare(weights, learning_rate)
            tokens = torch.zeros(shape, dtype=torch.int64, device=device)
            for _ in range(PASSES_BEFORE_CAPTURE):
                self.passes(tokens, tokens)
            self.clear_gradients()
        torch.cuda.current_stream().wait_stream(stream)
        return optimizer

    def wrap(self, plain: nn.Module) -> nn.Module:
        device = self.asked.device
        ids = [device.index] if device.type == "cuda" else None
        # The replacement in PyTorch 2.13 is not in older versions.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        engine = nn.parallel.DistributedDataParallel(
            plain, device_ids=ids, gradient_as_bucket_view=True,
            broadcast_buffers=False,  # RoPE's tables, the same everywhere
        )  # fmt: skip
        if self.reduce_dtype == torch.bfloat16:
            engine.register_comm_hook(None, _average_in_bf16)
        return engine

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        unsynchronised: AbstractContextManager[Any] = self.engine.no_sync()
        return nullcontext() if last else unsynchronised


def _average_in_bf16(
    group: Any, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[Tensor]:
    """PyTorch's `bf16_compress_hook` with one pass over the bucket less: it rounds and divides at
    once. (PyTorch's own, under its name, is accepted for GPUs only.)"""
    mean = bucket.buffer()
    sent = torch.empty_like(mean, dtype=torch.bfloat16)
    torch.mul(mean, 1 / torch.distributed.get_world_size(group), out=sent)
    work: Any = torch.distributed.all_reduce(sent, group=group, async_op=True)
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda _: mean.copy_(sent))
    return done


class Fsdp(Strategy):
    """Each layer's weights are gathered before it runs, and freed after it. At bf16 the layers'
    weights are gathered in bf16; the shards are in fp32, and so are the sums of the gradients,
    unless `reduce_dtype` says otherwise."""

    def build(self) -> nn.Module:
        model = self.asked.build_on(self.asked.device)
        mode = self.asked.compile_mode
        if mode != "none":
            # The engine's hooks run before and after forward, in plain Python.
            for layer in layers_of(model):
                layer.forward = torch.compile(layer.forward, mode=mode, dynamic=False)
        return model

    def wrap(self, plain: nn.Module) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.asked.device.type, (torch.distributed.get_world_size(),))
        low = MixedPrecisionPolicy(
            self.asked.precision.autocast_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,  # the residual stream stays fp32, as autocast has it
        )
        for layer in layers_of(plain):
            # Without compiler the norms stay fp32, as F.rms_norm's fused kernel needs.
            eager = self.asked.compile_mode == "none"
            group: Any = [layer.self_attn, layer.mlp] if eager else layer
            fully_shard(group, mesh=mesh, mp_policy=low)
        rest = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        return fully_shard(plain, mesh=mesh, mp_policy=rest)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_requires_gradient_sync(last)
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        # Weights that are gathered for the next pass are plain tensors.
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Zero(Strategy):
    """DeepSpeed's ZeRO. The engine casts, divides the loss by the number of parts, and clears the
    gradients after an update."""

    def __init__(self, asked: Request, accumulate: int, stage: int) -> None:
        super().__init__(asked, accumulate)
        self.stage = stage

    def configure_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        import deepspeed

        warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated")  # DeepSpeed's calls
        dtype = self.asked.precision.autocast_dtype
        of_process = self.asked.batch_size // torch.distributed.get_world_size()
        config = {
            "train_micro_batch_size_per_gpu": of_process // self.accumulate,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": 0.0,  # no version clips; DeepSpeed's default is 1
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "torch_autocast": {"enabled": dtype is not None, "dtype": "bfloat16"},
        }
        own = super().configure_optimizer(learning_rate)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it, also without a launcher
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=self.plain, optimizer=own, config=config, dist_init_required=False
        )
        return own

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clear_gradients(self) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # only counts the part

    def update(self) -> None:
        self.engine.step()

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        found: Tensor | None = safe_get_full_grad(weight)
        return found

    def weight(self, weight: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        if self.stage < 3:
            return weight.detach()
        whole: Tensor = safe_get_full_fp32_param(weight)
        return whole

    def state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        state = {}
        for name, weight in self.plain.named_parameters():
            state[f"weight.{name}"] = safe_get_full_fp32_param(weight).cpu()
            for moment in MOMENTS:
                state[f"{moment}.{name}"] = safe_get_full_optimizer_state(weight, moment).cpu()
        return state

    def resume(self, steps: int, read: Callable[[dict[str, Tensor]], object]) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        # The optimizer has its state for this process's shards of the fp32 weights.
        if self.stage < 3:
            self._begin_state(self.zero.single_partition_of_fp32_groups, steps)
            self.zero._lazy_init_hp_params_optimizer_state()
        else:
            self._begin_state(self.zero.fp32_partitioned_groups_flat, steps)
        state = self.state()
        read(state)
        for name, weight in self.plain.named_parameters():
            whole = {part: state[f"{part}.{name}"].to(weight.device) for part in PARTS}
            safe_set_full_fp32_param(weight, whole["weight"])
            for moment in MOMENTS:
                safe_set_full_optimizer_state(weight, whole[moment], moment)
            # The passes read a copy.
            gathered = deepspeed.zero.GatheredParameters
            with gathered([weight], modifier_rank=0) if self.stage == 3 else nullcontext():
                weight.data.copy_(whole["weight"])


# --- peers ----------------------------------------------------------------------------------------


class Accelerate(Strategy):
    """accelerate's DDP, or its FSDP, version 2, which shards each layer: a plain model in one
    process. accelerate wraps, compiles, casts and accumulates; gate, audit and clock are ours."""

    def __init__(self, asked: Request, accumulate: int, *, sharded: bool) -> None:
        super().__init__(asked, accumulate)
        self.sharded = sharded

    def build(self) -> nn.Module:
        return self.asked.build_on(self.asked.device)

    def configure_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        from accelerate.state import AcceleratorState

        own = super().configure_optimizer(learning_rate)
        AcceleratorState._reset_state(reset_partial_state=True)  # else the first one stays
        self.accelerator = self._accelerator()
        self.asked.precision.set_matmul_mode()  # accelerate changes it when it compiles
        plain: Any = self.plain
        (model,) = plain.whole
        self.engine, self.accelerated = self.accelerator.prepare(model, own)
        return own

    def _accelerator(self) -> Any:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import TorchDynamoPlugin

        plugin = None
        if self.sharded:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            )
        dynamo, mode = TorchDynamoPlugin(), self.asked.compile_mode
        if mode != "none":
            dynamo = TorchDynamoPlugin("inductor", mode=mode, use_regional_compilation=self.sharded)
        return Accelerator(
            mixed_precision="bf16" if self.asked.precision.autocast_dtype else "no",
            gradient_accumulation_steps=self.accumulate,
            cpu=self.asked.device.type == "cpu",
            fsdp_plugin=plugin,
            dynamo_plugin=dynamo,
        )

    def forward(self, *batch: Tensor) -> Tensor:
        run, model = self.asked.module.run, self.engine
        if not self.sharded or len(batch) == 1:
            out: Tensor = run(model, *batch)
            return out
        # Outside of the model, whose output, so its loss, accelerate's FSDP rounds to bf16.
        tokens, targets = batch
        loss: Tensor = model.loss_function(
            run(model, tokens), targets, model.config.vocab_size, shift_labels=targets
        )
        return loss

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        counted: AbstractContextManager[Any] = self.accelerator.accumulate(self.engine)
        return counted

    def clear_gradients(self) -> None:
        self.accelerated.zero_grad()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)  # divides by the number of parts

    def update(self) -> None:
        self.accelerated.step()

    whole = Fsdp.whole


def layers_of(model: nn.Module) -> nn.ModuleList:
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


CAPTURED = ("ddp", "fsdp")
"""Those that a graph can hold."""
CAPTURES_FSDP = "2.11"
"""The PyTorch that we tried. FSDP2's copies read pinned memory; before pytorch#167507 (end of 2025)
it could be reused, and a replay would read other data."""
PEERS = ("accelerate-ddp", "accelerate-fsdp")
"""Hugging Face's, around their own model: py."""
NAMES = ("ddp", "fsdp", "zero1", "zero2", "zero3", *PEERS)


def packages(name: str) -> list[str]:
    """Packages that a strategy needs besides PyTorch."""
    if name in PEERS:
        return ["accelerate"]
    return ["deepspeed"] if name.startswith("zero") else []


def missing(name: str, device: torch.device, graph: bool = False) -> str | None:
    """Why a strategy can't run, or be captured, on a device with this PyTorch, as a sentence; None
    if it can."""
    here, on_cpu = torch.__version__, device.type == "cpu"
    if name == "fsdp" and on_cpu and not hasattr(torch.cpu.Stream, "record_event"):
        return f"--strategy fsdp: PyTorch {here} supports it on GPUs only"
    if name == "fsdp" and graph and TorchVersion(here) < CAPTURES_FSDP:
        return (
            f"--cuda-graph with --strategy fsdp needs PyTorch {CAPTURES_FSDP} or newer, not {here}"
        )
    if name == "accelerate-fsdp" and on_cpu:
        return f"--strategy {name}: accelerate supports it on GPUs only"
    return None


def make(
    name: str, asked: Request, accumulate: int, size: int, reduce_dtype: torch.dtype
) -> Strategy:
    """Makes one of NAMES, for `size` processes."""
    if name in PEERS:
        return Accelerate(asked, accumulate, sharded=name.endswith("fsdp"))
    if name.startswith("zero"):
        return Zero(asked, accumulate, int(name[-1]))
    if name == "fsdp":
        return Fsdp(asked, accumulate, reduce_dtype)
    return (Strategy if size == 1 else Ddp)(asked, accumulate, reduce_dtype)


def train_step(
    model: Strategy,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    tokens: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.float32,
    phase: markers.Range = nullcontext,
) -> Tensor:
    """A version's `train_step` with an engine around the model: one step over this process's
    sequences, (B, T) each; returns their mean loss before the update. The strategy has the
    precision and the optimizer; the loss is not scaled."""
    model.clear_gradients()
    loss = model.passes(tokens, targets, phase)
    with phase("optimizer"):
        model.update()
    return loss
