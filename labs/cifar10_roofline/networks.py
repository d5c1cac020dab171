"""ResNets for images of 32 x 32, and the operations of their training."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from workshop.errors import NotOnThisMachine
from workshop.run.torchvision import make_importable

CLASSES = 10


def require_torchvision() -> None:
    """Imports torchvision; raises NotOnThisMachine where it is not installed."""
    if not make_importable():
        raise NotOnThisMachine(
            "torchvision is missing: run `make setup`, or pip install the torchvision that "
            f"belongs to PyTorch {torch.__version__}"
        )


def build(name: str) -> nn.Module:
    """torchvision's network, in which a 3 x 3 convolution of stride 1 takes the place of the first
    layers: those are for 224 x 224, and would leave 8 x 8 of an image.

    Raises:
        NotOnThisMachine: torchvision is not installed.
    """
    require_torchvision()
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def flops_per_image(model: nn.Module, *, training: bool = True) -> float:
    """Operations of convolutions and matrix products, a multiplication and an addition as two:
    forward, or also backward, which has no gradient of the image."""
    shadow = deepcopy(model).to("meta")  # shapes are enough
    counter = FlopCounterMode(display=False)
    with counter:
        output: Tensor = shadow(torch.empty(1, 3, 32, 32, device="meta"))
        if training:
            output.sum().backward()
    return float(counter.get_total_flops())
