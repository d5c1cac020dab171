"""Slow storage, simulated: a wait at each open of a file, as on a cluster's shared file system.

It is a sleep, which no other process feels. A real server also slows down with many clients.
"""

import os
import time

from torch import Tensor
from torch.utils.data import Dataset

from labs.data_pipeline.formats import Folder, Images
from labs.data_pipeline.peers import TorchvisionImages


class SlowOpens(Dataset[tuple[Tensor, int]]):
    """The same images. In the folder each image is an open; a packed file is opened once in each
    process.

    Args:
        open_ms: that each open takes longer.
    """

    def __init__(self, images: Images | TorchvisionImages, open_ms: float) -> None:
        self.images, self.open_ms = images, open_ms
        self._opened_in = -1
        """The process that has opened the packed file."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.images.key == Folder.key or self._opened_in != os.getpid():
            self._opened_in = os.getpid()
            time.sleep(self.open_ms / 1e3)
        return self.images[index]
