"""The gate, the judge's side: an engine says what the model says.

The judge hands out the prompts, each batch when its clock starts, and gets the new tokens when it
stops. Those that were chosen greedily are given to Hugging Face's model again: each prompt alone,
without padding, cache or compiler, in one pass. There each token must have the largest logit, or
nearly so: rounding may decide between two that are nearly alike. How nearly is measured on Hugging
Face's own loop, on the same batch at the same precision; that loop itself has a fixed limit.

A wrong mask, position or head changes tokens and is found. A small error that changes none, as of
weights in int8, is not.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labs.text_generation.engines import HuggingFace
from labs.text_generation.models import Loaded
from labs.text_generation.prompts import Batch
from workshop.gate.parity import Measure, as_recorded
from workshop.judge import turn
from workshop.judge.pipe import Closed, Message
from workshop.judge.turn import Shown
from workshop.judge.wire import expected
from workshop.labs import LabRun
from workshop.results import Parity
from workshop.run.precision import Precision

MOST_PROMPTS, MOST_TOKENS = 8, 128
"""The prompts of a batch that are compared, and the tokens of each."""
MOST_TIMES = 3.0
"""How many times as far off as Hugging Face's loop an engine may be."""
FLOOR = 16
"""Roundings that are added; the loop may by luck take the very same tokens."""
LOOP = 24
"""Roundings, times the root of the layers, that Hugging Face's own loop may miss by. Of 50 random
Llamas with 2 to 32 layers, in bf16 and fp16 on a CPU, the worst missed by 9.9; of the study's, with
1.04 billion weights in bf16 on an H200, by 7.5."""
MOST = 0.5
"""The largest error that is ever allowed. Tokens of another prompt are at 1 and more."""
Chosen = list[tuple[Batch, list[list[int]]]]
"""Batches, with the new tokens of each prompt up to its end."""


class Check(turn.Check):
    """Compares what an engine says with Hugging Face's model.

    Args:
        batches: the prompts, in the order in which they are handed out.
        new_tokens: follow each prompt, unless it ends before.
        greedy: whether the timed tokens are the most likely; else others are asked for.
        plain_loop: whether Hugging Face's own loop is the engine.
    """

    def __init__(
        self,
        loaded: Loaded,
        precision: Precision,
        batches: Iterable[Batch],
        new_tokens: int,
        *,
        greedy: bool = True,
        plain_loop: bool,
    ) -> None:
        self.loaded, self.left = loaded, iter(batches)
        self._precision, self._new_tokens = precision, new_tokens
        self._greedy, self._plain_loop = greedy, plain_loop
        self._given: list[Batch] = []
        self._taken: list[Mapping[str, Tensor]] = []

    def draw(self) -> Shown:
        """The next batch's `ids` and `mask`, int64 (B, T). Raises Closed: all are given."""
        if (batch := next(self.left, None)) is None:
            raise Closed("the process asked for more prompts than there are")
        self._given.append(batch)
        return {"ids": batch.ids, "mask": batch.mask}, {}

    def take(self, proof: Mapping[str, Tensor]) -> None:
        self._taken.append(proof)

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        """Fills in the gate."""
        with expected():
            ends = sorted({0, len(self._given) - 1})
            told = {i: self._taken[i] if self._greedy else ask(batch=i).tensors for i in ends}
            chosen = [(self._given[i], self._rows(self._given[i], told[i])) for i in ends]
        model: Any = self.loaded.model
        reference = "Hugging Face's model, each prompt alone"
        allowed = LOOP * math.sqrt(model.config.num_hidden_layers) * self._precision.unit_roundoff
        plain = math.nan
        if not self._plain_loop:
            loops = [(batch, _loop(self.loaded, batch, rows)) for batch, rows in chosen]
            plain = _worst(self.loaded, loops)
            allowed = MOST_TIMES * plain + FLOOR * self._precision.unit_roundoff
            reference += f"; its own loop is {plain:.1e} from it"
        error, allowed = _worst(self.loaded, chosen), min(MOST, allowed)
        failed = not error <= allowed
        failure = (
            f"a token's logit is {error:.1e} standard deviations below the largest one of Hugging "
            f"Face's model for that prompt alone, {allowed:.1e} allowed"
        )
        run.gate = Parity(
            status="fail" if failed else "pass",
            failures=[failure] * failed,
            batch_size=sum(min(len(rows), MOST_PROMPTS) for _, rows in chosen),
            seq_len=max(len(row) for _, rows in chosen for row in rows),
            reference=reference,
            measures={"tokens": as_recorded(Measure(error, allowed, plain))},
        )

    def _rows(self, batch: Batch, told: Mapping[str, Tensor]) -> list[list[int]]:
        """Each prompt's new tokens up to its end, MOST_TOKENS at most. Raises ValueError: there are
        too few, or others than the model has."""
        model: Any = self.loaded.model
        ends, words = self.loaded.ends, model.get_input_embeddings().num_embeddings
        rows = [until_end(row, ends) for row in told["tokens"].long().tolist()]
        whole = [row[-1] in ends or len(row) == self._new_tokens for row in rows]
        known = all(0 <= token < words for row in rows for token in row)
        if not (all(whole) and known and len(rows) == len(batch.rows)):
            raise ValueError(f"no {self._new_tokens} tokens for each of {len(batch.rows)} prompts")
        return [row[:MOST_TOKENS] for row in rows]


def until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the first that ends a text, and that one."""
    found = next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:found]


def _loop(loaded: Loaded, batch: Batch, rows: list[list[int]]) -> list[list[int]]:
    """The tokens of Hugging Face's loop, up to the length of the longest of `rows`."""
    answer = HuggingFace(loaded.model, loaded).generate(batch.ids, batch.mask, max(map(len, rows)))
    return [until_end(row, loaded.ends) for row in answer.tokens.tolist()]


def _worst(loaded: Loaded, chosen: Chosen) -> float:
    found = []
    for batch, tokens in chosen:
        # The shortest prompts are those with the most padding.
        order = sorted(range(len(tokens)), key=lambda i: len(batch.rows[i]))[:MOST_PROMPTS]
        found += [shortfall(loaded, batch.rows[i], tokens[i]) for i in order]
    return max(found)


def shortfall(loaded: Loaded, prompt: tuple[int, ...], new: list[int]) -> float:
    """By how much the logit of a new token is below the largest one: the most of all tokens, in
    standard deviations of the token's logits."""
    model: Any = loaded.model
    ids = torch.tensor([[*prompt, *new]], device=loaded.device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double().cpu()
    chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
    most = float(((logits.max(-1).values - chosen) / logits.std(-1)).max())
    return most if math.isfinite(most) else math.inf
