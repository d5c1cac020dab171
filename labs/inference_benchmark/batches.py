"""Images and targets of all iterations, which process and judge make from the same seed.

To make them takes seconds, in which a process could compute their logits. So a pattern that nobody
has seen before the clock starts is added to each batch as it comes in.
"""

import functools
import itertools
import math

from torch import Tensor

from labs.inference_benchmark.modes import Setting

SAME_PIXELS = 8
"""In the first row of each image."""
MOST_PLACES = 1000
"""Iterations, or images of a batch if it has more, of which no two have the same images."""
KEPT_BYTES = 256e6
"""Most logits of the timed iterations that are kept."""


class Images:
    """Images and targets of all iterations, those of a process of a group. Each iteration reads a
    window that no other has, but shares most of its images with some; and all images begin with
    the same pixels. So what an earlier iteration left is never the answer."""

    def __init__(self, setting: Setting, iterations: int, rank: int | None = None) -> None:
        network, seed = setting.network, setting.images_seed(rank)
        self.batch = setting.batch_size
        if rank is not None and setting.parts:
            self.batch = setting.parts[rank]
        self._places = max(self.batch, min(iterations, MOST_PLACES)) + 1
        count = self.batch + self._places - 1
        self.network, self._count, self._seed = network, count, seed
        self.images = network.images(count, seed)
        self.images[:, :, 0, :SAME_PIXELS] = self.images[0, :, 0, :SAME_PIXELS].clone()
        steps = itertools.count(max(1, self.batch // 3))
        self._step = next(step for step in steps if math.gcd(step, self._places) == 1)

    @functools.cached_property
    def targets(self) -> Tensor:
        return self.network.targets(self._count, self._seed)

    def window(self, index: int) -> slice:
        """The images of an iteration."""
        first = index * self._step % self._places
        return slice(first, first + self.batch)

    def kept(self, iterations: range) -> range:
        """The newest of these iterations, whose logits are kept: KEPT_BYTES of fp32 numbers."""
        numbers = self.batch * self.network.classes
        numbers *= self.network.edge**2 if self.network.segments else 1
        return iterations[-max(2, int(KEPT_BYTES / (4 * numbers))) :]
