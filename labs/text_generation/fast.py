"""Llama-family weights at the memory's speed: our own decode loop, in plain PyTorch.

A token at batch 1 reads every weight once and computes next to nothing with it, so its time is the
weights' bytes over the memory's bandwidth, plus what the program wastes. Against the waste:

- the key/value cache has a fixed size, the position is a tensor on the device, and the next token
  is chosen there too: a step never waits for the host, and the same step serves every token;
- the step is compiled in a few regions and captured in one CUDA graph: a token is one replay;
- q, k and v are one product, gate and up another;
- int8 weights with a scale for each output row halve the bytes; they become numbers of the
  activations' type inside the product.

The regions are the functions under "What is compiled": a region's outputs are written to memory,
so where one ends is where a kernel must end. SwiGLU's product, for one, is an output: else the
compiler would compute it again for every row of the down projection.

B batch, T prompt, S slots of the cache, C width, D head size, H query heads, K key/value heads,
G = H / K, M = rows of activations: B x T in the prefill, B in a decode step.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.text_generation.engines import Answer, OnTokens, draw, uniforms
from workshop.errors import WorkshopError, require
from workshop.run.timing import StepClock

SLOTS = 256
"""The cache's size is a multiple of it: attention reads all slots, and a new size compiles anew."""

CHECK_EVERY = 16
"""Tokens between two looks at whether all rows have ended; each look waits for the device."""

# Coordinate descent tunes the kernels' tiles, and makes a product with one row a reduction, which
# fuses with what stands around it and reads int8 as int8. With more rows the product is a matrix
# product: the tuner chooses between cuBLAS and Triton's, and only Triton's can convert int8 as it
# reads. Beside cuBLAS a converted copy of the weight is written and read again, at every token.
DECODE = {"coordinate_descent_tuning": True, "max_autotune_gemm": True}

INT8_ROWS = 4
"""A compiled int8 product of up to so many rows is one reduction for each: they share one kernel
that reads the weight once. With more rows arithmetic takes longer than reading (counted from the
kernel's instructions, not measured)."""


class Weight(NamedTuple):
    """A matrix (out, in), or its int8 values and the fp32 scale of each row."""

    values: Tensor
    scale: Tensor | None = None

    def rows(self, first: int, last: int) -> "Weight":
        scale = None if self.scale is None else self.scale[first:last]
        return Weight(self.values[first:last], scale)


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


# --- What is compiled -----------------------------------------------------------------------------


def linear(x: Tensor, weight: Weight) -> Tensor:
    if weight.scale is None:
        return F.linear(x, weight.values)
    if 1 < x.shape[0] <= INT8_ROWS and torch.compiler.is_compiling():
        return torch.cat([linear(row, weight) for row in x.split(1)])
    return (F.linear(x, weight.values.to(x.dtype)) * weight.scale).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x (M, heads, D): the first half of a head is turned with the second."""
    x32 = x.float()
    first, second = x32.chunk(2, -1)
    return (x32 * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (M, 1, D) of positions (M,), in fp32."""
    turns = positions.float()[:, None] * frequencies
    turns = torch.cat((turns, turns), -1)[:, None]
    return turns.cos(), turns.sin()


def reduces(x: Tensor) -> bool:
    """Whether x is one row, whose products the compiler makes reductions: see DECODE."""
    return x.shape[0] == 1 and torch.compiler.is_compiling()


