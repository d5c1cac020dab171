"""A model's answers to the gate: logits, loss, gradients and a short training run in one setting.

The same programme runs for V1 in higher precision (the reference), for V1 at the precision in use,
and for the candidate. gate/parity.py compares their outcomes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workshop import versions
from workshop.errors import WorkshopError
from workshop.gate.canonical import (
    build_baseline,
    canonical_gradients,
    canonical_state,
    canonical_weights,
    load_canonical,
)
from workshop.run import data, flops, startup, trainer
from workshop.run.precision import Precision, get_precision, kept_matmul_mode

Build = Callable[[Any], nn.Module]
ConfigureOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]

SMALL_PARAMETERS = 5_000_000
"""A model of up to this many parameters is checked in fp32 as it is: `tiny` is."""
CURVE_STEPS = 8
CURVE_LEARNING_RATE = 7e-4
"""No optimizer's default, so that one that forgets its rate shows."""
CURVE_WIDTH = 256
"""The hidden dimension up to which the training run has CURVE_LEARNING_RATE."""


@dataclass(frozen=True)
class Setting:
    """Model, arithmetic and shape for the reference, V1 and the candidate. A run that will be timed
    gives its own shape, so that its own kernels are the ones checked."""

    config: Any
    precision: Precision
    device: torch.device
    seed: int
    batch_size: int
    seq_len: int

    @property
    def in_fp32(self) -> bool:
        return self.precision.name == "fp32"

    @property
    def reference_dtype(self) -> torch.dtype:
        """fp64; fp32 on a GPU below fp32's precision, as many GPUs have no fp64 units."""
        coarse = self.device.type == "cuda" and not self.in_fp32
        return torch.float32 if coarse else torch.float64

    @property
    def reference_name(self) -> str:
        return f"V1 in {str(self.reference_dtype).removeprefix('torch.')}"

    @property
    def learning_rate(self) -> float:
        """The training run's rate: 7e-4, and beyond CURVE_WIDTH falling as the model grows wider.

        AdamW moves every weight by about the learning rate, so a sum over n weights moves by n
        times as much. A step that goes far amplifies roundings, and which of two correct versions
        then comes closer to the reference is luck. In tf32 on an H200, across 1024, loss curves
        were off, in units of what V1's logits explain: at 3.5e-4 up to 1.1 (V1) and 2.1 (V3),
        where 2 and the floor are allowed; at 1.75e-4 at most 0.4, as across 512. In proportion to
        1 / n, as muP has it (Yang et al., Tensor Programs V, 2022, table 3), a step of any width
        goes as far as one across 256, where logits explain the distance.
        """
        return CURVE_LEARNING_RATE * min(1.0, CURVE_WIDTH / self.config.hidden_dim)

    @functools.cached_property
    def random_weights(self) -> dict[str, Tensor]:
        """Weights that leave no part idle: scores and logits of size 1, norms away from 1.

        With V1's own initialisation attention is nearly uniform and every norm weight is 1, so a
        missing scale or a norm's forgotten weight would hardly show.
        """
        generator = torch.Generator(self.device).manual_seed(self.seed)
        state = {}
        for name, like in canonical_state(self.config, self.seed).items():
            if name == "lm_head.weight":  # tied
                continue
            state[name] = tensor = torch.empty_like(like, device=self.device)
            if tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        return state

    def far_weights(self) -> dict[str, Tensor]:
        """`random_weights`, changed so that a lower precision's roundings hide less in the logits.

        Logits go as far as a trained model's, for a cap; scores go further, for positions; the
        embedding is small, for the norms' epsilon; in a row of the other matrices one weight is
        large, so that 8 bits on one scale leave the others few steps. All are bf16 numbers, which
        no precision rounds.
        """
        generator = torch.Generator(self.device).manual_seed(self.seed + 2)
        factors = {"norm": 32.0, "q_proj": 2.0, "embed_tokens": 0.25}
        state = {}
        for name, weight in self.random_weights.items():
            layer = name.split(".")[-2]
            changed = weight * factors.get(layer, 1.0)
            if weight.dim() == 2 and layer not in ("q_proj", "k_proj"):
                shape, columns = (len(weight), 1), weight.shape[1]
                at = torch.randint(columns, shape, generator=generator, device=self.device)
                changed.scatter_(1, at, 12 * changed.std().expand(shape))
            state[name] = changed.bfloat16().float()
        return state

    def batches(self, count: int) -> Tensor:
        """Tokens and targets, (count, 2, B, T). The first half of each sequence of the first batch
        is text, which repeats a few tokens often and leaves most others out; all else are random
        orders of all tokens, which begin in the first batch with the lowest and the highest."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        batches = torch.empty(count, 2, self.batch_size, self.seq_len, dtype=torch.int64)
        half = (self.seq_len + 1) // 2
        in_order = torch.ones(count, self.batch_size, self.seq_len, dtype=torch.bool)
        in_order[0, :, :half] = False
        for kind in range(2):
            batches[:, kind][in_order] = self._orders(int(in_order.sum()), generator)
        batches[0, :, :, :half] = self._text(half)
        return batches.to(self.device)

    def _orders(self, length: int, generator: torch.Generator) -> Tensor:
        last = self.config.vocab_size - 1
        ends, orders = torch.tensor([0, last]).unique(), []
        for _ in range(0, length, last + 1):
            between = 1 + torch.randperm(max(last - 1, 0), generator=generator)
            orders += [ends, between]
        return torch.cat(orders)[:length]

    def _text(self, length: int) -> Tensor:
        """Windows of V1's own source, which every machine has: (1, 2, B, length)."""
        source = data.read_corpus(versions.get_version(versions.BASELINE).path)
        again = 1 + length // len(source.data)
        return data.text_batches(
            data.Corpus(source.name, source.data.repeat(again)),
            steps=1,
            batch_size=self.batch_size,
            seq_len=length,
            vocab_size=data.BYTE_VALUES,
            seed=self.seed,
        ).remainder(self.config.vocab_size)


