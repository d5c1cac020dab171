"""How a network runs: arithmetic, layout, folding, compiler, graph, export.

`inference_step` and `Training.step` make a step of a `Variant` that reads static tensors, as a
server's or a captured graph's does.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labs import shared
from labs.inference_benchmark import rewriting
from labs.inference_benchmark.networks import Network, logits
from workshop.errors import WorkshopError
from workshop.run.markers import Range
from workshop.run.precision import PRECISIONS, supported
from workshop.run.trainer import missing_for_compile

GRAPH_MODES = ("reduce-overhead", "max-autotune")
WARM_UP_BEFORE_CAPTURE = 3
RANK_STRIDE = 1000

InferenceStep = Callable[[], Tensor]
"""Runs the network on the present images; its logits, in memory that the next call may reuse."""


@dataclass(frozen=True)
class Variant:
    """How a network runs. All of it is off in the plain one."""

    precision: str = "fp32"
    autocast: bool = False
    """Weights stay fp32 and each operation gets the precision that suits it."""
    channels_last: bool = False
    fold: bool = False
    """Batch norms are folded into the convolutions before them."""
    fuse: bool = False
    """A convolution, a residual sum and a ReLU are one operator."""
    compile: Mapping[str, Any] | None = None
    """torch.compile's arguments."""
    cuda_graph: bool = False
    export: bool = False
    """Compiled ahead of time, by AOTInductor."""
    peer: str = ""
    """One of request.PEERS whose way of running it this is; empty: ours."""

    @property
    def label(self) -> str:
        words = {
            self.peer: self.peer,
            self.precision + (" autocast" if self.autocast else ""): True,
            "channels-last": self.channels_last,
            "folded norms": self.fold,
            "fused ReLUs": self.fuse,
            _compile_words(self.compile or {}): self.compile is not None,
            "AOTInductor": self.export,
            "graph": self.cuda_graph,
        }
        return ", ".join(word for word, on in words.items() if on)

    @property
    def dtype(self) -> torch.dtype:
        """The type of images and weights."""
        dtype = PRECISIONS[self.precision].autocast_dtype
        return torch.float32 if dtype is None or self.autocast else dtype

    @property
    def captures_itself(self) -> bool:
        """Whether torch.compile captures graphs of its own."""
        context = self.compile or {}
        options = context.get("options") or {}
        return context.get("mode") in GRAPH_MODES or bool(options.get("triton.cudagraphs"))

    def plain(self) -> "Variant":
        """Eager mode at the same precision, with all else off."""
        return Variant(self.precision, self.autocast)

    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if not self.autocast:
            return contextlib.nullcontext()
        return PRECISIONS[self.precision].autocast(device.type)


def _compile_words(context: Mapping[str, Any]) -> str:
    words = ["compile", str(context.get("mode", ""))]
    words += [f"{name}={value}" for name, value in (context.get("options") or {}).items()]
    words += ["fullgraph"] * bool(context.get("fullgraph"))
    return " ".join(filter(None, words))


@dataclass
class Setting:
    """The parts of a step besides its variant."""

    network: Network
    device: torch.device
    batch_size: int
    """Images of this process."""
    seed: int
    parts: tuple[int, ...] = ()
    """Images of each process of a group, by rank; empty outside one."""
    rank: int = 0
    gpus: tuple[int, ...] = ()
    """GPUs that this one process drives, for --dataparallel."""

    def spread(self, model: nn.Module) -> nn.Module:
        """The network on all GPUs of this process, each with a part of the batch."""
        return nn.DataParallel(model, list(self.gpus)) if self.gpus else model

    def images_seed(self, rank: int | None = None) -> int:
        """The seed of a process's images, by default this one's: no two processes share it."""
        return self.seed + RANK_STRIDE * (self.rank if rank is None else rank)

    @property
    def loss_weight(self) -> float:
        """DDP averages the processes' gradients: by this weight of its loss, a process with more
        images than others counts more."""
        if not self.parts:
            return 1.0
        return self.batch_size * len(self.parts) / sum(self.parts)


