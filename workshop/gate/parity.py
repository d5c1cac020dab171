"""The gate: does a version train the same model as V1?

Same weights in, same tokens in: the logits, the loss, every parameter's gradient, the loss curve
of a short training run and how far it moves each weight must be V1's. The truth is V1 in higher
precision. The tolerance calibrates itself: a version may be no further from the truth than a small
multiple of what V1 is at the same precision, since that is what the precision costs and anything
beyond it is the version's own doing.

Loss and gradients are those of the version's own training step. Half of their tokens are text,
which repeats a few of them often; together the gate's batches hold every token, as far as they have
room. Before tf32, bf16 or fp16, a small model of the same code passes the gate in fp32, eager and
on an odd shape: what is small beside a lower precision's roundings shows there. In fp32 the
movements of the weights are compared as vectors, too. In the lower precision itself, an error in
one direction is looked for along that direction, where roundings average out: along the true
gradients, the logits, and the changes that other numbers of the model would make to them.

What passes all the same:

- What is smaller than the tolerance. At bf16, where V1's logits and gradients are 1.2% to 2% off,
  twice that, for gradients 1.6% more; 1.6% of the gradients' common scale, 3.1% of one tensor's; 1%
  of how far training moves a tensor. If it happens under autocast alone: 0.7% of RoPE's base, 0.5%
  of the scores, 0.7% of the logits (a cap at 100), 20% of the norms' epsilon; feed-forward weights
  in int8 with a scale for every 8 (1.3 times V1's error, 2 are allowed; one scale a row costs 3.4);
  one score of the future (1.4 to 4.7 times). In fp32: twice V1's error in the logits, 1e-6; 2.4e-7
  beside that of gradients; a fifth of AdamW's decay, and 1e-4 of the movements.
- AMSGrad, which changes the movements by 4e-5 in 8 steps from the start, where V1's own error of
  1e-5 to 3e-5 allows 1.2e-4. After 200 steps of text it moves weights by 0.6% more or less, and the
  loss is 3e-4 off.
- What no value of the run reaches: a limit on logits or gradients beyond theirs, or on positions
  beyond the run's length. In the run itself its error is 0.
- What only happens at the run's own size, after step 8 or when compiled for bf16, if it is small
  beside bf16's roundings. The run itself is audited for that (workshop/gate/audit.py).
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workshop import results, versions
from workshop.errors import WorkshopError
from workshop.gate.canonical import (
    build_baseline,
    canonical_gradients,
    canonical_state,
    canonical_weights,
    differing_defaults,
    is_gradient,
    load_canonical,
)
from workshop.run import data, float8, flops, hardware, startup, trainer
from workshop.run.precision import LADDER, Precision, get_precision, kept_matmul_mode

Build = Callable[[Any], nn.Module]
ConfigureOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]

MULTIPLE = 2.0
"""How far from the truth a version may be, in units of V1's own distance at that precision.

Calibrated, not chosen: over 20 seeds, the true versions' worst tensor lies below 2 (see
tests/test_parity.py), and the smallest planted fault, a gradient scaled by 1.05, above 4.
"""

ROUNDING_UNITS = 4.0
"""Never less than this many roundings of one number: V1's own error can be 0 by luck."""

LOSS_FLOOR = 16 * 2.0**-24
"""The same for the loss, which is always summed and averaged in fp32: 16 roundings."""

MOVEMENT_FLOOR = 0.01
"""The same for how far training moves a weight, which roundings hardly change: in bf16 true
versions are up to 0.7% off, and an optimizer that is 5% too fast by 4.2% to 6.2%."""

MOVEMENT_FLOOR_FP32 = 0.005
"""True versions are up to 0.006% off there; without its decay AdamW moves a norm 1.2% too far."""

UPDATE_FLOOR = 5e-3
"""The same in fp32 for the change of a weight by training, as a vector. An element whose gradient
is near 0 takes its first step's sign from roundings, which costs a tensor up to 2e-3."""