def project(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    if not reduces(x):
        return linear(rms_norm(x, norm, eps), weight)
    # Every output row sums x's squares beside its product, for free: the weights' bytes are what
    # takes time. So the norm is no kernel of its own.
    squares = x.float().pow(2).expand(weight.values.shape[0], -1)
    product = linear(x * norm, weight).float()
    return (product * torch.rsqrt(squares.mean(-1) + eps)).to(x.dtype)


def add_product(residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
    return residual + linear(x, weight)


def swiglu(x: Tensor, norm: Tensor, weight: Weight, eps: float) -> Tensor:
    if reduces(x):  # two reductions of one shape are one kernel, with the SiLU at its end
        half = weight.values.shape[0] // 2
        gate = project(x, norm, weight.rows(0, half), eps)
        up = project(x, norm, weight.rows(half, 2 * half), eps)
    else:
        gate, up = project(x, norm, weight, eps).chunk(2, -1)
    return F.silu(gate) * up


def split_heads(qkv: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (M, H, D), k and v (M, K, D), from their common product."""
    heads = qkv.unflatten(-1, (-1, head_dim))
    return heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)


def decode_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slot: Tensor, seen: Tensor
) -> Tensor:
    """Writes k and v of one token into their slot of the cache (B, 2, K, S, D) and attends to the
    slots that are `seen` (B, 1, 1, S); (B, H x D).

    Written as products and sums, which the compiler spreads over all slots and heads, with no copy
    of the keys for the G queries of each. It reads all slots, seen or not.
    """
    batch, _, kv_heads, _, head_dim = cache.shape
    q, k, v = split_heads(qkv, kv_heads, head_dim)
    cache.index_copy_(3, slot, torch.stack((rotate(k, cos, sin), v), 1)[:, :, :, None])
    keys, values = cache.unbind(1)
    q = rotate(q, cos, sin).view(batch, kv_heads, -1, 1, head_dim)
    scores = (q.float() * keys[:, :, None].float()).sum(-1) * head_dim**-0.5  # (B, K, G, S)
    weights = torch.where(seen, scores, -math.inf).softmax(-1)
    mixed = (weights[..., None] * values[:, :, None].float()).sum(-2)
    return mixed.to(qkv.dtype).view(batch, -1)


def prefill_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, mask: Tensor | None
) -> Tensor:
    """Writes k and v of the prompts into the cache's first slots; (B x T, H x D). Without a mask
    (B, 1, T, T) attention is causal, which the flash kernels need."""
    batch, _, kv_heads, _, head_dim = cache.shape
    q, k, v = split_heads(qkv, kv_heads, head_dim)
    q, k, v = (  # (B, heads, T, D)
        part.unflatten(0, (batch, -1)).transpose(1, 2)
        for part in (rotate(q, cos, sin), rotate(k, cos, sin), v)
    )
    cache[:, 0, :, : k.shape[2]] = k
    cache[:, 1, :, : k.shape[2]] = v
    group = q.shape[1] // kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return mixed.transpose(1, 2).reshape(qkv.shape[0], -1)


def begin_step(
    embedding: Tensor, tokens: Tensor, slot: Tensor, pads: Tensor, frequencies: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The embedded tokens of a slot (B, C), their angles, the slots that they may see."""
    x = embedding[tokens.index_select(1, slot)[:, 0]]
    cos, sin = angles(slot - pads, frequencies)
    slots = torch.arange(tokens.shape[1], device=slot.device)
    seen = (slots <= slot) & (slots >= pads[:, None])
    return x, cos, sin, seen[:, None, None]


def likeliest(logits: Tensor) -> Tensor:
    """(B, 1), in two steps: one block of threads takes long to read a vocabulary."""
    parts = logits.unflatten(-1, (math.gcd(logits.shape[-1], 256), -1))
    part = parts.amax(-1).argmax(-1, keepdim=True)
    return part * parts.shape[-1] + parts.argmax(-1).gather(-1, part)


def choose(
    logits: Tensor, tokens: Tensor, slot: Tensor, draws: Tensor | None, temperature: Tensor
) -> None:
    """Writes the next token behind `slot`, which then is its slot: the likeliest, or a drawn one
    by `draws` (B, S), uniform numbers made beforehand."""
    if draws is None:
        token = likeliest(logits)
    else:
        token = draw(logits, temperature, draws.index_select(1, slot + 1)[:, 0])[:, None]
    tokens.index_copy_(1, slot + 1, token)
    slot.add_(1)


def regions(compiled: bool, **how: Any) -> SimpleNamespace:
    """The functions above as a step calls them: as they are, or compiled."""
    parts = (project, add_product, swiglu, decode_attention, prefill_attention, begin_step, choose)
    if not compiled:
        return SimpleNamespace(**{part.__name__: part for part in parts})
    # A batch size and a cache size are an entry each, and prompts of any length one.
    torch._dynamo.config.cache_size_limit = 64
    return SimpleNamespace(
        **{part.__name__: torch.compile(part, fullgraph=True, **how) for part in parts}
    )


# --- The model and its loop -----------------------------------------------------------------------


class Session:
    """What a step reads and writes, at fixed addresses, for one batch size and one cache size."""

    def __init__(self, model: "FastLlama", batch: int, slots: int, sampled: bool) -> None:
        config, device = model.config, model.device
        shape = (batch, 2, config.kv_heads, slots, config.head_dim)  # keys, values
        self.caches = [model.zeros(shape) for _ in range(config.layers)]
        self.tokens = model.zeros((batch, slots), torch.int64)
        self.slot = model.zeros((1,), torch.int64)  # of the newest token
        self.pads = model.zeros((batch,), torch.int64)
        self.draws = model.zeros((batch, slots), torch.float64) if sampled else None
        self.temperature = torch.ones(1, device=device)
        self.step: Callable[[], object] = lambda: model.decode(self)
        if model.compiled:
            self.step()
            if device.type == "cuda":
                self.step = self._captured()

    def _captured(self) -> Callable[[], object]:
        """The step as one graph. Our own capture, for the compiler's leaves out what writes to its
        inputs, as a step does to its cache."""
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
        """Whether its cache is large enough and at most twice as large as needed: to read that much
        takes less time than to compile anew."""
        have, slots = self.tokens.shape
        same = have == batch and (self.draws is not None) == sampled
        return same and needed <= slots <= max(SLOTS, 2 * needed)

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
    """A Llama for generation. `compile=None` compiles and captures on a GPU, and does not on the
    CPU."""

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype,
        device: torch.device | str,
        read: Callable[[str, tuple[int, ...]], Tensor],
        *,
        int8: bool = False,
        compile: bool | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.compiled = self.device.type == "cuda" if compile is None else compile
        self._decode = regions(self.compiled, dynamic=False, options=self._options())
        self._prefill = regions(self.compiled)
        self._session: Session | None = None
        self.frequencies = rope_frequencies(config).to(self.device)
        width, ffn = config.width, config.ffn
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def vector(name: str) -> Tensor:
            return read(name, (width,)).to(self.device, dtype)

        def fused(columns: int, prefix: str, **parts: int) -> Weight:
            rows = sum(parts.values())
            values = self.zeros((rows, columns), torch.int8 if int8 else dtype)
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

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        dtype: torch.dtype,
        device: torch.device | str,
        int8: bool = False,
        compile: bool | None = None,
    ) -> "FastLlama":
        """Reads a folder that Hugging Face's `save_pretrained` wrote, one tensor at a time,
        straight into the fused ones on the device.

        Raises:
            WorkshopError: the folder holds no Llama, or one with parts that this loop does not
                have, or a weight is missing or has another shape than config.json says.
        """
        folder = Path(folder)
        config = read_config(folder)
        return cls(config, dtype, device, Checkpoint(folder).read, int8=int8, compile=compile)

    def _options(self) -> dict[str, Any]:
        return DECODE if self.device.type == "cuda" else {}

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""
        weights = [self.norm, *self.head]
        for layer in self.layers:
            weights += [layer.input_norm, layer.post_norm]
            weights += [*layer.qkv, *layer.out, *layer.gate_up, *layer.down]
        return sum(weight.nbytes for weight in weights if weight is not None)

    def _pass(self, run: SimpleNamespace, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """All layers, on rows x (M, C)."""
        eps = self.config.eps
        for index, layer in enumerate(self.layers):
            mixed = attend(index, run.project(x, layer.input_norm, layer.qkv, eps))
            x = run.add_product(x, mixed, layer.out)
            inner = run.swiglu(x, layer.post_norm, layer.gate_up, eps)
            x = run.add_product(x, inner, layer.down)
        return x

    @torch.no_grad()
    def decode(self, session: Session) -> Tensor:
        """One step: reads the token in `session.slot`, writes the next one; its logits (B, vocab).
        Nothing in it depends on the host."""
        s, run = session, self._decode
        x, *angle, seen = run.begin_step(self.embedding, s.tokens, s.slot, s.pads, self.frequencies)
        x = self._pass(
            run,
            x,
            lambda index, qkv: run.decode_attention(qkv, *angle, s.caches[index], s.slot, seen),
        )
        return self._next(s, x)

    @torch.no_grad()
    def prefill(self, session: Session, padded: bool) -> Tensor:
        """The prompts in `session.tokens` up to `session.slot`: fills the cache, writes the first
        new token; its logits (B, vocab)."""
        s, run = session, self._prefill
        ids = s.tokens[:, : int(s.slot) + 1]
        batch, length = ids.shape
        places = torch.arange(length, device=self.device)
        mask = None
        if padded:  # a padding token sees itself: a row that sees nothing would be NaN
            real = (places >= s.pads[:, None])[:, None, None]
            mask = (real | torch.eye(length, dtype=torch.bool, device=self.device)).tril()
        positions = (places - s.pads[:, None]).clamp(min=0)
        angle = angles(positions.flatten(), self.frequencies)
        x = self._pass(
            run,
            self.embedding[ids.flatten()],
            lambda index, qkv: run.prefill_attention(qkv, *angle, s.caches[index], mask),
        )
        return self._next(s, x.view(batch, length, -1)[:, -1].contiguous())

    def _next(self, session: Session, x: Tensor) -> Tensor:
        """From the last rows (B, C)."""
        s, run = session, self._decode
        logits: Tensor = run.project(x, self.norm, self.head, self.config.eps)
        run.choose(logits, s.tokens, s.slot, s.draws, s.temperature)
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
        """Continues prompts. What a new batch or cache size needs to compile is done before the
        clock starts.

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
    """int8 values and the fp32 scale (rows, 1) that gives a row's largest weight 127."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scale).round().to(torch.int8), scale


def rope_frequencies(config: Config) -> Tensor:
    """Turns of each pair of a head's dimensions in one position (D / 2,), in radians, fp32."""
    rope, exponents = config.rope, torch.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = 1.0 / rope.get("rope_theta", 10000.0) ** exponents
    if rope["rope_type"] == "default":
        return frequencies
    # llama3: waves longer than the old context are stretched by `factor`, short ones are kept, and
    # those between are mixed.
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves_in_context = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope["factor"])


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorkshopError(f"{path} is missing: name a folder with a model") from None
    except (OSError, ValueError) as error:
        raise WorkshopError(f"{path} can't be read: {error}") from None
    if not isinstance(found, dict):
        raise WorkshopError(f"{path} holds no object: name a folder with a model")
    return found


def read_config(folder: Path) -> Config:
    """Raises WorkshopError for a model with parts that this loop does not have."""
    raw = read_json(folder / "config.json")
    # Older files have rope_theta beside rope_scaling, and its kind under "type".
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    for part, found, known in (
        ("model_type", raw.get("model_type"), ("llama",)),
        ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope["rope_type"], ("default", "llama3")),
        ("attention_bias", raw.get("attention_bias", False), (False,)),
        ("mlp_bias", raw.get("mlp_bias", False), (False,)),
        ("quantization_config", raw.get("quantization_config"), (None,)),
    ):
        if found not in known:
            raise WorkshopError(
                f"{folder / 'config.json'}: {part} {found!r}: the fast engine knows only "
                f"{' and '.join(map(repr, known))}; take --engine hf or static"
            )
    path = folder / "generation_config.json"
    ends = {**raw, **(read_json(path) if path.exists() else {})}
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
            names = set(read_json(index).get("weight_map", {}).values())
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
