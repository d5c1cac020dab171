"""The audit: did the processes of the timed run together train V1's model?

The gate runs before the clock, on other batches. After the clock has stopped, the workshop's audit
(workshop/gate/audit.py) compares the training itself with V1's on the whole batches: the loss of
every step, the movement of every weight, and AdamW's first moments, a mean of the last gradients
(ZeRO releases the gradients in the update). V1 trains in the study's own process, or of a training
alone in the first one, with a separate step: in fp32, and for a lower precision also at that one,
with its own attention and with PyTorch's, whose distances set the tolerance. In a study's later
repeats V1 trains at that precision alone.

V1 needs 16 bytes a parameter, for weights, gradients and moments, and room for one sequence: where
the whole batch does not fit, it passes fewer at once and adds up their gradients.
"""

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labs.scale_out.gate import Gate, unequal_copies
from labs.scale_out.request import Job
from labs.scale_out.strategies import Strategy
from workshop import versions
from workshop.gate import audit, canonical, gate_size
from workshop.gate.audit import Course, Reference
from workshop.gate.outcome import Setting
from workshop.judge import candidate, turn, wire
from workshop.judge.pipe import Message
from workshop.judge.turn import Shown
from workshop.labs import LabRun
from workshop.results import NOT_AUDITED
from workshop.run import trainer
from workshop.run.precision import get_precision, kept_matmul_mode

MOST_STEPS = 200
"""Steps of the longest training that is audited: AdamW carries roundings on, and after many steps
two true trainings are far apart."""


@dataclass
class Trained:
    """The results of a training that its audit compares; only the first process has tensors."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """AdamW's first moments. Both are on the host."""
    unequal: list[str]
    """Sentences on copies of a weight that differ."""


def record(job: Job, strategy: Strategy) -> Trained:
    """Records a training that has just ended. All processes have to call it."""
    weights, gradients = strategy.weights(), strategy.mean_gradients()
    unequal = unequal_copies("weight", weights)
    if not job.group.is_first:
        return Trained({}, {}, unequal)
    kept = [
        {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        for tensors in (weights, gradients)
    ]
    return Trained(kept[0], kept[1], unequal)


def setting_of(job: Job) -> Setting:
    """The setting that all processes train together."""
    return candidate.setting_of(job.asked, job.arguments.seed)


def show(setting: Setting, trained: Trained, *, seed: int) -> Shown:
    """Shows a training, whose memory has been released, in little; `seed` is of the sketches and
    the fingerprint."""
    model = _v1(setting)
    canonical.load_canonical(model, trained.weights)
    course = _course(model, trained.gradients, setting, torch.zeros(0), seed)
    tensors, values = wire.of_course(course)
    return tensors, values | {"unequal": trained.unequal}


@dataclass
class Round:
    """Batches that one or more groups train, and V1's training on them."""

    setting: Setting
    batches: Tensor
    """Those of all processes and all steps, (n, 2, B, T)."""
    learning_rate: float
    first: "Round | None" = None
    """One of the same setting, with other batches, which has shown what V1's precision costs."""
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    """The seed of sketches and fingerprint, which a group gets when it has trained."""

    @functools.cached_property
    def reference(self) -> Reference | None:
        """None: V1 has no memory."""
        known = self.first and self.first.reference
        what = self.setting, self.batches, self.learning_rate, self.seed
        try:
            if known:
                return dataclasses.replace(known, course=_train(*what), name="V1", exact=False)
            return train_reference(*what)
        except (RuntimeError, MemoryError) as error:
            if trainer.memory_asked_for(error) is None:
                raise
            return None


class Check(turn.Check):
    """Compares what a group does with what V1 does in this process alone."""

    def __init__(self, round_: Round, gate: Gate | None, warmup: int | None = None) -> None:
        """
        Args:
            warmup: the first steps, whose batches the group knows; all are known without it.
        """
        self._round, self._gate, self._warmup = round_, gate, warmup
        self._losses = torch.zeros(0)

    def prove(self, ask: Callable[..., Message], run: LabRun) -> None:
        if self._gate:
            run.gate = self._gate.judge(ask).record()

    def draw(self) -> Shown:
        if self._warmup is None:
            return {}, {}
        return {"batches": self._round.batches[self._warmup :].int()}, {}

    def take(self, proof: Mapping[str, Tensor]) -> None:
        self._losses = proof.get("losses", self._losses).double().flatten()

    def judge(self, ask: Callable[..., Message], run: LabRun) -> None:
        shown = ask(seed=self._round.seed)
        course = dataclasses.replace(wire.to_course(shown), losses=self._losses)
        start, reference = time.perf_counter(), self._round.reference
        if reference is None:
            run.error = run.audit.why = f"{NOT_AUDITED}: no memory for V1 in one process"
        else:
            run.audit = audit.judge(course, reference, self._round.setting)
        run.audit.seconds = time.perf_counter() - start
        if unequal := list(map(str, shown.values["unequal"])):
            run.audit.status, run.audit.failures = "fail", unequal + run.audit.failures


def train_reference(
    setting: Setting, batches: Tensor, learning_rate: float, seed: int = 0
) -> Reference:
    """Trains V1 in this process alone on whole batches; `seed` is of sketches and fingerprint."""
    exact = dataclasses.replace(setting, precision=get_precision("fp32", setting.device))
    truth = _train(exact, batches, learning_rate, seed)
    own = fused = truth
    if not setting.in_fp32:
        own, fused = (
            _train(setting, batches, learning_rate, seed, fused_attention=fused_attention)
            for fused_attention in (False, True)
        )
    return Reference(truth, audit.errors_of(own, truth, fused), "V1 in fp32", exact=True)


def _train(
    setting: Setting,
    batches: Tensor,
    learning_rate: float,
    seed: int,
    *,
    fused_attention: bool = False,
) -> Course:
    model, losses = _v1(setting), []
    if fused_attention:
        audit.fuse_attention(model)
    canonical.load_canonical(model, canonical.canonical_state(setting.config, setting.seed))
    optimizer = versions.load(versions.BASELINE).configure_optimizer(model, learning_rate)
    sequences, seq_len = gate_size.of_setting(setting)
    at_once = sequences if seq_len == setting.seq_len else 1
    with kept_matmul_mode():
        setting.precision.set_matmul_mode()
        for tokens, targets in batches.long():
            optimizer.zero_grad()
            total = torch.zeros((), device=setting.device)
            for i in range(0, setting.batch_size, at_once):
                part = [whole[i : i + at_once].to(setting.device) for whole in (tokens, targets)]
                with setting.precision.autocast(setting.device.type):
                    loss = model(*part) * (len(part[0]) / setting.batch_size)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            losses.append(total)
    moments = {
        name: optimizer.state[weight]["exp_avg"] for name, weight in model.named_parameters()
    }
    return _course(model, moments, setting, torch.stack(losses), seed)


def _v1(setting: Setting) -> nn.Module:
    with torch.device(setting.device):
        return canonical.build_baseline(setting.config)


def _course(
    model: nn.Module, gradients: dict[str, Tensor], setting: Setting, losses: Tensor, seed: int
) -> Course:
    for name, weight in model.named_parameters():
        weight.grad = gradients[name].to(weight.device)
    return audit.record(model, setting, losses, audit.fingerprint(model, seed), seed)