DIRECTION_FLOOR = 1e-4
"""The same for the median tensor, which has no such element: true versions are up to 3e-5 off,
moments rounded to bf16 1.4e-3, the second moment alone 6e-4."""

DECAY_FLOOR = 1e-4
"""The same along the initial weights: true versions are up to 2e-5 off, without decay 5e-4."""

ALONG = 1 / 8
"""The share of V1's error in the logits that may lie in a given direction: four standard
deviations, if it is spread over 1,024 numbers, as sketches have. Few tokens spread it less."""

MOVEMENT_NOISE_FP8 = 0.6
"""Added at fp8, over the square root of a tensor's elements, of which each is driven off by luck.
On three models, over 4 to 20 seeds, V2's and V4's norms and matrices of 64 to 260,000 elements are
off by 0.14 such units (RMS), 0.62 at most; the embedding, which V1 too has further off, by 0.01
beyond V1. Matrices of an optimizer that is 5% too fast are off by 4.2% to 5.8%, which shows in all
from 2,048 elements on."""

SCALE_ROUNDINGS = 8.0
"""The same for how much too long a gradient is along the true one; ROUNDING_UNITS for the mean of
all. Most roundings average out: at bf16 true versions are within 2 and 1. Those of Triton's
interpreter, which cuts bf16 where it should round, do not: V3 there is up to 6 and 3 off."""

SCALE_MULTIPLE_FP8 = 3.0
"""MULTIPLE for the scale of one gradient at fp8, where V1's own is a matter of luck: on an H200 at
small, with 2 to 4 seeds of each recipe, V2, V3 and V4 are up to 0.093 off where V1 is 0.036
(experiments/prototypes_h200/gate_fp8.jsonl). One layer's that is 1.2 times as long is
0.17 to 0.19 off and red, where 0.09 to 0.12 is allowed; 1.1 times as long it passes."""

SMALL_PARAMETERS = 5_000_000
"""Up to which a model is checked in fp32 as it is, before a lower precision: `tiny` is."""

CURVE_STEPS = 8
CURVE_LEARNING_RATE = 7e-4
"""No optimizer's default: one that forgets its rate shows."""
CURVE_WIDTH = 256
"""The hidden dimension up to which the training run has CURVE_LEARNING_RATE."""


@dataclass(frozen=True)
class Measure:
    """One quantity's relative RMS distance from the truth."""

    error: float
    allowed: float
    baseline: float
    """V1's own error at this precision."""

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN


@dataclass
class ParityReport:
    """The gate's findings. `failures` are sentences; there are none if `passed`."""

    precision: str
    device: str
    seed: int
    batch_size: int
    seq_len: int
    reference: str
    measures: dict[str, Measure] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    tensors_total: int = 0
    tensors_with_grad: int = 0

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def worst(self) -> tuple[str, Measure]:
        """The quantity that comes closest to its limit, or is furthest beyond it."""
        return max(self.measures.items(), key=lambda item: badness(item[1]))

    def summary(self) -> str:
        """One line: the verdict and the figures behind it."""
        verdict = "pass" if self.passed else f"FAIL, {len(self.failures)} reasons"
        line = f"{verdict}: gradients {self.tensors_with_grad}/{self.tensors_total}"
        if self.measures:
            name, measure = self.worst
            line += f"; worst {name}, error {measure.error:.1e} of {measure.allowed:.1e} allowed"
        return line

    def record(self) -> results.Parity:
        """The part that a result file keeps: the verdict and, of the measures, the telling ones."""
        worst = [self.worst[0]] if self.measures else []
        measures: dict[str, dict[str, float | str | None]] = {}
        for name in ["logits", "loss", "loss curve", "scale of all gradients", *worst]:
            if name in self.measures:
                measures[name] = as_recorded(self.measures[name])
        return results.Parity(
            status="pass" if self.passed else "fail",
            failures=self.failures,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            reference=self.reference,
            measures=measures,
        )


