"""Rewrites of a network for inference: batch norms are folded into convolutions, a convolution, a
residual sum and a ReLU become one operator, and attention copies nothing."""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from workshop.errors import WorkshopError

_SUMS = (operator.add, operator.iadd, torch.add)
_RELUS = (F.relu, torch.relu)


def fold_norms(model: nn.Module) -> nn.Module:
    """The network with each batch norm that follows a convolution made part of its weights: in
    inference it is a product and a sum with constants.

    y = g * (w x + b - mean) / sqrt(variance + eps) + beta
      = (w g / sqrt(variance + eps)) x + (b - mean) g / sqrt(variance + eps) + beta

    Raises:
        WorkshopError: torch.fx can't trace the network.
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
    convolutions, which have kernels of their own, stay as they are.

    Raises:
        WorkshopError: torch.fx can't trace the network.
    """
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
