"""The gate: does a version train the same model as V1?

Same weights in, same tokens in: the logits, the loss, every parameter's gradient, the loss curve
of a short training run and how far it moves each weight must be V1's. The reference is V1 in higher
precision. The tolerance calibrates itself: a version may be no further from the reference than a
small multiple of what V1 is at the same precision, since that is what the precision costs, and
anything beyond it is the version's own doing.

Loss and gradients are those of the version's own training step. Half of their tokens are text,
which repeats a few of them often; together the gate's batches hold every token, as far as they have
room. Before tf32, bf16 or fp16, a small model of the same code passes the gate in fp32, eager and
on an odd shape: what is small beside a lower precision's roundings shows there. In fp32 the
movements of the weights are compared as vectors, too. In the lower precision itself, an error in
one direction is looked for along that direction, where roundings average out: along the true
gradients, the logits, and the changes that other numbers of the model would make to them.

The gate does not find:

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
- A change that no value of the run reaches: a limit on logits or gradients beyond theirs, or on
  positions beyond the run's length. In the run itself its error is 0.
- A change that only happens at the run's own size, after step 8 or when compiled for bf16, if it is
  small beside bf16's roundings. The run itself is audited for that (workshop/gate/audit.py).
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workshop import results, versions
from workshop.gate.canonical import differing_defaults, is_gradient, load_canonical
from workshop.gate.outcome import (
    Build,
    ConfigureOptimizer,
    Outcome,
    Part,
    Setting,
    check_shape,
    parts,
    references,
    relative_rms,
    run,
)
from workshop.results import FAIL, PASS
from workshop.run import float8, hardware, startup, trainer
from workshop.run.precision import LADDER, get_precision, kept_matmul_mode

MULTIPLE = 2.0
"""How far from the reference a version may be, in units of V1's own distance at that precision.

Calibrated, not chosen: over 20 seeds, the correct versions' worst tensor is below 2 (see
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
"""Added at fp8, over the square root of a tensor's elements: luck drives each of them off.
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


V1 = "V1 at this precision"


@dataclass(frozen=True)
class Measure:
    """One quantity's relative RMS distance from the reference."""

    error: float
    allowed: float
    baseline: float
    """V1's own error at this precision."""

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def sentence(self, name: str, baseline: str = V1) -> str:
        return (
            f"{name}: relative error {self.error:.1e}, allowed {self.allowed:.1e} "
            f"({baseline} has {self.baseline:.1e})"
        )


def as_recorded(measure: Measure) -> dict[str, float | str | None]:
    """A measure as a result file keeps it, with null for what is no number."""
    return dict(zip(vars(measure), results.finite([*vars(measure).values()]), strict=True))


def badness(measure: Measure) -> float:
    """The error as a share of what is allowed; infinite where it is no number."""
    return math.inf if math.isnan(measure.error) else measure.error / measure.allowed


def verdict(failures: list[str]) -> str:
    """`pass`, or `FAIL` and the number of reasons."""
    reasons = f"{len(failures)} reason{'s' if len(failures) > 1 else ''}"
    return f"{FAIL}, {reasons}" if failures else PASS


def closest(name: str, error: float, allowed: float) -> str:
    """A sentence on the quantity that comes closest to its limit, or is furthest beyond it."""
    kind, _, weight = name.partition(" of ")
    words = {"direction": "the direction in which {} moved", "movement": "how far {} moved"}
    named = words[kind].format(weight) if kind in words else name
    where = "closest to its limit" if error <= allowed else "furthest beyond its limit"
    return f"{where}: {named}, off by {error:.1e}, allowed {allowed:.1e}"


@dataclass
class ParityReport:
    """The gate's findings. `failures` are sentences; the list is empty if `passed`."""

    setting: Setting
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
        gradients = f"gradients {self.tensors_with_grad}/{self.tensors_total}"
        line = f"{verdict(self.failures)}: {gradients}"
        if self.measures:
            name, measure = self.worst
            line += f"; {closest(name, measure.error, measure.allowed)}"
        return line

    def record(self) -> results.Parity:
        """The part that a result file keeps: the verdict and, of the measures, the telling ones."""
        names = ["logits", "loss", "loss curve", "scale of all gradients"]
        names += [self.worst[0]] if self.measures else []
        return results.Parity(
            status="pass" if self.passed else "fail",
            failures=self.failures,
            batch_size=self.setting.batch_size,
            seq_len=self.setting.seq_len,
            reference=self.setting.reference_name,
            measures={n: as_recorded(self.measures[n]) for n in names if n in self.measures},
        )

    def hold(self, name: str, error: float, baseline: float, floor: float) -> None:
        """Adds a measure; where it is beyond what V1's own error and a floor allow, a failure."""
        measure = Measure(error, MULTIPLE * baseline + floor, baseline)
        self.measures[name] = measure
        if not measure.passed:
            self.failures.append(measure.sentence(name))