def as_recorded(measure: Measure) -> dict[str, float | str | None]:
    """As a result file keeps it, with null for what is no number."""
    names = ("error", "allowed", "baseline")
    return dict(zip(names, results.finite([getattr(measure, n) for n in names]), strict=True))


def badness(measure: Measure) -> float:
    """The error as a share of what is allowed; infinite where it is no number."""
    return math.inf if math.isnan(measure.error) else measure.error / measure.allowed


# --- the check -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The model, arithmetic and shape that V1, the truth and the candidate are all run on. A run
    that is to be timed gives its own shape, so that its own kernels are the ones checked."""

    config: Any
    precision: Precision
    device: torch.device
    seed: int
    batch_size: int
    seq_len: int

    @property
    def learning_rate(self) -> float:
        """The training run's rate: 7e-4, and beyond CURVE_WIDTH falling as the model grows wider.

        AdamW moves every weight by about the learning rate, so a sum over n weights moves by n
        times as much. A step that goes far amplifies roundings, and which of two true versions
        then comes closer to the truth is luck. In tf32 on an H200, across 1024, loss curves were
        from the truth, in units of what V1's logits explain: at 3.5e-4 up to 1.1 (V1) and 2.1 (V3),
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


@dataclass
class Outcome:
    """A model's results in a setting: the logits of its first batch with far weights; with random
    ones that batch's loss, and the gradients that the version's own training step gives to the
    optimizer, by V1's names; then a training run's losses.

    `compare` takes only norms and projections of `logits` and `directions`, and of each tensor of
    `gradients`, and of `updates` and `initial`: sketches by one linear map do as well.
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
    """In fp32, of the truth alone: the weights that the training run begins with."""
    directions: dict[str, Tensor] = field(default_factory=dict)
    """Below fp32, of the truth alone: how the logits change with a number of the model."""
    float8_share: float = 1.0
    """The share of the layers' products that runs in fp8; 1 where that is not asked."""
    logits_shape: tuple[int, ...] = ()
    """The logits' own, where they are sketched."""

    def __post_init__(self) -> None:
        self.logits_shape = self.logits_shape or tuple(self.logits.shape)


@dataclass
class Runs:
    """The results of V1 in higher precision, of V1 and of the version."""

    truth: Outcome
    baseline: Outcome
    candidate: Outcome


def check(
    build: Build,
    config: Any,
    *,
    precision: str = "fp32",
    device: str | torch.device = "cpu",
    seed: int = 0,
    batch_size: int = 3,
    seq_len: int | None = None,
    configure_optimizer: ConfigureOptimizer | None = None,
    cuda_graph: bool = False,
) -> ParityReport:
    """Runs the gate on any model.

    Args:
        build: makes the model from a config; a compiled one is checked as compiled.
        config: a version's `TinyLlamaConfig`, whose defaults must be V1's.
        precision: of precision.LADDER, for the candidate and for V1's calibration.
        batch_size, seq_len: the shape it is run on. The default is an odd one, (3, at most 65),
            on which kernels that assume multiples of their tile go wrong.
        configure_optimizer: the version's own, for the training run; V1's if none is given.
        cuda_graph: whether the training run is captured and replayed.

    Raises:
        WorkshopError: unknown precision or device; a shape or seed that no training step has.
    """
    torch_device = hardware.get_device(device) if isinstance(device, str) else device
    setting = Setting(
        config=config,
        precision=get_precision(precision, torch_device, LADDER),
        device=torch_device,
        seed=seed,
        batch_size=batch_size,
        seq_len=min(config.max_seq_len, 65) if seq_len is None else seq_len,
    )
    check_shape(setting)
    with torch.device(setting.device):  # so that large models are initialised where it is quick
        model = build(setting.config).to(setting.device)
    return check_model(model, setting, configure_optimizer, cuda_graph=cuda_graph, build=build)


