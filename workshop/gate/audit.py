"""The audit: did the timed run train V1's model?

The gate runs before the clock, on other steps. The audit looks at the timed run itself: a
fingerprint of the weights, with whose arrival the judge's clock stops; then the loss of each step,
how far and in which direction each weight has moved, and the last step's gradients, at the run's
own batch, length, compile mode and graph. All are compared with V1's on the same batches. No
process knows the timed ones before its clock starts.

In a comparison's first repeat the reference is V1 in higher precision, trained in a separate
process. As in the gate, the tolerance is a multiple of V1's own distance from it at the precision
in use, plus a few roundings. In later repeats, which have other batches, the reference is V1's own
timed run; what it may itself be off, as measured in the first repeat, is added.

The last gradients of q_proj and k_proj have another tolerance: twice the error of V1 with PyTorch's
fused attention. They come from P (dP - delta), where delta is the sum of P dP over a row.
V1 adds these up; FlashAttention and its like take delta from the attention's outputs, which are
rounded. Where a head attends to all tokens nearly alike, as it does early in training, dP - delta
nearly cancels, the more the longer the sequence, and the rounding stays. After 25 steps over 8,192
tokens these gradients are up to 0.14 off in V1, and up to 1.2 in V3, V4 and Hugging Face's.
Roundings have no direction, so the part along the true gradient is compared, too: with PyTorch's
attention in a model of 12 layers, 256 wide, over 2,048 tokens these gradients are up to 1.0 off,
and their parts along the true ones 0.94 to 1.12 (experiments/prototypes_h200/audit_long.jsonl).
"""

import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workshop import results, versions
from workshop.gate import canonical, parity
from workshop.gate.outcome import Setting, relative_rms
from workshop.gate.parity import (
    MOVEMENT_NOISE_FP8,
    MULTIPLE,
    ROUNDING_UNITS,
    Measure,
)
from workshop.run import trainer
from workshop.run.precision import get_precision, kept_matmul_mode

LOSS_FLOOR = (1e-5, 0.023)
"""How far a step's loss may always be off: in exact arithmetic, and for each unit of a precision's
roundoff. AdamW divides by the size of a gradient: one that is near 0 takes its sign from roundings,
and the weight moves a whole step either way. Training carries this on, and which of two correct
runs then comes closer to the reference is luck. In fp32 over 12 seeds, losses are at most 3e-7 off
after 26 steps; products in tf32 make it 5e-6, no decay 2e-5."""

LENGTH_FLOOR = (1e-3, 2.3)
"""The same for how far a weight has moved: in fp32 at most 2e-4."""

VECTOR_FLOOR = (3e-4, 6.5)
"""The same for its movement and last gradient themselves: in fp32 at most 2.5e-4 and 3e-5. Products
in tf32 make it 7e-3 and 3e-3, gradients rounded to bf16 8e-4 and 2e-3, AMSGrad 3e-4 and 2e-4."""

MOST = 0.1
"""Limit of a loss's or a movement's error, however far V1's own run is: no roundings do that,
but a step that V1 left out does, and its run is then no measure for others."""

ALONG = 0.8
"""Limit for how far the part of q_proj's or k_proj's last gradient along V1's is from 1, however
far V1's own is: a lost one is 1 off."""

FP8_MULTIPLE = 4
"""MULTIPLE in fp8, for all losses and last gradients. Training carries fp8's large roundings on, so
that V1's own error is a matter of luck: on an H200 at small and medium, in 144 runs with 3 to 15
seeds of each size and recipe, V2, V3 and V4 are up to 2.9 times as far off as V1
(experiments/prototypes_h200/audit_fp8.jsonl). With MULTIPLE 14 of these runs failed.
What fp8 then hides: a gradient of half the size, a rate 5% too high, most single steps lost. A run
in bf16 shows them."""

PROBES = 4
"""Numbers of each weight's fingerprint."""

FINGERPRINT_SCATTER = 1.5
"""A factor of what the fingerprint may be off, beside MULTIPLE: a few hundred numbers
estimate a distance with 5% to 10% of scatter."""

FINGERPRINT_FLOOR = (5e-5, 1.0)
"""As LENGTH_FLOOR, for the median tensor's fingerprint. It is no norm's: in fp32 those lose up to
6e-4 of their movement, as they are near 1. True versions are at most 1.3e-5 off in fp32; products
in tf32 make it 1e-4 or more, steps in fp16 3e-4, in bf16 1e-3."""

