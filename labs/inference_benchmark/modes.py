"""How a network runs: arithmetic, layout, folding, compiler, graph, export.

`inference_step` and `Training.step` make a step of a `Variant` that reads static tensors, as a
server's or a captured graph's does.
"""

import contextlib
import copy
import operator
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from labs import shared
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
        """True if torch.compile captures graphs itself."""
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
        model = fold_norms(model)
    if variant.fuse:
        model = fuse_relus(model)
    if variant.compile is not None and not variant.peer:
        model = replace_attention(model)
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


# --- rewrites for inference -----------------------------------------------------------------------


_SUMS = (operator.add, operator.iadd, torch.add)
_RELUS = (F.relu, torch.relu)


def fold_norms(model: nn.Module) -> nn.Module:
    """The network with each batch norm that follows a convolution made part of its weights: in
    inference it is a product and a sum with constants.

    y = g * (w x + b - mean) / sqrt(variance + eps) + beta
      = (w g / sqrt(variance + eps)) x + (b - mean) g / sqrt(variance + eps) + beta

    Raises WorkshopError: torch.fx can't trace the network.
    """
    from torch.fx.experimental.optimization import fuse

    try:
        folded: nn.Module = fuse(model.eval())
    except Exception as error:  # of torch.fx, for control flow that depends on data
        raise WorkshopError(
            f"--fold-norms: this network can't be traced ({error!s:.100})"
        ) from None
    return folded


def fused_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """relu(conv(x) + bias + added): x (N, C, H, W), weight (K, C, R, S), bias (K,), added and the
    result (N, K, P, Q). On a GPU one kernel of the vendor's library, which writes nothing of what
    lies between to memory."""
    if x.device.type != "cuda":
        y = F.conv2d(x, weight, bias, stride, padding, dilation)
        return F.relu(y if added is None else y + added)
    library = "miopen" if torch.version.hip else "cudnn"
    rest = (bias, stride, padding, dilation, 1)
    if added is None:
        result: Tensor = getattr(torch, f"{library}_convolution_relu")(x, weight, *rest)
    else:
        function = getattr(torch, f"{library}_convolution_add_relu")
        result = function(x, weight, added, 1.0, *rest)
    return result


# For compilers, which know neither of the libraries' operators.
opaque_convolution = torch.library.custom_op(
    "inference_benchmark::fused_convolution",
    fused_convolution,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor? added, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor",
)


opaque_convolution.register_fake(
    lambda x, weight, bias, added, *geometry: F.conv2d(x, weight, bias, *geometry)
)


class ConvolutionRelu(nn.Module):
    """A convolution and what follows it."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        bias = convolution.bias
        if bias is None:
            bias = convolution.weight.new_zeros(convolution.out_channels)
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        sides = (convolution.stride, convolution.padding, convolution.dilation)
        self.geometry = [[int(n) for n in pair] for pair in sides]

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        run = opaque_convolution if torch.compiler.is_compiling() else fused_convolution
        result: Tensor = run(x, self.convolution.weight, self.bias, added, *self.geometry)
        return result


def fuse_relus(model: nn.Module) -> nn.Module:
    """The network with relu(conv(x)) and relu(conv(x) + y) as one operator each. Grouped
    convolutions, which have other kernels, stay as they are. Raises WorkshopError: torch.fx
    can't trace the network."""
    try:
        graph = fx.symbolic_trace(model)
    except Exception as error:  # as in fold_norms
        raise WorkshopError(
            f"--fuse-relus: this network can't be traced ({error!s:.100})"
        ) from None
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if _is_relu(node, modules):
            _fuse(graph, modules, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.ReLU)
    return node.op == "call_function" and node.target in _RELUS


def _fuse(graph: fx.GraphModule, modules: dict[str, nn.Module], relu: fx.Node) -> None:
    before = relu.args[0]
    assert isinstance(before, fx.Node)
    added: tuple[fx.Node, ...] = ()
    last: object = before
    if before.op == "call_function" and before.target in _SUMS and len(before.users) == 1:
        # The left side first: it is the block's own result, the right one what it began with.
        left, right = before.args[:2]
        last, other = (left, right) if _only_convolution(left, modules) else (right, left)
        if not isinstance(other, fx.Node):
            return
        added = (other,)
    convolution = _only_convolution(last, modules)
    if convolution is None:
        return
    assert isinstance(last, fx.Node)
    fused = ConvolutionRelu(convolution)
    shortcut = _only_convolution(added[0], modules) if added else None
    if shortcut is not None and shortcut.bias is not None:
        # Both biases are added to the same sum, in which one of them costs nothing.
        fused.bias.data = fused.bias + shortcut.bias
        shortcut.bias = None
    name = f"{last.target}_relu".replace(".", "_")
    graph.add_submodule(name, fused)
    with graph.graph.inserting_before(relu):
        relu.replace_all_uses_with(graph.graph.call_module(name, (last.args[0], *added)))
    graph.graph.erase_node(relu)


def _only_convolution(node: object, modules: dict[str, nn.Module]) -> nn.Conv2d | None:
    """The convolution that a node calls, if nothing else uses its result."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.users) != 1:
        return None
    module = modules[str(node.target)]
    if isinstance(module, nn.Conv2d) and module.groups == 1 and not isinstance(module.padding, str):
        return module
    return None


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of one sequence without masks. There a compiler finds
    the batch moved to the second place and q, k and v copied; here SDPA reads them where they
    are."""

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = original.num_heads
        self.weight, self.bias = original.in_proj_weight, original.in_proj_bias
        self.out = original.out_proj

    def forward(self, x: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, None]:
        """x and the result (N, L, E); nothing in the place of the attention's weights."""
        qkv = F.linear(x, self.weight, self.bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2)), None


def replace_attention(model: nn.Module) -> nn.Module:
    """The network with SelfAttention, where torchvision's vision transformers have PyTorch's."""
    for block in list(model.modules()):
        attention = getattr(block, "self_attention", None)
        if isinstance(attention, nn.MultiheadAttention) and attention.batch_first:
            block.self_attention = SelfAttention(attention)
    return model
