"""Llama-family weights at the memory's speed: our own decode loop, in one file.

A token at batch 1 reads every weight once and computes next to nothing with it, so its time is the
weights' bytes over the memory's bandwidth, plus what the program wastes. Against the waste:

- the key/value cache has a fixed size, the position is a tensor on the device, and the next token
  is chosen there too: a step never waits for the host, and the same step serves every token;
- on a GPU a layer is five kernels, or seven for a batch, and the step is captured in one CUDA
  graph: a token is one replay;
- q, k and v are one product, gate and up another;
- int8 weights with a scale for each output row halve the bytes; they become numbers of the
  activations' type inside the product.

What a layer is made of is in plain_ops.py, in plain PyTorch, and for a GPU in triton_ops.py. The
letters of shapes are in plain_ops.py.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.text_generation import plain_ops
from labs.text_generation.engines import Answer, OnTokens, draw, uniforms
from labs.text_generation.plain_ops import Weight, quantised
from workshop.errors import WorkshopError, require
from workshop.run.timing import StepClock

SLOTS = 256
"""The cache's size is a multiple of it: a new size is captured anew."""

ROPES = ("default", "llama3")
"""The kinds of rope that the loop knows: Hugging Face computes their frequencies."""

UNKNOWN = "{} {!r}: the fast engine knows only {}; take --engine hf or static"

CHECK_EVERY = 16
"""Tokens between two looks at whether all rows have ended; each look waits for the device."""


def check(config: Any, rope: Any) -> None:
    """Raises WorkshopError for a model with parts that this loop does not have.

    Args:
        rope: Hugging Face's LlamaRotaryEmbedding.
    """
    for part, found, known in (
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope.rope_type, ROPES),
        ("rotated dimensions of a head", 2 * len(rope.inv_freq), (config.head_dim,)),
        ("attention_bias", config.attention_bias, (False,)),
        ("mlp_bias", config.mlp_bias, (False,)),
        ("quantization_config", getattr(config, "quantization_config", None), (None,)),
    ):
        if found not in known:
            raise WorkshopError(UNKNOWN.format(part, found, " and ".join(map(repr, known))))


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: Weight
    out: Weight
    post_norm: Tensor
    gate_up: Weight
    down: Weight


def padding_mask(pads: Tensor, length: int) -> Tensor:
    """The tokens that each token of the prompts may see (B, 1, T, T). A padding token sees itself:
    a row that sees nothing would be NaN."""
    places = torch.arange(length, device=pads.device)
    real = (places >= pads[:, None])[:, None, None]
    return (real | torch.eye(length, dtype=torch.bool, device=pads.device)).tril()


