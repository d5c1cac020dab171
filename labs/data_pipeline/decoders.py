"""From a PNG file's bytes to pixels, by three libraries, each imported where it is used."""

import io
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from workshop import errors
from workshop.errors import NotOnThisMachine
from workshop.run.torchvision import make_importable

if TYPE_CHECKING:
    from PIL.Image import Image

Decoder = Callable[[bytes], Tensor]
SIGNATURE = b"\x89PNG\r\n\x1a\n"
PACKAGES = {"pil": "PIL", "torchvision": "torchvision", "opencv": "cv2"}


def get(name: str) -> Decoder:
    """The decoder of that name, from PNG to uint8 (3, height, width) in red, green, blue. It raises
    an error of its library's where the PNG is damaged.

    Raises:
        NotOnThisMachine: its library is missing, or can't decode here.
    """
    errors.require(PACKAGES[name])
    if name == "torchvision" and not (make_importable() and hasattr(torch.ops.image, "decode_png")):
        raise NotOnThisMachine(
            "torchvision decodes no images here: install the build that belongs to this PyTorch, "
            "or choose another decoder"
        )
    return {"pil": by_pil, "torchvision": by_torchvision, "opencv": by_opencv}[name]


def by_pil(png: bytes) -> Tensor:
    return torch.from_numpy(np.array(open_image(png))).permute(2, 0, 1)


def by_torchvision(png: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_png

    content = torch.frombuffer(bytearray(png), dtype=torch.uint8)
    pixels: Tensor = decode_png(content, ImageReadMode.RGB)
    return pixels


def by_opencv(png: bytes) -> Tensor:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError("OpenCV can't decode it")
    return torch.from_numpy(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)).permute(2, 0, 1)


def open_image(content: bytes) -> "Image":
    """An image file of any kind by PIL, in RGB.

    The other libraries compare a PNG's checksums. PIL does not, and may take a file whose second
    half is zeros, as a crash leaves it, for an image.
    """
    from PIL import Image

    if content.startswith(SIGNATURE):
        _check_png(content)
    return Image.open(io.BytesIO(content)).convert("RGB")


def _check_png(png: bytes) -> None:
    """Raises ValueError unless all chunks of a PNG are there, each with its checksum."""
    start, kind = len(SIGNATURE), b""
    while kind != b"IEND":
        kind = png[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(png[start : start + 4], "big")  # length, kind, data, sum
        if end > len(png):
            raise ValueError("it is cut off")
        if zlib.crc32(png[start + 4 : end - 4]) != int.from_bytes(png[end - 4 : end], "big"):
            raise ValueError("a checksum is wrong")
        start = end
