"""The networks of the benchmark: their names, inputs, outputs and losses.

Weights are random, from a seed. The batch norms' statistics are taken from random images, since
with those of a fresh network (mean 0, variance 1) activations double from block to block and
overflow fp16 after fifty of them.
"""

import contextlib
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs import shared
from workshop.errors import NotOnThisMachine, WorkshopError

CLASSES, PIXEL_CLASSES = 1000, 21
"""The classes of ImageNet, and of Pascal VOC, for which torchvision's segmentation networks are."""
CALIBRATION_IMAGES = 8

ALIASES = {
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x8d",
    "shufflenet_v2": "shufflenet_v2_x1_0",
    "shufflenet_v2_x05": "shufflenet_v2_x0_5",
    "shufflenet_v2_x10": "shufflenet_v2_x1_0",
    "shufflenet_v2_x15": "shufflenet_v2_x1_5",
    "shufflenet_v2_x20": "shufflenet_v2_x2_0",
    "SqueezeNet": "squeezenet1_0",
    "SqueezeNet1.1": "squeezenet1_1",
}
"""Other names for torchvision's."""
ELSEWHERE = {
    "xception": ("timm", "create_model", "legacy_xception"),
    "shufflenet": ("pytorchcv.model_provider", "get_model", "shufflenet_g3_w1"),
}
"""Networks that torchvision does not have: the module, its function, and the name there."""

NAMES = tuple(
    "alexnet densenet121 densenet161 densenet169 densenet201 googlenet inception_v3"
    " mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large"
    " mobilenet_v3_small resnet18 resnet34 resnet50 resnet101 resnet152 resnext50 resnext50_32x4d"
    " resnext101 resnext101_32x8d shufflenet shufflenet_v2 shufflenet_v2_x05 shufflenet_v2_x10"
    " shufflenet_v2_x15 shufflenet_v2_x20 shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5"
    " shufflenet_v2_x2_0 SqueezeNet squeezenet1_0 SqueezeNet1.1 squeezenet1_1 vgg11 vgg13 vgg16"
    " vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn wide_resnet50_2 wide_resnet101_2 xception swin_t"
    " swin_s swin_b swin_v2_t swin_v2_s swin_v2_b vit_b_16 vit_b_32 vit_l_16 vit_l_32 vit_h_14"
    " efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4"
    " efficientnet_b5 efficientnet_b6 efficientnet_b7 maxvit_t fcn_resnet50 fcn_resnet101"
    " deeplabv3_resnet50 deeplabv3_resnet101 deeplabv3_mobilenet_v3_large"
    " lraspp_mobilenet_v3_large".split()
)
"""The benchmark's 74. Any other classification or segmentation network of torchvision runs too."""

LARGE_IMAGES = {"inception_v3": 299, "xception": 299} | dict.fromkeys(
    ("swin_v2_t", "swin_v2_s", "swin_v2_b"), 256
)
"""Edges of images, in pixels, that are not 224. At 224 Swin V2 pads its windows with zeros, which
torchvision normalises: in fp16 that is 0 / 0."""
AUXILIARY_WEIGHT = {"googlenet": 0.3, "inception_v3": 0.4}
"""The weight of the auxiliary classifiers in the loss, from the two networks' papers."""