def attend_prompts(q: Tensor, cache: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of the prompts' queries (B, H, T, D) to their slots of the cache (B, 2, K, T, D);
    (B x T, H x D). Without a mask it is causal, which the flash kernels need; with one the fused
    kernels need a key for each query."""
    keys, values = cache.unbind(1)
    if mask is not None:
        group = q.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    mixed = F.scaled_dot_product_attention(
        q, keys, values, mask, is_causal=mask is None, enable_gqa=mask is None
    )
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


class Session:
    """The tensors that a step reads and writes, at fixed addresses, for one batch size and one
    cache size."""

    def __init__(self, model: "FastLlama", batch: int, slots: int, sampled: bool) -> None:
        config, device = model.config, model.device
        shape = (batch, 2, config.num_key_value_heads, slots, config.head_dim)  # keys, values
        self.caches = [model.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.tokens = model.zeros((batch, slots), torch.int64)
        self.newest = model.zeros((batch,), torch.int64)  # token
        self.slot = model.zeros((1,), torch.int64)  # of it
        self.pads = model.zeros((batch,), torch.int64)
        self.draws = model.zeros((batch, slots), torch.float64) if sampled else None
        self.temperature = torch.ones(1, device=device)
        self.step: Callable[[], object] = lambda: model.decode(self)
        if model.captured:
            self.step = self._captured()

    def _captured(self) -> Callable[[], object]:
        """The step as one graph, after one step in which kernels are compiled."""
        stream = torch.cuda.Stream(self.slot.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step()
        return graph.replay

    def begin(self, ids: Tensor, pads: Tensor, temperature: float, seed: int) -> None:
        length = ids.shape[1]
        self.tokens[:, :length] = ids
        self.slot.fill_(length - 1)
        self.pads.copy_(pads)
        self.temperature.fill_(temperature)
        if self.draws is not None:
            new = self.draws[:, length:]
            new.copy_(uniforms(len(new), new.shape[1], seed))


class FastLlama:
    """A Llama for generation, from a folder that Hugging Face's `save_pretrained` wrote. It is read
    to the CPU, and its tensors are joined on the device.

    Args:
        kernels: whether Triton's kernels are used. By default they are on a GPU.
        captured: whether a step is a graph. By default it is on a GPU.

    Raises:
        NotOnThisMachine: the kernels are wanted, and Triton is missing.
        WorkshopError: the folder holds no Llama, or one with parts that this loop does not have.
    """

    compiled = False  # by torch.compile

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        int8: bool = False,
        kernels: bool | None = None,
        captured: bool | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

        theirs = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype="auto", local_files_only=True
        )
        if not isinstance(theirs, LlamaForCausalLM):
            raise WorkshopError(UNKNOWN.format("model_type", theirs.config.model_type, "'llama'"))
        config: Any = theirs.config
        self.config = config
        rope = LlamaRotaryEmbedding(config)
        check(config, rope)
        eos = theirs.generation_config.eos_token_id
        self.eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        pad = theirs.generation_config.pad_token_id
        self.pad = pad if pad is not None else (*self.eos, 0)[0]
        self.dtype, self.device, read = dtype, torch.device(device), theirs.state_dict()
        on_gpu = self.device.type == "cuda"
        self.ops: ModuleType = plain_ops
        if on_gpu if kernels is None else kernels:
            require("triton")
            from labs.text_generation import triton_ops

            self.ops = triton_ops
        self.captured = on_gpu if captured is None else captured
        self._session: Session | None = None
        self.frequencies = rope.inv_freq.to(self.device)

        def vector(name: str) -> Tensor:
            return read[f"{name}.weight"].to(self.device, dtype)

        def fused(*names: str) -> Weight:
            whole = torch.cat([read[f"{name}.weight"].to(self.device) for name in names])
            return quantised(whole) if int8 else Weight(whole.to(dtype))

        self.layers = []
        for index in range(config.num_hidden_layers):
            layer = f"model.layers.{index}."
            attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
            self.layers.append(
                Layer(
                    vector(f"{layer}input_layernorm"),
                    fused(*(f"{attention}{part}_proj" for part in "qkv")),
                    fused(f"{attention}o_proj"),
                    vector(f"{layer}post_attention_layernorm"),
                    fused(f"{mlp}gate_proj", f"{mlp}up_proj"),
                    fused(f"{mlp}down_proj"),
                )
            )
        self.norm, self.embedding = vector("model.norm"), vector("model.embed_tokens")
        # A step of an int8 model reads one row of the embedding, and the whole head.
        shared = config.tie_word_embeddings and not int8
        self.head = Weight(self.embedding) if shared else fused("lm_head")

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""
        weights = [self.norm, *self.head]
        for layer in self.layers:
            weights += [layer.input_norm, layer.post_norm]
            weights += [*layer.qkv, *layer.out, *layer.gate_up, *layer.down]
        return sum(weight.nbytes for weight in weights if weight is not None)

    def _pass(self, x: Tensor, attend: Callable[[Tensor, Tensor], Tensor], s: Session) -> Tensor:
        """All layers, on rows x (M, C)."""
        ops, eps = self.ops, self.config.rms_norm_eps
        for layer, cache in zip(self.layers, s.caches, strict=True):
            qkv = ops.project(x, layer.input_norm, layer.qkv, eps)
            x = ops.add_product(x, attend(qkv, cache), layer.out)
            x = ops.add_product(x, ops.swiglu(x, layer.post_norm, layer.gate_up, eps), layer.down)
        return x

    @torch.no_grad()
    def decode(self, session: Session) -> Tensor:
        """One step: reads the newest token, writes the next one; its logits (B, V). Nothing in it
        depends on the host."""
        s, attention = session, self.ops.decode_attention
        x = F.embedding(s.newest, self.embedding)
        x = self._pass(
            x, lambda qkv, cache: attention(qkv, cache, s.slot, s.pads, self.frequencies), s
        )
        return self._next(s, x)

    @torch.no_grad()
    def prefill(self, session: Session, padded: bool) -> Tensor:
        """The prompts in `session.tokens` up to `session.slot`: fills the cache, writes the first
        new token; its logits (B, V)."""
        s, ops = session, self.ops
        ids = s.tokens[:, : int(s.slot) + 1]
        batch, length = ids.shape
        mask = padding_mask(s.pads, length) if padded else None

        def attend(qkv: Tensor, cache: Tensor) -> Tensor:
            q = ops.store_prompts(qkv, cache, s.pads, self.frequencies)
            return attend_prompts(q, cache[:, :, :, :length], mask)

        x = self._pass(self.embedding[ids.flatten()], attend, s)
        return self._next(s, x.view(batch, length, -1)[:, -1].contiguous())

    def _next(self, session: Session, x: Tensor) -> Tensor:
        """From the last rows (B, C): writes the next token behind `slot`, which then is its slot;
        the most likely one, or one drawn by `draws`."""
        s, ops = session, self.ops
        logits: Tensor = ops.project(x, self.norm, self.head, self.config.rms_norm_eps)
        s.slot.add_(1)
        if s.draws is None:
            token = ops.likeliest(logits)
        else:
            token = draw(logits, s.temperature, s.draws.index_select(1, s.slot)[:, 0])[:, None]
        s.tokens.index_copy_(1, s.slot, token)
        s.newest.copy_(token[:, 0])
        return logits

    def session(self, batch: int, needed: int, sampled: bool) -> Session:
        """A session with that many slots or more: the last one where it serves, else a new one."""
        if (last := self._session) is not None:
            rows, slots = last.tokens.shape
            if (rows, last.draws is not None) == (batch, sampled) and needed <= slots:
                return last
        self._session = last = None  # its memory is free for the next
        slots = -(-needed // SLOTS) * SLOTS
        self._session = Session(self, batch, slots, sampled)
        return self._session

    def generate(
        self,
        ids: Tensor,
        mask: Tensor,
        new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        """Continues prompts. A new batch or cache size is captured before the clock starts.

        Args:
            ids, mask: tokens and 1 or 0 (B, T), padded on the left.
            temperature: 0 takes the most likely token.
            seed: of the first row's draws; row i has `seed + i`.
            on_tokens: called with the tokens (B,) of each step as they come, on the CPU; the host
                then waits for every one, which costs time.
        """
        batch, length = ids.shape
        session = self.session(batch, length + new_tokens, temperature > 0)
        pads = length - mask.sum(1)
        clock = StepClock(self.device)
        clock.mark()
        session.begin(ids, pads, temperature or 1.0, seed)
        self.prefill(session, padded=bool(pads.any()))
        clock.mark()
        new = session.tokens[:, length : length + new_tokens]
        for count in range(1, new_tokens + 1):
            if on_tokens is not None:
                on_tokens(self._until_end(new[:, :count])[0][:, -1].cpu())
            if count == new_tokens:
                break
            if (on_tokens or count % CHECK_EVERY == 0) and self._until_end(new[:, :count])[1]:
                break
            session.step()
            clock.mark()
        times = [ms / 1e3 for ms in clock.durations_ms()]
        return Answer(self._until_end(new)[0].cpu(), times[0], times[1:])

    def _until_end(self, new: Tensor) -> tuple[Tensor, bool]:
        """The new tokens with padding behind each row's end of sequence, and whether all ended.
        Waits for the device."""
        ends = torch.isin(new, torch.tensor(self.eos, device=new.device, dtype=new.dtype))
        ended = ends.cumsum(1) - ends.long() > 0
        return new.masked_fill(ended, self.pad), bool(ends.any(1).all())
