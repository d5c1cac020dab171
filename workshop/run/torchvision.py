"""torchvision, also where its build is not the one that belongs to PyTorch's."""

import importlib.util
import sys

import torch

_declared: list[torch.library.Library] = []


def make_importable() -> bool:
    """Imports torchvision; False where it is not installed. transformers and timm import it too.

    A build for GPUs beside a PyTorch for the CPU fails at import, since its two operators for
    detection are not declared: they are declared here.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)  # the declarations live as long as it does
        import torchvision  # noqa: F401
    return True