@dataclass(frozen=True)
class Network:
    """A network that can be built, and the shapes of its inputs and outputs."""

    name: str
    build: Callable[[], nn.Module]
    edge: int = 224
    segments: bool = False
    """Whether it gives a class for each pixel."""

    @property
    def classes(self) -> int:
        return PIXEL_CLASSES if self.segments else CLASSES

    def images(self, count: int, seed: int) -> Tensor:
        """Random images, (count, 3, edge, edge) fp32 on the CPU: each has another colour, so
        that they do not look alike to a network that averages over them, patches and noise."""
        generator = torch.Generator().manual_seed(seed)
        patches = torch.randn(count, 3, 8, 8, generator=generator).mul_(0.7)
        patches += torch.randn(count, 3, 1, 1, generator=generator)
        noise = torch.randn(count, 3, self.edge, self.edge, generator=generator)
        return F.interpolate(patches, size=self.edge, mode="bilinear").add_(noise, alpha=0.25)

    def targets(self, count: int, seed: int) -> Tensor:
        """Random classes, int64 (count,), of segmentation (count, edge, edge)."""
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (count, self.edge, self.edge) if self.segments else (count,)
        return torch.randint(self.classes, shape, generator=generator)

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in fp32, with that of the auxiliary classifiers in training."""
        loss = F.cross_entropy(logits(output).float(), targets)
        weight = AUXILIARY_WEIGHT.get(self.name, 0.0)
        if isinstance(output, tuple):
            extra = [F.cross_entropy(one.float(), targets) for one in output[1:] if one is not None]
            loss = loss + weight * sum(extra, torch.zeros_like(loss))
        return loss


def logits(output: Any) -> Tensor:
    """The logits, (N, classes) or (N, classes, H, W), of a network's output: a tensor, a tuple with
    auxiliary logits, or a dict of segmentation."""
    if isinstance(output, dict):
        output = output["out"]
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def get_network(name: str) -> Network:
    """A network by its name.

    Raises:
        NotOnThisMachine: the package that has it is not installed.
        WorkshopError: no package has it; the message gives the nearest names.
    """
    edge = LARGE_IMAGES.get(name, 224)
    if name in ELSEWHERE:
        return Network(name, _of_package(name, *ELSEWHERE[name]), edge)
    models = shared.import_torchvision().models
    segmentation = set(models.list_models(module=models.segmentation))
    known = set(models.list_models(module=models)) | segmentation
    true_name = ALIASES.get(name, name)
    if true_name not in known:
        near = difflib.get_close_matches(name, {*NAMES, *known}, n=4, cutoff=0.4)
        hint = f"the nearest are {', '.join(near)}" if near else "--help lists the names"
        raise WorkshopError(f"--network {name}: no such network; {hint}")
    arguments: dict[str, Any] = {"weights": None}
    if true_name in segmentation:
        arguments["weights_backbone"] = None
    if true_name in AUXILIARY_WEIGHT:
        arguments["init_weights"] = False  # it takes seconds, and norms follow every convolution
    build = models.get_model_builder(true_name)
    return Network(true_name, lambda: build(**arguments), edge, true_name in segmentation)


def _of_package(
    name: str, module_name: str, function: str, true_name: str
) -> Callable[[], nn.Module]:
    package = module_name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise NotOnThisMachine(
            f"--network {name} needs the package {package}: pip install {package}"
        )

    def build() -> nn.Module:
        shared.import_torchvision()  # timm imports it
        module = importlib.import_module(module_name)
        model: nn.Module = getattr(module, function)(true_name)
        return model

    return build


def timm_network(name: str, ours: nn.Module) -> nn.Module:
    """timm's network with our network's weights, in fp32 on the same device, for inference. Raises
    WorkshopError: timm has no network of that name, or its weights have other names or shapes."""
    shared.import_torchvision()  # timm imports it
    import timm

    if not timm.is_model(name):
        raise WorkshopError(f"--peer timm: timm has no network {name}; it has resnet50")
    theirs: nn.Module = timm.create_model(name)
    try:
        theirs.load_state_dict(ours.state_dict())
    except RuntimeError:
        raise WorkshopError(
            f"--peer timm: {name}'s weights have other names or shapes in timm; take a ResNet or a "
            "DenseNet"
        ) from None
    return theirs.to(next(ours.parameters()).device).eval()


def build(network: Network, seed: int, device: torch.device) -> nn.Module:
    """The network with random weights and the statistics of random images, in fp32, ready for
    inference."""
    torch.manual_seed(seed)
    model = network.build().to(device)
    for parameter in model.parameters():  # a vision transformer's head gives nothing but zeros
        if parameter.dim() > 1 and not parameter.any():
            nn.init.trunc_normal_(parameter, std=0.02)
    last_norms = [norm for norm in map(_norm_of_branch, model.modules()) if norm is not None]
    for last in last_norms:
        # Else each block multiplies the rounding errors of those before it: a random ResNet-50 in
        # fp16 is off by a tenth, an EfficientNet-B7 overflows.
        last.weight.data.mul_(len(last_norms) ** -0.5)
    images = network.images(CALIBRATION_IMAGES, seed + 2).to(device)
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:  # the norms alone: dropped branches and scaled ones are not averaged
        norm.train()
        norm.momentum = 1.0  # the statistics become those of these images
    with torch.no_grad(), run_once():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.zero_()
    return model.eval()


def without_chance(model: nn.Module) -> nn.Module:
    """The network itself, with dropout and stochastic depth switched off."""
    for module in model.modules():
        names = ["drop_rate", "dropout_p"]
        if "Drop" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
            names += ["p", "drop_prob"]
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _norm_of_branch(block: nn.Module) -> nn.BatchNorm2d | None:
    """The last norm of what a block adds to its input; None for any other module."""
    norm: object = None
    if hasattr(block, "downsample"):  # a ResNet's
        norm = getattr(block, "bn3", getattr(block, "bn2", None))
    elif getattr(block, "use_res_connect", False):  # a MobileNet's or an EfficientNet's
        norm = [one for one in block.modules() if isinstance(one, nn.BatchNorm2d)][-1]
    return norm if isinstance(norm, nn.BatchNorm2d) else None


@contextlib.contextmanager
def run_once() -> Iterator[None]:
    """In the block convolutions take the first algorithm that works: to try all of them takes
    seconds, which a network that runs once does not give back."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