def check_shape(setting: Setting) -> None:
    """Raises WorkshopError for a batch, a length or a seed that no training step has."""
    most = setting.config.max_seq_len
    for name, value, low, high in (
        ("batch_size", setting.batch_size, 1, 10**9),
        ("seq_len", setting.seq_len, 2, most),  # over one token, q and k have no gradient
        ("seed", setting.seed, 0, 2**63 - 1),
    ):
        if not low <= value <= high:
            raise WorkshopError(f"{name} {value}: it must lie between {low} and {high}")


@dataclass(frozen=True)
class Part:
    """One of the settings that the gate compares in."""

    setting: Setting
    where: str = ""
    """In words; empty for the setting that was asked for."""


def parts(setting: Setting) -> list[Part]:
    """The setting itself; before a lower precision also fp32, on few tokens and a small model,
    where what is small beside that precision's roundings shows."""
    if setting.in_fp32:
        return [Part(setting)]
    small = dataclasses.replace(
        setting,
        config=small_config(setting.config),
        precision=get_precision("fp32", setting.device),
        batch_size=min(setting.batch_size, 3),
        seq_len=min(setting.seq_len, 65),
    )
    tokens = f"{small.batch_size} x {small.seq_len} tokens"
    return [Part(small, f"fp32, hidden_dim {small.config.hidden_dim}, {tokens}"), Part(setting)]


