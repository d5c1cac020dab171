"""Continues the prompts of a batch with a Hugging Face model, greedily. Each gets the text that
it gets alone.

Shapes in the comments:
    B prompts   T tokens of the longest
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """The prompts as one tensor (B, T), and a mask (B, T) with 1 for their own tokens.

    Args:
        pad: the token that fills up shorter prompts.
    """
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)  # on the left, so that new tokens follow the prompt's last
        ids[row, start:] = torch.tensor(prompt)
        mask[row, start:] = 1
    return ids, mask


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, pad: int
) -> list[list[int]]:
    """The new tokens of each prompt, `new_tokens` of them.

    The first call of the model reads the prompts, each further one the newest token of each: of all
    others the model's cache has the keys and values.

    Args:
        model: a causal language model of transformers.
        prompts: their tokens; at least one each.
        pad: any token: behind the mask it has no meaning.
    """
    ids, mask = padded(prompts, pad)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (B, T), from 0 at the prompt's first token
    cache = None
    found = []
    for _ in range(new_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        ids = output.logits[:, -1:].argmax(-1)  # (B, 1)
        found.append(ids)
        mask = F.pad(mask, (0, 1), value=1)  # later tokens see it
        positions = positions[:, -1:] + 1  # each prompt counts its own tokens
    return torch.cat(found, 1).tolist()
