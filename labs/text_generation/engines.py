"""Engines, a class each: they continue a batch of prompts, and say when each token came.

`hf` is Hugging Face's loop as `model.generate` has it; `static` is the same with its static cache,
compiled; `deepspeed` the same on what DeepSpeed-Inference makes of the model; `vllm` is vLLM's own;
`fast` is our own loop, in fast.py, plain_ops.py and triton_ops.py.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.text_generation.models import Loaded, line
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.run.timing import StepClock
from workshop.run.trainer import missing_for_compile

ENGINES = ("hf", "static", "fast", "deepspeed", "vllm")
VLLM_MEMORY = 0.3
"""vLLM's share of the GPU's memory; Hugging Face's model stays in memory, too, for the gate."""
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
            temperature: 0 takes the most likely token.
            seed: of the batch's first prompt; prompt i has `seed + i`, whatever its neighbours.
            on_tokens: called with the tokens (B,) of each step as soon as they are there.
        """
        ...


def processes() -> int:
    """The number of processes that torchrun or the deepspeed launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_its_own_model(arguments: argparse.Namespace) -> bool:
    """Whether the engine loads the model once more: Hugging Face's stays for the gate."""
    return arguments.engine in ("fast", "deepspeed", "vllm") or arguments.tensor_parallel


def make(arguments: argparse.Namespace, loaded: Loaded, longest: int) -> Engine:
    """The engine that the flags ask for.

    Args:
        longest: tokens of a prompt and its continuation.
    """
    if arguments.engine == "fast":
        from labs.text_generation.fast import FastLlama

        return FastLlama(arguments.model_path, loaded.dtype, loaded.device, arguments.load_in_8bit)
    if arguments.engine == "vllm":
        return VLLM(arguments, loaded, longest)
    if arguments.engine == "deepspeed":
        return HuggingFace(_deepspeed_model(arguments, loaded, longest), loaded)
    model = _parallel_model(arguments, loaded) if arguments.tensor_parallel else loaded.model
    static = arguments.engine == "static"
    return HuggingFace(
        model, loaded, static=static, compiled=static and _compiles(arguments, loaded)
    )


def _compiles(arguments: argparse.Namespace, loaded: Loaded) -> bool:
    """Whether the steps of the static cache are compiled."""
    wanted = arguments.compile
    if wanted is None:
        wanted = loaded.device.type == "cuda"
    missing = missing_for_compile(loaded.device) if wanted else None
    if missing and arguments.compile:
        raise NotOnThisMachine(f"--compile needs {missing}; install it")
    return wanted and not missing and not loaded.spread


# --- random numbers ------------------------------------------------------------------------------


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


# --- Hugging Face's loop -------------------------------------------------------------------------


class HuggingFace:
    """`model.generate`.

    Args:
        model: `loaded`'s, or what was made of it.
        static: with the static cache; `compiled` compiles the steps that read it.
    """

    def __init__(
        self, model: Any, loaded: Loaded, *, static: bool = False, compiled: bool = False
    ) -> None:
        from transformers import CompileConfig

        self.model, self.device, self.compiled = model, loaded.device, compiled
        self._settings: dict[str, Any] = {
            "do_sample": False,
            "eos_token_id": loaded.ends or None,
            "pad_token_id": loaded.pad,
            "disable_compile": not compiled,
        }
        if static:
            self._settings["cache_implementation"] = "static"
        if compiled and self.device.type == "cpu":
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

        clock, steps = StepClock(self.device), itertools.count()
        ids, mask = ids.to(self.device), mask.to(self.device)
        draws = uniforms(len(ids), new_tokens, seed).to(self.device)
        nothing_ends = torch.zeros(len(ids), dtype=torch.bool, device=self.device)

        def drawn(_: Tensor, scores: Tensor) -> Tensor:
            """Leaves the drawn token alone: `generate` has no generator for each prompt."""
            tokens = draw(scores, temperature, draws[:, next(steps)])
            return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

        def watch(so_far: Tensor, *_: object, **__: object) -> Tensor:
            """A criterion that never stops: it is asked after each token."""
            clock.mark()
            if on_tokens is not None:
                on_tokens(so_far[:, -1])
            return nothing_ends

        clock.mark()
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=GenerationConfig(max_new_tokens=new_tokens, **self._settings),
            logits_processor=[drawn] if temperature else [],
            stopping_criteria=[watch],
        )
        first, *rest = (ms / 1e3 for ms in clock.durations_ms())
        return Answer(found[:, ids.shape[1] :].cpu(), first, rest)