def check_model(
    model: nn.Module,
    setting: Setting,
    configure_optimizer: ConfigureOptimizer | None = None,
    *,
    cuda_graph: bool = False,
    build: Build | None = None,
    notify: trainer.Notify = lambda _: None,
) -> ParityReport:
    """`check` for a model that exists already; it is left with other weights.

    Args:
        build: makes the small model that is checked in fp32 first, if the setting asks for less;
            without it that is left out.
        notify: called with what the model does next, in a few words: interpreted or
            compiled, it may take long.
    """
    optimizer = configure_optimizer or versions.load(versions.BASELINE).configure_optimizer
    report = new_report(setting)
    for part in parts(setting):
        if part.where and build is None:
            continue
        found = answer(part, model, build, optimizer, cuda_graph=cuda_graph, notify=notify)
        add(report, part, found, *references(part.setting))
        if not report.passed:
            break
    return report


@dataclass(frozen=True)
class Part:
    """One of the settings that the gate compares in."""

    setting: Setting
    where: str = ""
    """In words, if it is not the one that was asked for."""


def parts(setting: Setting) -> list[Part]:
    """Settings in which the gate compares: the setting itself; before a lower precision fp32, on
    few tokens and a small model, where what is small beside that precision's roundings shows."""
    if setting.precision.name == "fp32":
        return [Part(setting)]
    config = small_config(setting.config)
    in_fp32 = dataclasses.replace(
        setting,
        config=config,
        precision=get_precision("fp32", setting.device),
        batch_size=min(setting.batch_size, 3),
        seq_len=min(setting.seq_len, 65),
    )
    tokens = f"{in_fp32.batch_size} x {in_fp32.seq_len} tokens"
    return [Part(in_fp32, f"fp32, hidden_dim {config.hidden_dim}, {tokens}"), Part(setting)]


def answer(
    part: Part,
    model: nn.Module,
    build: Build | None,
    configure_optimizer: ConfigureOptimizer,
    *,
    cuda_graph: bool = False,
    notify: trainer.Notify = lambda _: None,
) -> Outcome | list[str]:
    """A candidate's answer in a part of the gate, or in sentences why it is another model."""
    setting = part.setting
    if differing := differing_defaults(setting.config):
        return differing  # a baseline with the same numbers would show nothing
    counted: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if part.where:
        assert build is not None
        with torch.device(setting.device):
            model = build(setting.config).to(setting.device)
        counted = startup.not_counted(kernels=False)  # of fp32, which training never calls
    try:
        load_canonical(model, setting.random_weights)
    except ValueError as error:
        return [f"V1's weights can't be loaded: {error}"]
    with kept_matmul_mode(), counted:
        found = _run(
            model,
            setting,
            setting.precision,
            configure_optimizer,
            cuda_graph=cuda_graph,
            notify=notify,
        )
    if setting.precision.float8_recipe and all(map(is_gradient, found.gradients.values())):
        autocast = setting.precision.autocast(setting.device.type)
        found.float8_share = float8.share_in_float8(model, setting.config, autocast)
    return found


def add(
    report: ParityReport, part: Part, found: Outcome | list[str], truth: Outcome, baseline: Outcome
) -> None:
    of_part = new_report(part.setting)
    if isinstance(found, list):
        report.failures += found
        return
    compare(of_part, part.setting, Runs(truth, baseline, found))
    if of_part.passed and found.float8_share < 1:
        of_part.failures.append(
            f"{found.float8_share:.1%} of the operations of the layers' products run in fp8: "
            "the others are in a higher precision"
        )
    where = part.where.partition(",")[0]
    report.measures |= {
        f"{name} in {where}" if where else name: one for name, one in of_part.measures.items()
    }
    report.failures += [
        f"{failure} (in {part.where})" if where else failure for failure in of_part.failures
    ]
    report.tensors_total = of_part.tensors_total
    report.tensors_with_grad = of_part.tensors_with_grad


def new_report(setting: Setting) -> ParityReport:
    return ParityReport(
        precision=setting.precision.name,
        device=str(setting.device),
        seed=setting.seed,
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        reference=f"V1 in {str(truth_dtype(setting)).removeprefix('torch.')}",
    )