def check(variant: Variant, device: torch.device, *, training: bool) -> None:
    """Raises WorkshopError for a variant that can't run on this device or in this mode."""
    check_precision(variant.precision, device)
    compiled = variant.compile is not None
    missing = missing_for_compile(device) if compiled or variant.export else None
    rules = {
        f"--compile and --export need {missing}; install it": missing,
        "--export aoti compiles ahead of time: leave out --compile": compiled and variant.export,
        "--cuda-graph needs a GPU": variant.cuda_graph and device.type == "cpu",
        "--cuda-graph: torch.compile captures graphs of its own in this mode; leave one out": (
            variant.cuda_graph and variant.captures_itself
        ),
        "--fold-norms, --fuse-relus, --export and --cuda-graph are for --mode inference": (
            training and (variant.fold or variant.fuse or variant.export or variant.cuda_graph)
        ),
    }
    shared.refuse(rules)


def check_precision(name: str, device: torch.device) -> None:
    """Raises WorkshopError for a precision that the device does not have."""
    if name == "fp16" and device.type == "cpu":
        if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            raise WorkshopError(
                "fp16: this CPU does not have fp16 units; use --precision bf16, or a GPU"
            )
    elif name not in supported(device):
        raise WorkshopError(
            f"--precision {name}: this device does not have it; it has "
            f"{', '.join(supported(device))}"
        )


# --- inference -----------------------------------------------------------------------------------


def prepare(model: nn.Module, variant: Variant) -> nn.Module:
    """A copy of an fp32 network in the variant's precision and layout, rewritten as it says."""
    model = copy.deepcopy(model).eval()
    if variant.fold:
        model = rewriting.fold_norms(model)
    if variant.fuse:
        model = rewriting.fuse_relus(model)
    if variant.compile is not None and not variant.peer:
        model = rewriting.replace_attention(model)
    return laid_out(model.to(variant.dtype), variant).requires_grad_(False)


def laid_out(model: nn.Module, variant: Variant) -> nn.Module:
    """The network with its weights in the variant's layout."""
    moved: nn.Module = model.to(memory_format=variant.layout())  # type: ignore[call-overload]
    return moved


def inference_step(
    model: nn.Module, variant: Variant, images: Tensor, device: torch.device
) -> InferenceStep:
    """A step of a prepared network on static images; a compiler begins at its first call."""
    run: Callable[[Tensor], Any] = model
    if variant.export:
        run = _exported(model, variant, images)
    elif variant.compile is not None:
        from torch._inductor import config

        # Frozen weights may be laid out anew for their kernels. Peers don't freeze theirs.
        config.freezing = not variant.peer
        run = torch.compile(model, **variant.compile)

    def step() -> Tensor:
        with torch.no_grad(), variant.context(device):
            return logits(run(images))

    return step


def _exported(model: nn.Module, variant: Variant, images: Tensor) -> Callable[[Tensor], Any]:
    with torch.no_grad(), variant.context(images.device):
        program = torch.export.export(model, (images,))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "network.pt2"))
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        loaded: Callable[[Tensor], Any] = torch._inductor.aoti_load_package(path)
    return loaded


def captured(step: InferenceStep, device: torch.device) -> InferenceStep:
    """A step as one graph, on its static images."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_BEFORE_CAPTURE):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


# --- training ------------------------------------------------------------------------------------


class Training:
    """A network that learns: forward, loss, backward, SGD. Weights and momentum are fp32 at every
    precision, as autocast has it; in fp16 the loss is scaled."""

    def __init__(self, model: nn.Module, variant: Variant, setting: Setting) -> None:
        self.device, self.variant, self.network = setting.device, variant, setting.network
        self.weight, self.rank = setting.loss_weight, setting.rank
        self.model = laid_out(model.train(), variant)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        precision = PRECISIONS[variant.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision.loss_scaling)
        self.run: Callable[[Tensor], Any] = setting.spread(self.model)
        if variant.compile is not None:
            self.run = torch.compile(self.model, **variant.compile)

    def step(
        self, images: Tensor, targets: Tensor, range_: Range = contextlib.nullcontext
    ) -> Tensor:
        """Trains one step, with a marker range around each part; its loss, a scalar on the
        device."""
        self.optimizer.zero_grad(set_to_none=True)
        with range_("forward"), PRECISIONS[self.variant.precision].autocast(self.device.type):
            loss = self.network.loss(self.run(images), targets)
        with range_("backward"):
            weighted = loss if self.weight == 1 else self.weight * loss
            self.scaler.scale(weighted).backward()
        with range_("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()
