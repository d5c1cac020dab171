"""What shows that an engine generates what the model says.

The tokens that it chose greedily are given to Hugging Face's model again: each prompt alone,
without padding, cache or compiler, in one pass. There each token must have the largest logit, or
nearly so: rounding may decide between two that are nearly alike. How nearly is measured on Hugging
Face's own loop, on the same batch at the same precision; that loop itself has a fixed limit.

It sees what changes a token: a mask, a position, a head. A small error that changes none, as of
weights in int8, it does not see.
"""

import math
from typing import Any

import torch

from labs.text_generation.engines import HuggingFace
from labs.text_generation.models import Loaded
from labs.text_generation.prompts import Batch
from workshop.results import Parity
from workshop.run.precision import Precision

MOST_PROMPTS, MOST_TOKENS = 8, 128
"""Of a batch that are compared."""
MOST_TIMES = 3.0
"""What Hugging Face's loop misses by, of which an engine may have this many."""
FLOOR = 16
"""Roundings; the loop may by luck take the very same tokens."""
LOOP = 24
"""Roundings, times the root of the layers, that Hugging Face's own loop may miss by. Of 50 random
Llamas with 2 to 32 layers, in bf16 and fp16 on a CPU, the worst missed by 9.9; of the study's, with
1.04 billion weights in bf16 on an H200, by 7.5."""
MOST = 0.5
"""However much the loop misses by. Tokens of another prompt are at 1 and more."""


def shortfall(loaded: Loaded, prompt: tuple[int, ...], new: list[int]) -> tuple[float, float]:
    """By how much the logit of a new token is below the largest one: the most of all tokens, in
    standard deviations of the token's logits. And the cache's bytes for each token."""
    model: Any = loaded.model
    ids = torch.tensor([[*prompt, *new]], device=loaded.device)
    with torch.inference_mode():
        output = model(ids, use_cache=True)
    logits = output.logits[0, len(prompt) - 1 : -1].double().cpu()
    chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
    most = float(((logits.max(-1).values - chosen) / logits.std(-1)).max())
    cache = [t for layer in output.past_key_values.layers for t in (layer.keys, layer.values)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in cache)
    return most if math.isfinite(most) else math.inf, size / ids.shape[1]


def until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the first that ends a text, and that one."""
    found = next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:found]


Chosen = list[tuple[Batch, list[list[int]]]]
"""Batches, with the new tokens of each prompt up to its end."""


def of_tokens(
    loaded: Loaded, precision: Precision, chosen: Chosen, *, plain_loop: bool
) -> tuple[Parity, dict[str, float]]:
    """The verdict on what an engine chose greedily.

    Args:
        plain_loop: whether Hugging Face's own loop was the engine.

    Returns:
        the verdict; `kv_bytes`, the cache's bytes for each token of a prompt; `as_hugging_face`,
        the share of tokens that its loop takes too.
    """
    chosen = [(batch, [row[:MOST_TOKENS] for row in rows]) for batch, rows in chosen]
    error, kv_bytes = _worst(loaded, chosen)
    plain, found = 0.0, {"kv_bytes": kv_bytes}
    if not plain_loop:
        loops = [(batch, _loop(loaded, batch, max(map(len, rows)))) for batch, rows in chosen]
        plain, _ = _worst(loaded, loops)
        both = zip(chosen, loops, strict=True)
        rows = [pair for (_, x), (_, y) in both for pair in zip(x, y, strict=True)]
        same = [a == b for pair in rows for a, b in zip(*pair, strict=False)]
        found["as_hugging_face"] = sum(same) / len(same)
    reference = "Hugging Face's model, each prompt alone"
    if not plain_loop:
        reference += f"; its own loop is {plain:.1e} from it"
    config: Any = loaded.model.config
    roundings = LOOP * math.sqrt(config.num_hidden_layers) if plain_loop else FLOOR
    allowed = min(MOST, MOST_TIMES * plain + roundings * precision.unit_roundoff)
    failed = not error <= allowed
    failure = (
        f"a token's logit is {error:.1e} standard deviations below the largest one of Hugging "
        f"Face's model for that prompt alone, {allowed:.1e} allowed"
    )
    return Parity(
        status="fail" if failed else "pass",
        failures=[failure] * failed,
        batch_size=sum(min(len(rows), MOST_PROMPTS) for _, rows in chosen),
        seq_len=max(len(row) for _, rows in chosen for row in rows),
        reference=reference,
        measures={"tokens": {"error": error if math.isfinite(error) else None, "allowed": allowed}},
    ), found


def _loop(loaded: Loaded, batch: Batch, new_tokens: int) -> list[list[int]]:
    loop = HuggingFace(loaded.model, loaded.device, loaded.ends, loaded.pad)
    answer = loop.generate(batch.ids, batch.mask, new_tokens)
    return [until_end(row, loaded.ends) for row in answer.tokens.tolist()]


def _worst(loaded: Loaded, chosen: Chosen) -> tuple[float, float]:
    found = []
    for batch, tokens in chosen:
        # The shortest prompts are those with the most padding.
        order = sorted(range(len(tokens)), key=lambda i: len(batch.rows[i]))[:MOST_PROMPTS]
        found += [shortfall(loaded, batch.rows[i], tokens[i]) for i in order]
    return max(error for error, _ in found), found[0][1]
