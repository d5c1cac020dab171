"""Engines, a class each: they continue a batch of prompts, and say when each token came.

`hf` is Hugging Face's loop as `model.generate` has it; `static` is the same with its static cache,
compiled; `deepspeed` the same on what DeepSpeed-Inference makes of the model; `fast` is our own
loop, in fast.py, plain_ops.py and triton_ops.py; `vllm` is vLLM's, in peer_vllm.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from workshop.run.timing import StepClock

ENGINES = ("hf", "static", "fast", "deepspeed", "vllm")
OnTokens = Callable[[Tensor], object]


@dataclass
class Answer:
    """An engine's answer to a batch."""

    tokens: Tensor
    """int64 (B, n) on the CPU: the new tokens. n may be smaller than asked for where all prompts
    ended before; what follows a prompt's end token has no meaning."""
    first_s: float
    """Seconds to the first token."""
    step_s: list[float]
    """Seconds of each token after it; fewer than n - 1 where all prompts ended before."""


class Engine(Protocol):
    compiled: bool
    """Whether torch.compile is used."""

    def generate(
        self,
        ids: Tensor,
        mask: Tensor,
        new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        """Continues each prompt of a batch.

        Args:
            ids: int64 (B, T), padded on the left.
            mask: int64 (B, T), 0 where `ids` are padding.
            new_tokens: how many at most.
            temperature: 0 takes the likeliest token.
            seed: of the batch's first prompt; prompt i has `seed + i`, whatever is beside it.
            on_tokens: called with the tokens (B,) of each step as soon as they are there.
        """
        ...


def uniforms(prompts: int, new_tokens: int, seed: int) -> Tensor:
    """The random numbers of a batch's tokens, fp64 (prompts, new_tokens), from 0 to 1, made on the
    CPU: a prompt's own follow from its seed alone, on any device and in any batch."""
    rows = [torch.Generator().manual_seed(seed + row) for row in range(prompts)]
    return torch.stack([torch.rand(new_tokens, generator=row, dtype=torch.float64) for row in rows])


def draw(logits: Tensor, temperature: float | Tensor, uniform: Tensor) -> Tensor:
    """A token (B,) from the softmax of logits (B, V) over the temperature; `uniform` is (B,)."""
    sums = (logits.double() / temperature).softmax(-1).cumsum(-1)
    found = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


class HuggingFace:
    """`model.generate`.

    Args:
        device: where tokens go in.
        ends, pad: the tokens that end a text, and the one that follows them in a batch.
        static: with the static cache; `compiled` compiles the steps that read it.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        ends: list[int],
        pad: int,
        *,
        static: bool = False,
        compiled: bool = False,
    ) -> None:
        from transformers import CompileConfig

        self.model, self.device, self.compiled = model, device, compiled
        self._settings: dict[str, Any] = {
            "do_sample": False,
            "eos_token_id": ends or None,
            "pad_token_id": pad,
            "disable_compile": not compiled,
        }
        if static:
            self._settings["cache_implementation"] = "static"
        if compiled and device.type == "cpu":
            compile_config: Any = CompileConfig()
            compile_config._compile_all_devices = True
            self._settings["compile_config"] = compile_config

    @torch.inference_mode()
    def generate(
        self,
        ids: Tensor,
        mask: Tensor,
        new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        from transformers import GenerationConfig

        ids, mask = ids.to(self.device), mask.to(self.device)
        clock = StepClock(self.device)
        logits_processor = []
        if temperature:
            logits_processor.append(_draws(temperature, uniforms(len(ids), new_tokens, seed)))
        watch = _watches(clock, on_tokens, torch.zeros(len(ids), dtype=torch.bool).to(self.device))
        clock.mark()
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(max_new_tokens=new_tokens, **self._settings),
            logits_processor=logits_processor,
            stopping_criteria=[watch],
        )
        first, *steps = (ms / 1e3 for ms in clock.durations_ms())
        return Answer(found[:, ids.shape[1] :].cpu(), first, steps)


def _draws(temperature: float, uniform: Tensor) -> Any:
    """A logits processor that leaves the drawn token alone: `generate` has no generator for each
    prompt."""
    from transformers import LogitsProcessor

    class Draws(LogitsProcessor):
        step = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            tokens = draw(scores, temperature, uniform[:, self.step].to(scores.device))
            self.step += 1
            return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    return Draws()


def _watches(clock: StepClock, on_tokens: OnTokens | None, none_ends: Tensor) -> Any:
    """A criterion that never stops: it is asked after each token."""
    from transformers import StoppingCriteria

    class Watches(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
            clock.mark()
            if on_tokens is not None:
                on_tokens(input_ids[:, -1])
            return none_ends

    return Watches()