BUCKETS = 1024
"""Numbers that are kept of each tensor, see `sketch`."""
_CHUNK = 2**22
"""Elements that are sketched at once, so that this takes little memory."""


@dataclass(frozen=True)
class Course:
    """A training run in little: what two runs are compared by, on the CPU in fp64.

    `losses` (steps,); by V1's name of a tensor: `distance`, the norm of its whole movement since
    the initial weights; `moved` and `gradients`, sketches (BUCKETS,) of that movement and of the
    last step's gradient. A tensor without a gradient is not among these. `fingerprint`, (PROBES,)
    numbers, is of the weight itself.
    """

    losses: Tensor
    distance: dict[str, float]
    moved: dict[str, Tensor]
    gradients: dict[str, Tensor]
    fingerprint: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """V1's run on the batches of a run that is audited."""

    course: Course
    own_errors: Mapping[str, float]
    """V1's distances at the precision in use from V1 in higher precision, by kind of measure; those
    of "scores" and "along" with fused attention."""
    name: str
    """As in "V1 in float64"."""
    exact: bool
    """Whether it is V1 in higher precision, and not V1's own timed run."""


def sketch(tensor: Tensor, name: str, seed: int = 0) -> Tensor:
    """BUCKETS numbers whose differences estimate how far two tensors are apart: (BUCKETS,), fp64.
    Only sketches of one name and seed may be compared: they decide the signs.

    A count sketch (Charikar, Chen and Farach-Colton, 2002): each element goes with a random sign
    into one bucket. The expected square of the sketch's norm is that of the tensor's norm, and it
    scatters by sqrt(2 / BUCKETS), 4%.
    """
    flat = tensor.detach().flatten()
    generator = torch.Generator(flat.device).manual_seed(seed ^ zlib.crc32(name.encode()))
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for chunk in flat.split(_CHUNK):
        signs = torch.randint(
            2, chunk.shape, generator=generator, device=flat.device, dtype=torch.int8
        )
        signed = torch.where(signs.bool(), chunk, -chunk).double()
        padding = -len(signed) % BUCKETS
        total += nn.functional.pad(signed, (0, padding)).view(-1, BUCKETS).sum(0)
    return total.cpu()