def _model_again(arguments: argparse.Namespace, loaded: Loaded) -> Any:
    """The model once more, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(arguments.model_path), dtype=loaded.dtype, local_files_only=True
    ).eval()


# --- tensor parallel -----------------------------------------------------------------------------


def _parallel_model(arguments: argparse.Namespace, loaded: Loaded) -> Any:
    """A model of whose layers' matrices this process keeps its part, by Hugging Face's plan: the
    first ones are split by outputs, as heads are, and the last ones by inputs. The embedding stays
    whole: where it makes the logits too, their plan would split it."""
    config: Any = loaded.model.config
    plan, count = dict(getattr(config, "base_model_tp_plan", None) or {}), processes()
    plan.pop("embed_tokens", None)
    if not plan or not set(plan.values()) <= {"colwise", "rowwise"}:
        raise WorkshopError(
            f"--tensor_parallel: Hugging Face has no plan of columns and rows for "
            f"{config.model_type}; take a Llama, or --engine deepspeed"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % count:
        raise WorkshopError(
            f"--tensor_parallel: {loaded.name} has {heads} heads of keys, which {count} processes "
            "can't share evenly"
        )
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)
    dist.init_process_group("nccl" if loaded.device.type == "cuda" else "gloo")
    model = _model_again(arguments, loaded)
    for name, module in model.base_model.named_modules():
        for pattern, how in plan.items():
            if fnmatch(name, pattern):
                keep_part(module, how, dist.get_rank(), count)
    return model.to(loaded.device)


def keep_part(module: Any, how: str, rank: int, count: int) -> None:
    """Splits a linear layer by outputs ("colwise") or by inputs ("rowwise"): then the outputs of
    all processes are added."""
    part = module.weight.chunk(count, 0 if how == "colwise" else 1)[rank]
    module.weight = nn.Parameter(part.contiguous(), requires_grad=False)
    if module.bias is not None and how == "colwise":
        module.bias = nn.Parameter(module.bias.chunk(count)[rank].clone(), requires_grad=False)
    if how == "rowwise":
        if module.bias is not None and rank:
            nn.init.zeros_(module.bias)
        module.register_forward_hook(lambda module, inputs, output: dist.all_reduce(output))


# --- peers ---------------------------------------------------------------------------------------


@contextmanager
def deepspeeds_errors(engine: str) -> Iterator[None]:
    """Turns DeepSpeed's errors into a line. It raises any type for what it can't do here: a model,
    kernels without their compiler."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, WorkshopError):
        raise
    except Exception as error:
        if engine != "deepspeed":
            raise
        version = sys.modules["deepspeed"].__version__
        raise NotOnThisMachine(
            f"DeepSpeed {version} can't do this here: {type(error).__name__}: {line(error)}"
        ) from error


def _deepspeed_model(arguments: argparse.Namespace, loaded: Loaded, longest: int) -> Any:
    import deepspeed

    # On a CPU DeepSpeed sums over processes in shared memory, which it sets up only if this
    # variable is there: its launcher gives it, torchrun does not, and without it the first sum is
    # a SIGSEGV.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    print("DeepSpeed prepares the model; the first time it compiles for minutes ...", flush=True)
    model = _model_again(arguments, loaded)
    before = dict(model.named_buffers())
    made = deepspeed.init_inference(
        model,
        dtype=loaded.dtype,
        tensor_parallel={"tp_size": processes()},
        replace_with_kernel_inject=arguments.kernel_inject,
        max_out_tokens=longest,
    ).module
    # It rounds all of the model to bf16, the rotary frequencies too: then positions are wrong.
    for name, buffer in made.named_buffers():
        if name in before and before[name].dtype != buffer.dtype:
            buffer.data = before[name].to(buffer.device)
    return made


class VLLM:
    """vLLM's engine, a step of all texts at a time. Drawn tokens follow its own generator. It needs
    an exact version of PyTorch, and so a separate environment."""

    compiled = False  # here; vLLM compiles and captures when it starts, and in its own way

    def __init__(self, arguments: argparse.Namespace, loaded: Loaded, longest: int) -> None:
        # With the engine in this process a step ends when its tokens are here.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self._ends, self._pad = loaded.ends, loaded.pad
        self._engine = LLM(
            str(arguments.model_path),
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_model_len=longest,
            gpu_memory_utilization=VLLM_MEMORY,
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
        moments = [time.perf_counter()]
        for i, row in enumerate(rows):
            how = SamplingParams(
                temperature=temperature,
                seed=seed + i,
                max_tokens=new_tokens,
                stop_token_ids=self._ends,
                detokenize=False,
            )
            self._engine.add_request(str(i), {"prompt_token_ids": row}, how)
        found: list[list[int]] = [[] for _ in rows]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
            if all(len(new) >= len(moments) or {*new[-1:]} & {*self._ends} for new in found):
                moments.append(time.perf_counter())
                if on_tokens is not None:
                    on_tokens(torch.tensor([new[-1] for new in found]))
        longest = max(map(len, found))
        padded = [new + [self._pad] * (longest - len(new)) for new in found]
        first, *rest = (b - a for a, b in itertools.pairwise(moments))
        return Answer(torch.tensor(padded), first, rest)