def references(
    setting: Setting, keep: Callable[[Outcome], Outcome] = lambda outcome: outcome
) -> tuple[Outcome, Outcome]:
    """V1's results in one process: in higher precision, the truth, and at the setting's.

    Args:
        keep: makes what is kept of the one before the other is run.
    """
    exact = get_precision("fp32", setting.device)  # no autocast: the weights' own arithmetic
    optimizer = versions.load(versions.BASELINE).configure_optimizer
    with kept_matmul_mode():
        truth = _run(_baseline(setting, truth_dtype(setting)), setting, exact, optimizer)
        if setting.precision.name == "fp32":
            initial = canonical_state(setting.config, setting.seed)
            truth.initial = {name: weight.to(setting.device) for name, weight in initial.items()}
        else:
            truth.directions = _directions(setting, exact, truth.logits)
        truth = keep(truth)
        own = _run(_baseline(setting, torch.float32), setting, setting.precision, optimizer)
    return truth, keep(own)


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


def truth_dtype(setting: Setting) -> torch.dtype:
    """fp64; but fp32 on a GPU that is asked for less than fp32, where many have no fp64 units."""
    coarse = setting.precision.name != "fp32"
    return torch.float32 if setting.device.type == "cuda" and coarse else torch.float64


def _baseline(setting: Setting, dtype: torch.dtype) -> nn.Module:
    with torch.device(setting.device):  # so that its initialisation, unused here, is quick
        return build_baseline(setting.config).to(dtype)


