"""ResNets for images of 32 x 32."""

from torch import nn

from labs import shared

CLASSES = 10


def build(name: str) -> nn.Module:
    """torchvision's network, in which a 3 x 3 convolution of stride 1 takes the place of the first
    layers: those are for 224 x 224, and would leave 8 x 8 of an image.

    Raises:
        NotOnThisMachine: torchvision is not installed.
    """
    models = shared.import_torchvision().models
    model: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