def small_config(config: Any) -> Any:
    """A model of the same kind that is quick to check: as many layers, heads of the same size and
    of the same groups (up to 4 queries each), but few of them. A small one as it is."""
    if flops.parameter_count(config) <= SMALL_PARAMETERS:
        return config
    kv_heads = min(config.num_kv_heads, 3)
    heads = kv_heads * min(config.num_heads // config.num_kv_heads, 4)
    width = heads * config.head_dim
    return dataclasses.replace(
        config,
        vocab_size=min(config.vocab_size, 1000),
        hidden_dim=width,
        intermediate_dim=min(config.intermediate_dim, width),
        num_heads=heads,
        num_kv_heads=kv_heads,
    )


# --- the programme -------------------------------------------------------------------------------


@dataclass
class Outcome:
    """A model's results in a setting: the logits of its first batch with far weights; with random
    ones that batch's loss, and the gradients that the version's own training step gives to the
    optimizer, by V1's names; then a training run's losses.

    The comparison takes only norms and projections of `logits` and `directions`, and of each tensor
    of `gradients`, `updates` and `initial`: sketches by one linear map do as well.
    """

    logits: Tensor
    """(B, T, vocab), or their sketch."""
    loss: Tensor
    gradients: dict[str, Tensor | None]
    """Whole, or their sketches."""
    curve: Tensor
    moved: dict[str, float]
    """Relative change of each weight over the training run."""
    updates: dict[str, Tensor] = field(default_factory=dict)
    """In fp32 that change itself."""
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    """In fp32, of the reference alone: the weights that the training run begins with."""
    directions: dict[str, Tensor] = field(default_factory=dict)
    """Below fp32, of the reference alone: how the logits change with a number of the model."""
    float8_share: float = 1.0
    """The share of the layers' products that runs in fp8; 1 where that is not asked."""
    logits_shape: tuple[int, ...] = ()
    """The logits' own, where they are sketched."""

    def __post_init__(self) -> None:
        self.logits_shape = self.logits_shape or tuple(self.logits.shape)


def relative_rms(found: Tensor | None, true: Tensor | None) -> float:
    """|found - true| / |true| over all elements, in fp64; infinite where `found` is missing."""
    assert true is not None
    if found is None:
        return math.inf
    true = true.double()
    return float((found.double() - true).norm() / true.norm())


def run(
    model: nn.Module,
    setting: Setting,
    precision: Precision,
    configure_optimizer: ConfigureOptimizer,
    cuda_graph: bool = False,
    notify: trainer.Notify = lambda _: None,
) -> Outcome:
    """Runs the gate's programme for one model: logits, gradients, then a short training run."""
    batches = setting.batches(1 + CURVE_STEPS)
    precision.set_matmul_mode()
    precision.prepare(model)
    load_canonical(model, setting.random_weights)
    # Compiled first, as training will need it: the first compilation pays what all others share.
    notify("gradients")
    loss, gradients = loss_and_gradients(
        model, configure_optimizer(model, setting.learning_rate), precision, batches[:1]
    )
    notify("logits")
    with startup.not_counted():
        logits = _logits(model, precision, setting.far_weights(), batches[0, 0])

    load_canonical(model, canonical_state(setting.config, setting.seed))
    before = {name: weight.clone() for name, weight in canonical_weights(model).items()}
    optimizer = configure_optimizer(model, setting.learning_rate)
    notify("training")
    try:
        curve = trainer.train_losses(
            model, optimizer, batches[1:], precision, cuda_graph=cuda_graph, notify=notify
        )
    except trainer.NoGradient:
        curve = torch.full((CURVE_STEPS,), math.nan)
    after = canonical_weights(model)
    moved = {name: relative_rms(after[name], before[name]) for name in before}
    updates = {}
    if setting.in_fp32:
        updates = {name: (after[name] - before.pop(name)).float() for name in after}
    model.zero_grad(set_to_none=True)
    return Outcome(logits, loss, gradients, curve, moved, updates)


def loss_and_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision, batches: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of one training step, and the gradients that its optimizer gets."""
    found: dict[str, Tensor | None] = dict.fromkeys(canonical_gradients(model))

    def note(*_: object) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # fp16's, if the optimizer takes it away
        for name, gradient in canonical_gradients(model).items():
            found[name] = gradient if gradient is None or scale is None else gradient / scale

    optimizer.register_step_pre_hook(note)
    try:
        (loss,) = trainer.train_losses(model, optimizer, batches, precision)
    except trainer.NoGradient:
        loss = torch.tensor(math.nan)
    optimizer.zero_grad(set_to_none=True)  # those that are kept are not to be changed
    return loss, found


def _logits(
    model: nn.Module, precision: Precision, weights: Mapping[str, Tensor], tokens: Tensor
) -> Tensor:
    load_canonical(model, weights)
    with torch.no_grad(), precision.autocast(tokens.device.type):
        logits: Tensor = model(tokens)
    return logits.clone()


def references(
    setting: Setting, keep: Callable[[Outcome], Outcome] = lambda outcome: outcome
) -> tuple[Outcome, Outcome]:
    """V1's outcomes in this process: in higher precision, the reference, and at the setting's.

    Args:
        keep: makes what is kept of the one before the other is run.
    """
    exact = get_precision("fp32", setting.device)  # no autocast: the weights' own arithmetic
    optimizer = versions.load(versions.BASELINE).configure_optimizer
    with kept_matmul_mode():
        reference = run(_baseline(setting, setting.reference_dtype), setting, exact, optimizer)
        if setting.in_fp32:
            initial = canonical_state(setting.config, setting.seed)
            reference.initial = {name: one.to(setting.device) for name, one in initial.items()}
        else:
            reference.directions = _directions(setting, exact, reference.logits)
        reference = keep(reference)
        own = run(_baseline(setting, torch.float32), setting, setting.precision, optimizer)
    return reference, keep(own)


def _baseline(setting: Setting, dtype: torch.dtype) -> nn.Module:
    with torch.device(setting.device):  # so that its initialisation, unused here, is quick
        return build_baseline(setting.config).to(dtype)


def _directions(setting: Setting, exact: Precision, logits: Tensor) -> dict[str, Tensor]:
    """How V1's logits change where RoPE's base or the scores are 1% larger, or the norms' epsilon
    is a tenth of what it should be."""
    weights, tokens = setting.far_weights(), setting.batches(1 + CURVE_STEPS)[0, 0]
    larger = {name: weights[name] * 1.01 for name in weights if "q_proj" in name}
    config = setting.config
    changes: dict[str, tuple[dict[str, float], dict[str, Tensor]]] = {
        "rope_theta": ({"rope_theta": 1.01 * config.rope_theta}, weights),
        "norm_eps": ({"norm_eps": 0.1 * config.norm_eps}, weights),
        "scores": ({}, weights | larger),
    }
    found = {}
    for name, (numbers, changed) in changes.items():
        other = dataclasses.replace(setting, config=dataclasses.replace(config, **numbers))
        model = _baseline(other, setting.reference_dtype)
        found[name] = _logits(model, exact, changed, tokens) - logits
    return found