def _run(
    model: nn.Module,
    setting: Setting,
    precision: Precision,
    configure_optimizer: ConfigureOptimizer,
    *,
    cuda_graph: bool = False,
    notify: trainer.Notify = lambda _: None,
) -> Outcome:
    """The gate's programme for one model: logits, gradients, then a short training run."""
    batches = setting.batches(1 + CURVE_STEPS)
    precision.set_matmul_mode()
    precision.prepare(model)
    load_canonical(model, setting.random_weights)
    # Compiled first, as training will need it: the first compilation pays what all others share.
    notify("gradients")
    loss, gradients = _loss_and_gradients(
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
    if setting.precision.name == "fp32":
        updates = {name: (after[name] - before.pop(name)).float() for name in after}
    model.zero_grad(set_to_none=True)
    return Outcome(logits, loss, gradients, curve, moved, updates)


def _loss_and_gradients(
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


def _directions(setting: Setting, exact: Precision, logits: Tensor) -> dict[str, Tensor]:
    """How V1's logits change where RoPE's base or the scores are 1% larger, or the norms' epsilon
    is a tenth of what it should be."""
    weights, tokens = setting.far_weights(), setting.batches(1 + CURVE_STEPS)[0, 0]
    larger = {name: weights[name] * 1.01 for name in weights if "q_proj" in name}
    found = {}
    for name, factor, changed in (
        ("rope_theta", 1.01, weights),
        ("norm_eps", 0.1, weights),
        ("scores", 1.0, weights | larger),
    ):
        config = setting.config
        if hasattr(config, name):
            config = dataclasses.replace(config, **{name: factor * getattr(config, name)})
        model = _baseline(dataclasses.replace(setting, config=config), truth_dtype(setting))
        found[name] = _logits(model, exact, changed, tokens) - logits
    return found


def compare(report: ParityReport, setting: Setting, runs: Runs) -> None:
    """Holds what the candidate did against what V1 does; adds to the report."""
    report.tensors_total = len(runs.truth.gradients)
    report.tensors_with_grad = sum(is_gradient(g) for g in runs.candidate.gradients.values())
    _compare_outputs(report, setting, runs)
    _compare_gradients(report, setting, runs)
    if setting.precision.name != "fp32":
        _compare_scales(report, setting, runs)
    for name in sorted(runs.candidate.gradients.keys() - runs.truth.gradients.keys()):
        report.failures.append(f"{name} is a parameter of its own, which V1 does not have")
    _compare_movements(report, setting, runs)
    if setting.precision.name == "fp32":
        _compare_updates(report, runs)


def _compare_outputs(report: ParityReport, setting: Setting, runs: Runs) -> None:
    if runs.candidate.logits_shape != runs.truth.logits_shape:
        report.failures.append(
            f"logits are {runs.candidate.logits_shape}, V1's {runs.truth.logits_shape}"
        )
        return
    found, of_v1, true = (run.logits for run in (runs.candidate, runs.baseline, runs.truth))
    own = relative_rms(of_v1, true)
    _judge(report, "logits", relative_rms(found, true), own, 0.0)
    if setting.precision.name != "fp32":
        averaged = max(ALONG, 2 / math.sqrt(setting.batch_size * setting.seq_len))
        for name, direction in {"their own scale": true, **runs.truth.directions}.items():
            error, own_error = (_along(logits, true, direction) for logits in (found, of_v1))
            floor = averaged * own + (direction is true) * setting.precision.unit_roundoff
            _judge(report, f"logits along {name}", error, own_error, floor)
    # The loss is a mean over tokens: of independent errors as large as those of the logits,
    # 1 / sqrt(tokens) remains. V1's own error of a single number may be small by luck.
    of_a_mean = own / math.sqrt(setting.batch_size * setting.seq_len)
    for name in ("loss", "curve"):
        true, of_v1, found = (
            getattr(run, name) for run in (runs.truth, runs.baseline, runs.candidate)
        )
        own = max(relative_rms(of_v1, true), of_a_mean)
        label = "loss curve" if name == "curve" else name
        _judge(report, label, relative_rms(found, true), own, LOSS_FLOOR)


def _compare_gradients(report: ParityReport, setting: Setting, runs: Runs) -> None:
    floor = ROUNDING_UNITS * setting.precision.unit_roundoff
    own_errors = {
        name: relative_rms(runs.baseline.gradients[name], gradient)
        for name, gradient in runs.truth.gradients.items()
    }
    # One tensor's error at V1 may be small by luck; the typical one says what the precision costs.
    typical = torch.tensor(list(own_errors.values())).median().item()
    for name, true in runs.truth.gradients.items():
        found = runs.candidate.gradients.get(name)
        if found is None or not is_gradient(found):
            problem = "is missing" if found is None else "is all zeros"
            report.failures.append(
                f"gradient of {name} {problem} (relative error 1.0): the backward pass does not "
                "reach it"
            )
            continue
        error = relative_rms(found, true)
        _judge(report, f"gradient of {name}", error, max(own_errors[name], typical), floor)


def _compare_scales(report: ParityReport, setting: Setting, runs: Runs) -> None:
    """How much too long each gradient is, measured along the true one: a systematic error, which
    roundings hide in the size of the error, but hardly change in a sum over all elements."""
    found, own = (
        {
            name: _projection(gradient, true) - 1
            for name, true in runs.truth.gradients.items()
            if is_gradient(gradient := run.gradients.get(name))
        }
        for run in (runs.candidate, runs.baseline)
    )
    rounding = setting.precision.unit_roundoff
    more = SCALE_MULTIPLE_FP8 - MULTIPLE if setting.precision.float8_recipe else 0.0
    typical = torch.tensor(list(own.values())).abs().median().item()
    for name, excess in found.items():
        of_v1 = max(abs(own[name]), typical)
        floor = SCALE_ROUNDINGS * rounding + more * of_v1
        _judge(report, f"scale of the gradient of {name}", abs(excess), of_v1, floor)
    mean, mean_of_v1 = (abs(sum(of.values())) / max(len(of), 1) for of in (found, own))
    floor = ROUNDING_UNITS * rounding
    _judge(report, "scale of all gradients", mean, mean_of_v1, floor)


def _compare_updates(report: ParityReport, runs: Runs) -> None:
    """The optimizer's own work: how each weight was changed, and by how much along what it was at
    first, where decay shows, and an element that a rounding turns round does not."""
    truth = runs.truth.updates
    found, own = (
        {name: relative_rms(run.updates[name], true) for name, true in truth.items()}
        for run in (runs.candidate, runs.baseline)
    )
    typical, of_v1 = (torch.tensor(list(of.values())).median().item() for of in (found, own))
    _judge(report, "direction of all movements", typical, of_v1, DIRECTION_FLOOR)
    for name, true in truth.items():
        _judge(report, f"direction of {name}", found[name], max(own.values()), UPDATE_FLOOR)
        error, own_error = (
            _along(run.updates[name], true, runs.truth.initial[name])
            for run in (runs.candidate, runs.baseline)
        )
        _judge(report, f"decay of {name}", error, own_error, DECAY_FLOOR)


def _compare_movements(report: ParityReport, setting: Setting, runs: Runs) -> None:
    """How far training moves each weight, in any precision."""
    in_fp32 = setting.precision.name == "fp32"
    own_errors = {
        name: abs(runs.baseline.moved[name] / far - 1) for name, far in runs.truth.moved.items()
    }
    typical = torch.tensor(list(own_errors.values())).median().item()
    for name, far in runs.truth.moved.items():
        found, own = runs.candidate.moved.get(name, 0.0), max(own_errors[name], typical)
        floor = MOVEMENT_FLOOR_FP32 if in_fp32 else MOVEMENT_FLOOR
        elements = setting.random_weights[name].numel()
        if setting.precision.float8_recipe:
            floor += MOVEMENT_NOISE_FP8 / math.sqrt(elements)
        elif not in_fp32:  # AdamW may move one whose gradient is all roundings not at all
            floor += 1 / elements
        measure = Measure(abs(found / far - 1), MULTIPLE * own + floor, own)
        report.measures[f"movement of {name}"] = measure
        if not measure.passed:
            report.failures.append(
                f"{name} moved by {found:.3g} of its size in {CURVE_STEPS} training steps, "
                f"V1's by {far:.3g}"
            )


def _judge(report: ParityReport, name: str, error: float, baseline: float, floor: float) -> None:
    measure = Measure(error, MULTIPLE * baseline + floor, baseline)
    report.measures[name] = measure
    if not measure.passed:
        report.failures.append(
            f"{name}: relative error {error:.1e}, allowed {measure.allowed:.1e} "
            f"(V1 at {report.precision} has {baseline:.1e})"
        )


def relative_rms(found: Tensor | None, true: Tensor | None) -> float:
    """|found - true| / |true| over all elements, in fp64."""
    assert found is not None and true is not None
    true = true.double()
    return float((found.double() - true).norm() / true.norm())


def _along(found: Tensor, true: Tensor, direction: Tensor) -> float:
    """How far the two are apart along a direction, over the size of the true one, in fp64."""
    true, direction = true.double(), direction.to(true.device).double()
    apart = ((found.double() - true) * direction).sum()
    return abs(float(apart / direction.norm() / true.norm()))


def _projection(found: Tensor | None, true: Tensor | None) -> float:
    """<found, true> / <true, true>, in fp64: 1 where the two differ by what averages out."""
    assert found is not None and true is not None
    true = true.double()
    return float((found.double() * true).sum() / true.square().sum())


def check_shape(setting: Setting) -> None:
    """Raises WorkshopError for a batch, a length or a seed that no training step has."""
    if setting.batch_size < 1:
        raise WorkshopError(f"batch_size {setting.batch_size}: it must be at least 1")
    most = setting.config.max_seq_len
    if not 2 <= setting.seq_len <= most:  # over one token, q and k have no gradient
        raise WorkshopError(
            f"seq_len {setting.seq_len}: it must lie between 2 and the model's {most}"
        )
    if not 0 <= setting.seed < 2**63:
        raise WorkshopError(f"seed {setting.seed}: it must lie between 0 and 2^63")
