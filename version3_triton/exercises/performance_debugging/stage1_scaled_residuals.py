#!/usr/bin/env python3
"""Stage 1: V3, with the projections into the residual stream scaled down as in GPT-2.

Every layer adds two branches to the stream. Drawn sqrt(2 L) times smaller, all L layers together
add about as much as one.
"""

import math
import sys

from debug_harness import main

# isort: split

import tiny_llama_v3 as v3
from torch import nn


class TinyLlama(v3.TinyLlama):
    """V3's model, whose o_proj and down_proj start smaller."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, v3.Block):
            std = 0.02 / math.sqrt(2 * self.config.num_layers)
            nn.init.normal_(module.self_attn.o_proj.weight, std=std)
            nn.init.normal_(module.mlp.down_proj.weight, std=std)


if __name__ == "__main__":
    sys.exit(main(__file__, TinyLlama))
