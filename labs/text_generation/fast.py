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

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.text_generation import plain_ops
from labs.text_generation.engines import Answer, OnTokens, draw, uniforms
from labs.text_generation.plain_ops import Weight
from workshop import results
from workshop.errors import WorkshopError, require
from workshop.run.timing import StepClock

SLOTS = 256
"""The cache's size is a multiple of it: a new size is captured anew."""

ROPE_NUMBERS = {
    "default": ("rope_theta",),
    "llama3": (
        *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}
"""The kinds of rope that the loop knows, and the parameters that each needs."""

CHECK_EVERY = 16
"""Tokens between two looks at whether all rows have ended; each look waits for the device."""


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: Weight
    out: Weight
    post_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama, read from its config.json."""

    vocab: int
    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    rope: dict[str, Any]
    eos: tuple[int, ...]
    pad: int


# --- The model and its loop -----------------------------------------------------------------------


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
        shape = (batch, 2, config.kv_heads, slots, config.head_dim)  # keys, values
        self.caches = [model.zeros(shape) for _ in range(config.layers)]
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

    def serves(self, batch: int, needed: int, sampled: bool) -> bool:
        """Whether it is of this batch, and its cache is large enough."""
        have, slots = self.tokens.shape
        return have == batch and (self.draws is not None) == sampled and needed <= slots

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
    one tensor at a time, straight into the fused ones on the device.

    Args:
        kernels: whether Triton's kernels are used. By default they are on a GPU.
        captured: whether a step is a graph. By default it is on a GPU.

    Raises:
        NotOnThisMachine: the kernels are wanted, and Triton is missing.
        WorkshopError: the folder holds no Llama, or one with parts that this loop does not have, or
            a weight is missing or has another shape than config.json says.
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
        self.config = config = read_config(folder)
        self.dtype, self.device, read = dtype, torch.device(device), Checkpoint(folder).read
        on_gpu = self.device.type == "cuda"
        self.ops: ModuleType = plain_ops
        if on_gpu if kernels is None else kernels:
            require("triton")
            from labs.text_generation import triton_ops

            self.ops = triton_ops
        self.captured = on_gpu if captured is None else captured
        self._session: Session | None = None
        self.frequencies = rope_frequencies(config).to(self.device)
        width, ffn = config.width, config.ffn
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def vector(name: str) -> Tensor:
            return read(name, (width,)).to(self.device, dtype)

        def fused(columns: int, prefix: str, **parts: int) -> Weight:
            rows = sum(parts.values())
            values = self.zeros((rows, columns), torch.uint8 if int8 else dtype)
            scale = self.zeros((rows, 1), torch.float32) if int8 else None
            first = 0
            for name, count in parts.items():
                piece = read(f"{prefix}{name}.weight", (count, columns)).to(self.device)
                here = slice(first, first + count)
                if scale is None:
                    values[here] = piece
                else:
                    values[here], scale[here] = quantised(piece)
                first += count
            return Weight(values, None if scale is None else scale[:, 0])

        self.layers = []
        for index in range(config.layers):
            layer = f"model.layers.{index}."
            attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
            self.layers.append(
                Layer(
                    vector(f"{layer}input_layernorm.weight"),
                    fused(width, attention, q_proj=q_rows, k_proj=kv_rows, v_proj=kv_rows),
                    fused(q_rows, attention, o_proj=width),
                    vector(f"{layer}post_attention_layernorm.weight"),
                    fused(width, mlp, gate_proj=ffn, up_proj=ffn),
                    fused(ffn, mlp, down_proj=width),
                )
            )
        self.norm = vector("model.norm.weight")
        name = "model.embed_tokens"
        self.embedding = read(f"{name}.weight", (config.vocab, width)).to(self.device, dtype)
        if config.tied and not int8:
            self.head = Weight(self.embedding)
        else:  # of an int8 model a step reads one row of the embedding, and the whole head
            prefix, _, last = (name if config.tied else "lm_head").rpartition(".")
            self.head = fused(width, f"{prefix}." if prefix else "", **{last: config.vocab})

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
        ops, eps = self.ops, self.config.eps
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
        the likeliest one, or one drawn by `draws`."""
        s, ops = session, self.ops
        logits: Tensor = ops.project(x, self.norm, self.head, self.config.eps)
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
        if self._session is None or not self._session.serves(batch, needed, sampled):
            self._session = None  # its memory is free for the next
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
            temperature: 0 takes the likeliest token.
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
        ends = torch.isin(new, torch.tensor(self.config.eos, device=new.device, dtype=new.dtype))
        ended = ends.cumsum(1) - ends.long() > 0
        return new.masked_fill(ended, self.config.pad), bool(ends.any(1).all())


# --- From the folder ------------------------------------------------------------------------------


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values with 128 added, and the fp32 scale (rows, 1) that gives a row's largest weight
    127."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scale).round().add(128).to(torch.uint8), scale


def rope_frequencies(config: Config) -> Tensor:
    """Turns of each pair of a head's dimensions in one position (D / 2,), in radians, fp32."""
    rope, exponents = config.rope, torch.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "default":
        return frequencies
    # llama3: waves longer than the old context are stretched by `factor`, short ones are kept, and
    # those between are mixed.
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves_in_context = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope["factor"])


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rope's parameters in a config.json, completed as Hugging Face does. Older files have
    rope_theta beside rope_scaling, and its kind under "type"."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    length = "original_max_position_embeddings"
    rope.setdefault(length, raw.get("max_position_embeddings", 2048))
    return rope | {length: raw.get(length, rope[length])}