# --- the check -----------------------------------------------------------------------------------


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
    model = _built(build, setting)
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
            without it that part is skipped.
        notify: called with what the model does next, in a few words: interpreted or
            compiled, it may take long.
    """
    optimizer = configure_optimizer or versions.load(versions.BASELINE).configure_optimizer
    report = ParityReport(setting)
    for part in parts(setting):
        if report.passed and (build is not None or not part.where):
            found = answer(part, model, build, optimizer, cuda_graph=cuda_graph, notify=notify)
            add(report, part, found, *references(part.setting))
    return report


def answer(
    part: Part,
    model: nn.Module,
    build: Build | None,
    configure_optimizer: ConfigureOptimizer,
    *,
    cuda_graph: bool = False,
    notify: trainer.Notify = lambda _: None,
) -> Outcome | list[str]:
    """A candidate's outcome in a part of the gate, or in sentences why it is another model."""
    setting = part.setting
    if differing := differing_defaults(setting.config):
        return differing  # a baseline with the same numbers would show nothing
    counted: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if part.where:
        assert build is not None
        model = _built(build, setting)
        counted = startup.not_counted(kernels=False)  # of fp32, which training never calls
    try:
        load_canonical(model, setting.random_weights)
    except ValueError as error:
        return [f"V1's weights can't be loaded: {error}"]
    with kept_matmul_mode(), counted:
        found = run(model, setting, setting.precision, configure_optimizer, cuda_graph, notify)
    if setting.precision.float8_recipe and all(map(is_gradient, found.gradients.values())):
        autocast = setting.precision.autocast(setting.device.type)
        found.float8_share = float8.share_in_float8(model, setting.config, autocast)
    return found


def _built(build: Build, setting: Setting) -> nn.Module:
    with torch.device(setting.device):  # so that large models are initialised where it is quick
        return build(setting.config).to(setting.device)


def add(
    report: ParityReport,
    part: Part,
    found: Outcome | list[str],
    reference: Outcome,
    baseline: Outcome,
) -> None:
    """Adds a part of the gate to the report: a candidate's answer, compared with V1's outcomes."""
    if isinstance(found, list):
        report.failures += found
        return
    own = ParityReport(part.setting)
    compare(own, Runs(reference, baseline, found))
    if own.passed and found.float8_share < 1:
        own.failures.append(
            f"{found.float8_share:.1%} of the operations of the layers' products run in fp8: "
            "the others are in a higher precision"
        )
    in_part, in_full = "", ""
    if part.where:
        in_part, in_full = f" in {part.where.partition(',')[0]}", f" (in {part.where})"
    report.measures |= {name + in_part: measure for name, measure in own.measures.items()}
    report.failures += [failure + in_full for failure in own.failures]
    report.tensors_total = own.tensors_total
    report.tensors_with_grad = own.tensors_with_grad


# --- the comparison ------------------------------------------------------------------------------


@dataclass
class Runs:
    """The outcomes of V1 in higher precision, of V1 and of the version."""

    reference: Outcome
    baseline: Outcome
    candidate: Outcome

    @property
    def both(self) -> tuple[Outcome, Outcome]:
        """The candidate's, and V1's at the same precision."""
        return self.candidate, self.baseline


def compare(report: ParityReport, runs: Runs) -> None:
    """Holds the candidate's outcome against V1's; adds measures and failures to the report."""
    found, true, in_fp32 = runs.candidate, runs.reference, report.setting.in_fp32
    report.tensors_total = len(true.gradients)
    report.tensors_with_grad = sum(map(is_gradient, found.gradients.values()))
    if found.logits_shape == true.logits_shape:
        _compare_outputs(report, runs)
    else:
        report.failures.append(f"logits are {found.logits_shape}, V1's {true.logits_shape}")
    _compare_gradients(report, runs)
    if not in_fp32:
        _compare_scales(report, runs)
    for name in sorted(found.gradients.keys() - true.gradients.keys()):
        report.failures.append(f"{name} is a parameter of its own, which V1 does not have")
    _compare_movements(report, runs)
    if in_fp32:
        _compare_updates(report, runs)


