"""vLLM on the same prompts: its engine's own step, a token of all texts at a time.

It asks for one version of PyTorch exactly, so that it wants an environment of its own.
"""

import itertools
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from labs.text_generation.engines import Answer, OnTokens

MEMORY_SHARE = 0.3
"""Share of the GPU's memory; Hugging Face's model stays beside it for the gate."""


class VLLM:
    """As `Engine`. Drawn tokens follow vLLM's own generator."""

    compiled = False  # here; vLLM compiles and captures when it starts, and in its own way

    def __init__(
        self, folder: Path, dtype: torch.dtype, ends: list[int], pad: int, longest: int
    ) -> None:
        # With the engine in this process a step ends when its tokens are here.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self.ends, self.pad = ends, pad
        self._engine = LLM(
            str(folder),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=longest,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_prefix_caching=False,  # it would skip the prompts after the warm-up
        ).llm_engine

    def generate(
        self,
        ids: Tensor,
        mask: Tensor,
        new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        from vllm import SamplingParams

        rows = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        start = time.perf_counter()
        for i, row in enumerate(rows):
            how = SamplingParams(
                temperature=temperature,
                seed=seed + i,
                max_tokens=new_tokens,
                stop_token_ids=self.ends,
                detokenize=False,
            )
            self._engine.add_request(str(i), {"prompt_token_ids": row}, how)
        found: list[list[int]] = [[] for _ in rows]
        moments = [start]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
            if all(len(tokens) >= len(moments) or self._ended(tokens) for tokens in found):
                moments.append(time.perf_counter())
                if on_tokens is not None:
                    on_tokens(torch.tensor([tokens[-1] for tokens in found]))
        longest = max(map(len, found))
        padded = [tokens + [self.pad] * (longest - len(tokens)) for tokens in found]
        first, *steps = (b - a for a, b in itertools.pairwise(moments))
        return Answer(torch.tensor(padded), first, steps)

    def _ended(self, tokens: list[int]) -> bool:
        return bool(tokens) and tokens[-1] in self.ends