def fingerprint(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Four numbers of each weight, under V1's names, that depend on all of it: (4,), fp64.

    They are u' W v with random u, v: two weights that differ by D have fingerprints that differ by
    about |D| in each number. It takes a device as long as to read the weights once, and the host
    one launch for each weight.
    """
    weights = canonical.canonical_weights(model)
    # By name, since the numbers drawn are dealt out in turn, and each version has its own order.
    tables = {name: w.reshape(-1, w.shape[-1]) for name, w in sorted(weights.items())}
    first = next(iter(tables.values()))
    generator = torch.Generator(first.device).manual_seed(seed)
    columns = max(table.shape[1] for table in tables.values())
    lengths = torch.tensor([len(table) for table in tables.values()]).repeat(PROBES)
    draw = functools.partial(torch.randn, generator=generator, device=first.device)
    v, u = draw(columns, PROBES).to(first.dtype), draw(int(lengths.sum()) // PROBES).to(first.dtype)
    parts = {table.shape[1]: v[: table.shape[1]] for table in tables.values()}
    with kept_matmul_mode():
        get_precision("fp32", first.device).set_matmul_mode()
        rows = torch.cat([table @ parts[table.shape[1]] for table in tables.values()])
    products = (u * rows.T).flatten()
    numbers = torch.segment_reduce(products, "sum", lengths=lengths.to(first.device))
    of_all = numbers.view(PROBES, -1).T.cpu().double()  # waits for the device
    return dict(zip(tables, of_all, strict=True))


def record(
    model: nn.Module,
    setting: Setting,
    losses: Tensor,
    fingerprint: dict[str, Tensor],
    seed: int = 0,
) -> Course:
    """The course of a run that began with V1's initial weights and has just ended.

    Args:
        losses: of all its steps, (steps,).
        fingerprint: of the weights as they are now.
        seed: of the sketches.
    """
    distance, moved = {}, {}
    initial = canonical.canonical_state(setting.config, setting.seed)
    for name, weight in canonical.canonical_weights(model).items():
        if name in initial:
            movement = weight - initial[name].to(weight.device, weight.dtype)
            distance[name] = movement.double().norm().item()
            moved[name] = sketch(movement, name, seed)
    gradients = {
        name: sketch(gradient, name, seed)
        for name, gradient in canonical.canonical_gradients(model).items()
        if gradient is not None
    }
    if setting.precision.loss_scaling:  # by a factor that is no part of the model
        size = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        gradients = {name: gradient / size for name, gradient in gradients.items()}
    return Course(losses.double().cpu(), distance, moved, gradients, fingerprint)


def train_v1(
    setting: Setting,
    batches: Tensor,
    learning_rate: float,
    *,
    in_higher_precision: bool,
    fused_attention: bool = False,
    probe_seed: int,
    seed: int,
) -> Course:
    """Trains V1 on `batches` (steps, 2, B, T), in higher precision than the setting's or at it;
    with its own attention or with PyTorch's."""
    precision, dtype = setting.precision, torch.float32
    if in_higher_precision:  # no autocast: the weights' own arithmetic
        precision, dtype = get_precision("fp32", setting.device), setting.reference_dtype
    configure_optimizer = versions.load(versions.BASELINE).configure_optimizer
    with kept_matmul_mode():
        precision.set_matmul_mode()
        with torch.device(setting.device):
            model = canonical.build_baseline(setting.config).to(dtype)
        canonical.load_canonical(model, canonical.canonical_state(setting.config, setting.seed))
        if fused_attention:
            fuse_attention(model)
        optimizer = configure_optimizer(model, learning_rate)
        losses = trainer.train_losses(model, optimizer, batches, precision)
        return record(model, setting, losses, fingerprint(model, probe_seed), seed)


def fuse_attention(model: nn.Module) -> None:
    """Replaces the attention of V1's layers by PyTorch's, which is FlashAttention or its like where
    the device has it."""
    layers = [layer for layer in model.modules() if hasattr(layer, "attend")]
    assert layers, "V1's attention has another name"
    for layer in layers:
        vars(layer)["attend"] = functools.partial(
            nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True
        )


# --- the verdict -----------------------------------------------------------------------------


def errors_of(own: Course, exact: Course, fused: Course) -> dict[str, float]:
    """How far V1 is from V1 in higher precision, by kind of measure: which tensor training drives
    off furthest is luck, so the largest counts for all.

    Args:
        fused: V1's run with fused attention; its own in fp32, where no output is rounded.
    """
    tensors = (
        ("movement", own.distance, exact.distance),
        ("direction", own.moved, exact.moved),
        ("gradient", own.gradients, exact.gradients),
    )
    scores = {name: true for name, true in exact.gradients.items() if of_scores(name)}
    runs = (own.gradients, fused.gradients)
    return {
        "loss": _furthest(own.losses, exact.losses),
        "fingerprint": _apart(own.fingerprint, exact),
        **{
            kind: max(_distance(of_own.get(name), true) for name, true in of_exact.items())
            for kind, of_own, of_exact in tensors
        },
        "scores": max(_distance(run.get(name), scores[name]) for run in runs for name in scores),
        "along": max(_off_along(run.get(name), scores[name]) for run in runs for name in scores),
    }


def judge(found: Course, reference: Reference, setting: Setting) -> results.Audit:
    """Compares a timed run with V1's."""
    measures = dict(_measures(found, reference, setting))
    red = {name: measure for name, measure in measures.items() if not measure.passed}
    worst = max(measures, key=lambda name: parity.badness(measures[name]))
    shown = dict.fromkeys(["loss", worst, *red])
    return results.Audit(
        status="fail" if red else "pass",
        failures=[_sentence(name, one, found, reference.course) for name, one in red.items()],
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        reference=reference.name,
        measures={name: parity.as_recorded(measures[name]) for name in shown},
        steps=len(found.losses),
        why="",
    )


def _measures(
    found: Course, reference: Reference, setting: Setting
) -> Iterator[tuple[str, Measure]]:
    course, roundoff = reference.course, setting.precision.unit_roundoff
    fp8 = bool(setting.precision.float8_recipe)

    def measure(
        kind: str,
        error: float,
        multiple: float,
        floor: tuple[float, float],
        *,
        more: float = 0.0,
        most: float = math.inf,
        scatter: float = 1.0,
        of_reference: str = "",
    ) -> Measure:
        own = reference.own_errors[kind]
        # The reference, where it is V1's own run, is itself off.
        its = 0.0 if reference.exact else reference.own_errors[of_reference or kind]
        allowed = scatter * (multiple * own + its) + floor[0] + floor[1] * roundoff + more
        return Measure(error, min(allowed, most), own)

    multiple = FP8_MULTIPLE if fp8 else MULTIPLE
    # Independent roundings of the tokens' losses average out: 1 / sqrt(tokens) remains.
    of_a_mean = ROUNDING_UNITS * roundoff / math.sqrt(setting.batch_size * setting.seq_len)
    error = _furthest(found.losses, course.losses)
    yield "loss", measure("loss", error, multiple, LOSS_FLOOR, more=of_a_mean, most=MOST)
    error = _apart(found.fingerprint, course)
    yield (
        "fingerprint",
        measure("fingerprint", error, MULTIPLE, FINGERPRINT_FLOOR, scatter=FINGERPRINT_SCATTER),
    )
    noise = MOVEMENT_NOISE_FP8 / math.sqrt(setting.config.hidden_dim) if fp8 else 0.0
    for name, far in course.distance.items():
        more = noise if name.endswith("norm.weight") else 0.0  # which has few elements
        error = _distance(found.distance.get(name), far)
        limits = measure("movement", error, MULTIPLE, LENGTH_FLOOR, more=more, most=MOST)
        yield f"movement of {name}", limits
    for name, movement in course.moved.items():
        error = _distance(found.moved.get(name), movement)
        yield f"direction of {name}", measure("direction", error, MULTIPLE, VECTOR_FLOOR)
    for name, gradient in course.gradients.items():
        own = found.gradients.get(name)
        kind = "scores" if of_scores(name) else "gradient"
        limits = measure(
            kind, _distance(own, gradient), multiple, VECTOR_FLOOR, of_reference="gradient"
        )
        yield f"gradient of {name}", limits
        if of_scores(name):
            off = measure("along", _off_along(own, gradient), multiple, VECTOR_FLOOR, most=ALONG)
            yield f"part along V1's of the gradient of {name}", off


def of_scores(name: str) -> bool:
    """Whether a weight's gradient is that of the attention's scores alone."""
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def _furthest(losses: Tensor, true: Tensor) -> float:
    """The largest relative distance of any step's loss."""
    return float(((losses - true).abs() / true).max()) if losses.shape == true.shape else math.inf


def _apart(found: dict[str, Tensor], course: Course) -> float:
    """The distance of a fingerprint from a run's, over how far that run has moved the weights: of
    the median tensor, the root of the mean square over its probes."""
    if found.keys() != course.fingerprint.keys():
        return math.inf
    squares = [
        (found[name] - true).square().mean() / course.distance[name] ** 2
        for name, true in course.fingerprint.items()
    ]
    return float(torch.stack(squares).median().sqrt())


def _distance(found: float | Tensor | None, true: float | Tensor) -> float:
    """The relative distance of two lengths or two sketches; infinite for what is missing."""
    fp64 = functools.partial(torch.as_tensor, dtype=torch.float64)
    return relative_rms(None if found is None else fp64(found), fp64(true))


def _off_along(found: Tensor | None, true: Tensor) -> float:
    """How far the part of a gradient along the true one is from that one's length, as a share."""
    if found is None:
        return math.inf
    return abs(float(found.double() @ true.double() / true.double().square().sum()) - 1)


def _sentence(name: str, measure: Measure, found: Course, course: Course) -> str:
    if name != "loss":
        fused = "gradient of" in name and of_scores(name)
        baseline = "V1 with PyTorch's attention" if fused else parity.V1
        return f"timed run: {measure.sentence(name, baseline)}"
    if len(found.losses) != len(course.losses):
        return f"timed run: {len(found.losses)} steps, V1's {len(course.losses)}"
    apart = ((found.losses - course.losses).abs() / course.losses).nan_to_num(nan=math.inf)
    step = int(apart.argmax())
    here, there = found.losses[step], course.losses[step]
    return f"timed run: loss {here:.4f} in step {step + 1}, V1's {there:.4f}"


def summary(audit: results.Audit) -> str:
    """One line: the verdict and the figures behind it."""
    if audit.status == "not run":
        return audit.why
    line = f"{parity.verdict(audit.failures)}: {audit.steps} steps, compared with {audit.reference}"
    closest = audit.closest()
    if closest is not None:
        line += f"; {parity.closest(*closest)}"
    return line if audit.seconds is None else f"{line} ({audit.seconds:.1f} s)"