def _compare_outputs(report: ParityReport, runs: Runs) -> None:
    setting, true = report.setting, runs.reference.logits
    error, own = (relative_rms(run.logits, true) for run in runs.both)
    report.hold("logits", error, own, 0.0)
    averaged = 1 / math.sqrt(setting.batch_size * setting.seq_len)
    if not setting.in_fp32:
        roundings = max(ALONG, 2 * averaged) * own
        for name, direction in {"their own scale": true, **runs.reference.directions}.items():
            error, own_error = (_along(run.logits, true, direction) for run in runs.both)
            floor = roundings + (direction is true) * setting.precision.unit_roundoff
            report.hold(f"logits along {name}", error, own_error, floor)
    # The loss is a mean over tokens: independent errors as large as those of the logits shrink to
    # 1 / sqrt(tokens) of them. V1's own error of a single number may be small by luck.
    for name, field_ in (("loss", "loss"), ("loss curve", "curve")):
        true = getattr(runs.reference, field_)
        error, own_error = (relative_rms(getattr(run, field_), true) for run in runs.both)
        report.hold(name, error, max(own_error, own * averaged), LOSS_FLOOR)


def _compare_gradients(report: ParityReport, runs: Runs) -> None:
    floor = ROUNDING_UNITS * report.setting.precision.unit_roundoff
    # An infinite error of V1's own would allow anything.
    assert all(gradient is not None for gradient in runs.baseline.gradients.values())
    own_errors = {
        name: relative_rms(runs.baseline.gradients[name], gradient)
        for name, gradient in runs.reference.gradients.items()
    }
    # One tensor's error at V1 may be small by luck; the typical one says what the precision costs.
    typical = _median(own_errors.values())
    for name, true in runs.reference.gradients.items():
        found = runs.candidate.gradients.get(name)
        if is_gradient(found):
            own = max(own_errors[name], typical)
            report.hold(f"gradient of {name}", relative_rms(found, true), own, floor)
        else:
            problem = "is missing" if found is None else "is all zeros"
            report.failures.append(
                f"gradient of {name} {problem} (relative error 1.0): the backward pass does not "
                "reach it"
            )


def _compare_scales(report: ParityReport, runs: Runs) -> None:
    """How much too long each gradient is, measured along the true one: a systematic error, which
    roundings hide in the size of the error, but hardly change in a sum over all elements."""

    def excess(run: Outcome) -> dict[str, float]:
        return {
            name: _projection(gradient, true) - 1
            for name, true in runs.reference.gradients.items()
            if is_gradient(gradient := run.gradients.get(name))
        }

    found, own = map(excess, runs.both)
    precision = report.setting.precision
    rounding = precision.unit_roundoff
    more = SCALE_MULTIPLE_FP8 - MULTIPLE if precision.float8_recipe else 0.0
    typical = _median(map(abs, own.values()))
    for name, too_long in found.items():
        of_v1 = max(abs(own[name]), typical)
        floor = SCALE_ROUNDINGS * rounding + more * of_v1
        report.hold(f"scale of the gradient of {name}", abs(too_long), of_v1, floor)
    mean, mean_of_v1 = (abs(sum(of.values())) / max(len(of), 1) for of in (found, own))
    report.hold("scale of all gradients", mean, mean_of_v1, ROUNDING_UNITS * rounding)


def _compare_movements(report: ParityReport, runs: Runs) -> None:
    """How far training moves each weight, in any precision."""
    setting = report.setting
    own_errors = {
        name: abs(runs.baseline.moved[name] / far - 1) for name, far in runs.reference.moved.items()
    }
    typical = _median(own_errors.values())
    for name, far in runs.reference.moved.items():
        elements = setting.random_weights[name].numel()
        floor = MOVEMENT_FLOOR_FP32 if setting.in_fp32 else MOVEMENT_FLOOR
        if setting.precision.float8_recipe:
            floor += MOVEMENT_NOISE_FP8 / math.sqrt(elements)
        elif not setting.in_fp32:  # AdamW may move one whose gradient is all roundings not at all
            floor += 1 / elements
        error = abs(runs.candidate.moved.get(name, 0.0) / far - 1)
        report.hold(f"movement of {name}", error, max(own_errors[name], typical), floor)


def _compare_updates(report: ParityReport, runs: Runs) -> None:
    """The optimizer's own work: how each weight was changed, and by how much along what it was at
    first, where decay shows, and an element that a rounding turns round does not."""
    updates = runs.reference.updates
    found, own = (
        {name: relative_rms(run.updates[name], true) for name, true in updates.items()}
        for run in runs.both
    )
    typical, of_v1 = _median(found.values()), _median(own.values())
    report.hold("direction of all movements", typical, of_v1, DIRECTION_FLOOR)
    for name, true in updates.items():
        report.hold(f"direction of {name}", found[name], max(own.values()), UPDATE_FLOOR)
        initial = runs.reference.initial[name]
        error, own_error = (_along(run.updates[name], true, initial) for run in runs.both)
        report.hold(f"decay of {name}", error, own_error, DECAY_FLOOR)


def _median(values: Iterable[float]) -> float:
    """The lower of two middle values; NaN where one of the values is."""
    return torch.tensor(list(values)).median().item()


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