def read_config(folder: Path) -> Config:
    """Raises WorkshopError for a model with parts that this loop does not have."""
    raw = results.read_json(folder / "config.json")
    rope = read_rope(raw)
    for part, found, known in (
        ("model_type", raw.get("model_type"), ("llama",)),
        ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope["rope_type"], tuple(ROPE_NUMBERS)),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1), (1,)),
        ("attention_bias", raw.get("attention_bias", False), (False,)),
        ("mlp_bias", raw.get("mlp_bias", False), (False,)),
        ("quantization_config", raw.get("quantization_config"), (None,)),
    ):
        if found not in known:
            raise WorkshopError(
                f"{folder / 'config.json'}: {part} {found!r}: the fast engine knows only "
                f"{' and '.join(map(repr, known))}; take --engine hf or static"
            )
    for name in ROPE_NUMBERS[rope["rope_type"]]:
        if not isinstance(rope.get(name), (int, float)):
            raise WorkshopError(
                f"{folder / 'config.json'}: the {rope['rope_type']} rope's {name} is "
                f"{rope.get(name)!r}: expected a number"
            )
    path = folder / "generation_config.json"
    ends = {**raw, **(results.read_json(path) if path.exists() else {})}
    eos = ends.get("eos_token_id")
    eos = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    pad = ends.get("pad_token_id")
    try:
        heads, width = raw["num_attention_heads"], raw["hidden_size"]
        return Config(
            vocab=raw["vocab_size"],
            width=width,
            ffn=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or width // heads,
            eps=raw.get("rms_norm_eps", 1e-6),
            tied=raw.get("tie_word_embeddings", False),
            rope=rope,
            eos=eos,
            pad=pad if pad is not None else (*eos, 0)[0],
        )
    except KeyError as error:
        raise WorkshopError(f"{folder / 'config.json'} has no {error.args[0]}") from None


class Checkpoint:
    """The safetensors files of a folder, one or several with an index."""

    def __init__(self, folder: Path) -> None:
        require("safetensors")
        import safetensors

        self.folder = folder
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.exists():
            names = set(results.read_json(index).get("weight_map", {}).values())
        self.files: dict[str, Any] = {}
        for name in sorted(names):
            try:
                opened = safetensors.safe_open(folder / name, framework="pt")
            except FileNotFoundError:
                raise WorkshopError(
                    f"{folder / name} is missing: the model's weights are not complete; copy the "
                    "folder again"
                ) from None
            except (OSError, safetensors.SafetensorError) as error:
                raise WorkshopError(f"{folder / name} can't be read: {error}") from None
            self.files |= dict.fromkeys(opened.keys(), opened)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises WorkshopError where the tensor is missing or has another shape."""
        if name not in self.files:
            raise WorkshopError(
                f"{self.folder}: {name} is in no safetensors file: the model's weights are not "
                "complete; copy the folder again"
            )
        found = tuple(self.files[name].get_slice(name).get_shape())
        if found != shape:
            raise WorkshopError(
                f"{self.folder}: {name} is {found}, by config.json {shape}: they belong to "
                "different models"
            )
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor
