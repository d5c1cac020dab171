"""The audit: did the timed run train V1's model?

The gate runs before the clock, on eight steps of its own. The audit looks at the timed run itself,
after the clock has stopped: the loss of each step, how far and in which direction each weight has
moved, and the last step's gradients, at the run's own batch, length, compile mode and graph. All
are compared with V1's on the same batches.

The truth comes from a process of V1, the first of the session: after its own timed run it trains
V1 once more in higher precision, and leaves both for the others. So nothing that a version's
process does can change it. As in the gate, the tolerance is a multiple of V1's own distance from
the truth at the precision in use, plus a few roundings.
"""

import dataclasses
import hashlib
import io
import json
import math
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from workshop import results, versions
from workshop.gate import canonical, parity
from workshop.gate.parity import (
    MOVEMENT_NOISE_FP8,
    MULTIPLE,
    ROUNDING_UNITS,
    Measure,
    Setting,
)
from workshop.results import FAIL, NOT_AUDITED, PASS
from workshop.run import trainer
from workshop.run.precision import get_precision, kept_matmul_mode

LOSS_FLOOR = (1e-5, 0.023)
"""How far a step's loss may always be off: in exact arithmetic, and for each unit of a precision's
roundoff. AdamW divides by the size of a gradient: one that is near 0 takes its sign from roundings,
and the weight moves a whole step either way. Training carries this on, and which of two true runs
then comes closer to the truth is luck. In fp32 over 12 seeds, losses are at most 3e-7 off after 26
steps; products in tf32 make it 5e-6, no decay 2e-5."""

LENGTH_FLOOR = (1e-3, 2.3)
"""The same for how far a weight has moved: in fp32 at most 2e-4."""

VECTOR_FLOOR = (3e-4, 6.5)
"""The same for its movement and last gradient themselves: in fp32 at most 2.5e-4 and 3e-5. Products
in tf32 make it 7e-3 and 3e-3, gradients rounded to bf16 8e-4 and 2e-3, AMSGrad 3e-4 and 2e-4."""

MOST = 0.1
"""What a loss or a movement may never be off, however far V1's own run is: no roundings do that,
but a step that V1 left out does, and its run is then no measure for others."""

SCORES_MULTIPLE = 4
"""Of V1's own largest error, what the last gradient of q_proj or k_proj may be off; MULTIPLE for
all else. The gradient of the attention's scores nearly cancels. V1 computes it in fp32, SDPA from
outputs rounded to bf16: on an H200, after 20 steps at small and medium, V2 and V4 are 2.2 to 3.8
times as far off as V1 (24 runs), 0.11 at most. A gradient of half the size is off by 0.5."""

FP8_MULTIPLE = 4
"""The same in fp8 for all losses and last gradients. Training carries fp8's large roundings on, so
that V1's own error is a matter of luck: on an H200 at small and medium, in 144 runs with 3 to 15
seeds of each size and recipe, V2, V3 and V4 are up to 2.9 times as far off as V1
(results/reference/nvidia_h200/prototypes/audit_fp8.jsonl). With MULTIPLE 14 of these runs failed.
What fp8 then hides: a gradient of half the size, a rate 5% too high, most single steps lost. A run
in bf16 shows them."""

BUCKETS = 1024
"""Numbers that are kept of each tensor, see `sketch`."""
_CHUNK = 2**22
"""Elements that are sketched at once, so that this takes little memory."""


@dataclass(frozen=True)
class Course:
    """A training run in little: what two runs are compared by, on the CPU in fp64.

    `losses` (steps,); by V1's name of a tensor: `distance`, the norm of its whole movement since
    the initial weights; `moved` and `gradients`, sketches (BUCKETS,) of that movement and of the
    last step's gradient. A tensor without a gradient is not among these.
    """

    losses: Tensor
    distance: dict[str, float]
    moved: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What V1's process leaves for the others: its own timed run, and the truth."""

    truth: Course
    own: Course
    arithmetic: str
    """Of the truth, as in `float64`."""


def sketch(tensor: Tensor, name: str) -> Tensor:
    """BUCKETS numbers whose differences estimate how far two tensors are apart: (BUCKETS,), fp64.
    Only sketches of one name may be compared: it decides the signs.

    A count sketch (Charikar, Chen and Farach-Colton, 2002): each element goes with a random sign
    into one bucket. The expected square of the sketch's norm is that of the tensor's norm, and it
    scatters by sqrt(2 / BUCKETS), 4%.
    """
    flat = tensor.detach().flatten()
    generator = torch.Generator(flat.device).manual_seed(zlib.crc32(name.encode()))
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for chunk in flat.split(_CHUNK):
        signs = torch.randint(
            2, chunk.shape, generator=generator, device=flat.device, dtype=torch.int8
        )
        signed = torch.where(signs.bool(), chunk, -chunk).double()
        padding = -len(signed) % BUCKETS
        total += nn.functional.pad(signed, (0, padding)).view(-1, BUCKETS).sum(0)
    return total.cpu()


def record(model: nn.Module, setting: Setting, losses: Tensor) -> Course:
    """The course of a run that began with V1's initial weights and has just ended.

    Args:
        losses: of all its steps, (steps,).
    """
    distance, moved = {}, {}
    initial = canonical.canonical_state(setting.config, setting.seed)
    for name, weight in canonical.canonical_weights(model).items():
        if name in initial:
            movement = weight - initial[name].to(weight.device, weight.dtype)
            distance[name] = movement.double().norm().item()
            moved[name] = sketch(movement, name)
    gradients = {
        name: sketch(gradient, name)
        for name, gradient in canonical.canonical_gradients(model).items()
        if gradient is not None
    }
    if setting.precision.loss_scaling:  # by a factor that is no part of the model
        size = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        gradients = {name: gradient / size for name, gradient in gradients.items()}
    return Course(losses.double().cpu(), distance, moved, gradients)


def train_truth(setting: Setting, batches: Tensor, learning_rate: float) -> tuple[Course, str]:
    """Trains V1 in higher precision on `batches` (steps, 2, B, T); its course and arithmetic."""
    dtype = parity.truth_dtype(setting)
    configure_optimizer = versions.load(versions.BASELINE).configure_optimizer
    exact = get_precision("fp32", setting.device)  # no autocast: the weights' own arithmetic
    with kept_matmul_mode():
        exact.set_matmul_mode()
        with torch.device(setting.device):
            model = canonical.build_baseline(setting.config).to(dtype)
        canonical.load_canonical(model, canonical.canonical_state(setting.config, setting.seed))
        optimizer = configure_optimizer(model, learning_rate)
        losses = trainer.train_losses(model, optimizer, batches, exact)
        return record(model, setting, losses), str(dtype).removeprefix("torch.")


# --- between processes -----------------------------------------------------------------------


def reference_path(folder: Path, **facts: object) -> Path:
    """Where V1's process leaves what a run with these facts is compared with: everything that
    decides what V1 would do, such as its sizes, batches, seed, rate and number of steps."""
    key = json.dumps(facts, sort_keys=True, default=str)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"


def save_reference(path: Path, reference: Reference) -> None:
    content = io.BytesIO()  # of a full disk torch.save says nothing that a user understands
    torch.save(dataclasses.asdict(reference), content)
    with results.atomic_path(path) as temporary:
        temporary.write_bytes(content.getvalue())


def load_reference(path: Path) -> Reference:
    content = torch.load(path, weights_only=True)
    return Reference(Course(**content["truth"]), Course(**content["own"]), content["arithmetic"])


# --- the verdict -----------------------------------------------------------------------------


def judge(found: Course, reference: Reference, setting: Setting) -> results.Audit:
    """Holds a run against V1's."""
    measures = {"loss": _loss(found, reference, setting)}
    truth, own = reference.truth, reference.own
    noise = 0.0
    if setting.precision.float8_recipe:
        noise = MOVEMENT_NOISE_FP8 / math.sqrt(setting.config.hidden_dim)
    measures |= _tensors(
        *("movement", found.distance, truth.distance, own.distance, _floor(LENGTH_FLOOR, setting)),
        most=MOST,
        noise=noise,
    )
    floor = _floor(VECTOR_FLOOR, setting)
    measures |= _tensors("direction", found.moved, truth.moved, own.moved, floor)
    measures |= _tensors(
        *("gradient", found.gradients, truth.gradients, own.gradients, floor),
        multiple=_multiple(setting),
        of_scores=SCORES_MULTIPLE,
    )
    red = {name: measure for name, measure in measures.items() if not measure.passed}
    worst = max(measures, key=lambda name: parity.badness(measures[name]))
    shown = dict.fromkeys(["loss", worst, *red])
    return results.Audit(
        status="fail" if red else "pass",
        failures=[_sentence(name, measure, found, truth) for name, measure in red.items()],
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        reference=f"V1 in {reference.arithmetic}",
        measures={name: parity.as_recorded(measures[name]) for name in shown},
        steps=len(found.losses),
        why="",
    )


def _floor(of: tuple[float, float], setting: Setting) -> float:
    return of[0] + of[1] * setting.precision.unit_roundoff


def _multiple(setting: Setting) -> float:
    """Of V1's largest error, what a loss or a last gradient may be off."""
    return FP8_MULTIPLE if setting.precision.float8_recipe else MULTIPLE


def _loss(found: Course, reference: Reference, setting: Setting) -> Measure:
    """The largest relative distance of any step's loss. Of independent roundings of the tokens'
    losses 1 / sqrt(tokens) remains in the mean."""
    truth, own = reference.truth.losses, _furthest(reference.own.losses, reference.truth.losses)
    of_a_mean = setting.precision.unit_roundoff / math.sqrt(setting.batch_size * setting.seq_len)
    floor = _floor(LOSS_FLOOR, setting) + ROUNDING_UNITS * of_a_mean
    allowed = min(_multiple(setting) * own + floor, MOST)
    return Measure(_furthest(found.losses, truth), allowed, own)


def _furthest(losses: Tensor, truth: Tensor) -> float:
    if losses.shape != truth.shape:
        return math.inf
    return float(((losses - truth).abs() / truth).max())


def _tensors(
    what: str,
    found: dict[str, float] | dict[str, Tensor],
    truth: dict[str, float] | dict[str, Tensor],
    own: dict[str, float] | dict[str, Tensor],
    floor: float,
    most: float = math.inf,
    noise: float = 0.0,
    multiple: float = MULTIPLE,
    of_scores: float = MULTIPLE,
) -> dict[str, Measure]:
    """A measure of each tensor, all with V1's largest error: which tensor training drives off
    furthest is luck. Why there is a floor: see LOSS_FLOOR.

    Args:
        noise: added to the norms' floor: they have few elements.
        of_scores: the multiple for q_proj and k_proj.
    """
    of_v1 = max(_distance(own.get(name), true) for name, true in truth.items())

    def measure(name: str) -> Measure:
        scores = name.endswith(("q_proj.weight", "k_proj.weight"))
        allowed = min((of_scores if scores else multiple) * of_v1 + floor, most)
        if name.endswith("norm.weight"):
            allowed = min(allowed + noise, most)
        return Measure(_distance(found.get(name), truth[name]), allowed, of_v1)

    return {f"{what} of {name}": measure(name) for name in truth}


def _distance(found: float | Tensor | None, true: float | Tensor) -> float:
    """|found - true| / |true|; infinite for what is missing."""
    if found is None:
        return math.inf
    difference, size = torch.as_tensor(found - true), torch.as_tensor(true)
    return float(difference.norm() / size.norm())


def _sentence(name: str, measure: Measure, found: Course, truth: Course) -> str:
    if name == "loss":
        if len(found.losses) != len(truth.losses):
            return f"timed run: {len(found.losses)} steps, V1's {len(truth.losses)}"
        apart = ((found.losses - truth.losses).abs() / truth.losses).nan_to_num(nan=math.inf)
        step = int(apart.argmax())
        return (
            f"timed run: loss {found.losses[step]:.4f} in step {step + 1}, "
            f"V1's {truth.losses[step]:.4f}"
        )
    what, _, tensor = name.partition(" of ")
    if what == "movement":
        return (
            f"timed run: {tensor} moved by {found.distance.get(tensor, 0.0):.3g}, "
            f"V1's by {truth.distance[tensor]:.3g}"
        )
    return (
        f"timed run: {name}: relative error {measure.error:.1e}, allowed {measure.allowed:.1e} "
        f"(V1 has {measure.baseline:.1e})"
    )


def summary(audit: results.Audit) -> str:
    """One line: the verdict and the figures behind it."""
    if audit.status == "not run":
        return audit.why
    verdict = PASS if audit.status == "pass" else f"{FAIL}, {len(audit.failures)} reasons"
    line = f"{verdict}: {audit.steps} steps as {audit.reference}"
    closest = audit.closest()
    if closest is not None:
        name, error, allowed = closest
        line += f"; worst {name}, error {error:.1e} of {allowed:.1e} allowed"
    return line if audit.seconds is None else f"{line} ({audit.seconds:.1f} s)"


def of_run(
    found: Course,
    setting: Setting,
    batches: Tensor,
    learning_rate: float,
    path: Path,
    *,
    may_lead: bool,
) -> results.Audit:
    """Audits a run whose model and optimizer have been freed.

    Args:
        batches: all that it may have trained on, (n, 2, B, T).
        path: the reference's, which is made if the run is the session's first of V1.
        may_lead: whether the run is V1's own, eager, as the ladder times it.
    """
    start = time.perf_counter()
    if path.exists():
        reference = load_reference(path)
    elif may_lead:
        try:
            truth, dtype = train_truth(setting, batches[: len(found.losses)], learning_rate)
        except (RuntimeError, MemoryError) as error:
            if trainer.memory_asked_for(error) is None:
                raise
            return results.Audit(why=f"{NOT_AUDITED}: no memory for V1 in higher precision")
        reference = Reference(truth, found, dtype)
        save_reference(path, reference)
    else:
        return results.Audit(why=f"{NOT_AUDITED}: no V1 ran before it in this session")
    audit = judge(found, reference, setting)
    audit.seconds = time.perf_counter() - start
    return audit
