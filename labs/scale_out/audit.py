"""The audit: did the processes of the timed run together train V1's model?

The gate runs before the clock, on other batches. After the clock has stopped, the workshop's
audit (workshop/gate/audit.py) looks at the training itself: the loss of every step, the movement of
every weight, and AdamW's first moments, which are a mean of the last gradients. All strategies keep
these moments; p2p and ZeRO release the gradients in the update. Weights and moments are gathered
under V1's names, and copies of a weight in several processes must be equal, bit by bit.

The reference is V1 in the first process. It trains on the whole batches, with a step of its own and
without any of the group's functions: in fp32, and for a lower precision also at that one, whose
distance sets the tolerance. Where the whole batch does not fit, V1 passes fewer sequences at once
and adds up their gradients. It needs 16 bytes a parameter, for weights, gradients and moments, and
room for one sequence: a run whose gate fits can be audited.
"""

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labs.scale_out import group as groups
from labs.scale_out import proof
from labs.scale_out.request import Job
from labs.scale_out.strategies import Strategy
from workshop import results, versions
from workshop.gate import audit, canonical, gate_size
from workshop.gate.audit import Course, Reference
from workshop.gate.parity import Setting
from workshop.results import NOT_AUDITED
from workshop.run import trainer
from workshop.run.precision import get_precision, kept_matmul_mode

MOST_STEPS = 200
"""Steps of the longest training that is audited: AdamW carries roundings on, and after many steps
two true trainings are far apart."""


@dataclass
class Trained:
    """The results of a training that its audit compares; without tensors but in the first
    process."""

    losses: list[float]
    """The mean over all processes in each step."""
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """AdamW's first moments. Both are on the host."""
    unequal: list[str]
    """Sentences on copies of a weight that differ."""


def record(job: Job, strategy: Strategy, losses: list[float]) -> Trained:
    """Records a training that has just ended. All processes have to call it."""

    def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not job.group.is_first:
            return {}
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    weights = strategy.weights()
    unequal = proof.unequal_copies("weight", weights)
    return Trained(losses, kept(weights), kept(strategy.mean_gradients()), unequal)


def setting_of(job: Job) -> Setting:
    """The setting that all processes train together."""
    asked = job.asked
    return Setting(
        config=asked.config,
        precision=asked.precision,
        device=asked.device,
        seed=asked.arguments.seed,
        batch_size=asked.batch_size,
        seq_len=asked.seq_len,
    )


def check(job: Job, trained: Trained, batches: Tensor, data: dict[str, Any]) -> results.Audit:
    """The verdict on a training whose memory has been released, the same in all processes,
    which all have to call it.

    Args:
        batches: of all processes and at least all steps, (n, 2, B, T).
        data: identifies the batches.
    """
    found = results.Audit()
    if job.group.is_first:
        begin = time.perf_counter()
        try:
            found = _judge(job, trained, batches[: len(trained.losses)], data)
        except (RuntimeError, MemoryError) as error:
            if trainer.memory_asked_for(error) is None:
                raise
            found.why = f"{NOT_AUDITED}: no memory for V1 in one process"
        found.seconds = time.perf_counter() - begin
    found = groups.of_first(found)
    if trained.unequal:
        found.status, found.failures = "fail", trained.unequal + found.failures
    return found


def _judge(job: Job, trained: Trained, batches: Tensor, data: dict[str, Any]) -> results.Audit:
    setting, rate, folder = setting_of(job), job.arguments.learning_rate, job.arguments.audit
    model = _v1(setting)
    canonical.load_canonical(model, trained.weights)
    course = _course(model, trained.gradients, setting, torch.tensor(trained.losses))
    del model
    path = folder and _path(
        folder,
        config=dataclasses.asdict(setting.config),
        batches=list(batches.shape),
        precision=setting.precision.name,
        seed=setting.seed,
        learning_rate=rate,
        data=data,
    )
    if path and path.exists():
        return audit.judge(course, _load(path), setting)
    with groups.threads_of_all(job.group):
        reference = train_reference(setting, batches, rate)
    if path:
        _save(path, reference)
    return audit.judge(course, reference, setting)


def train_reference(setting: Setting, batches: Tensor, learning_rate: float) -> Reference:
    """Trains V1 in this process alone on whole batches."""
    exact = dataclasses.replace(setting, precision=get_precision("fp32", setting.device))
    truth = _train(exact, batches, learning_rate)
    is_exact = setting.precision.name == "fp32"
    own = truth if is_exact else _train(setting, batches, learning_rate)
    return Reference(truth, audit.errors_of(own, truth), "V1 in fp32", exact=True)


def _path(folder: Path, **facts: object) -> Path:
    """The file of what other trainings of a study with these facts are compared with."""
    key = json.dumps(facts, sort_keys=True, default=str)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"


def _save(path: Path, reference: Reference) -> None:
    with results.atomic_path(path) as temporary:
        torch.save(dataclasses.asdict(reference), temporary)


def _load(path: Path) -> Reference:
    content = torch.load(path, weights_only=True)
    return Reference(**{**content, "course": Course(**content["course"])})


def _train(setting: Setting, batches: Tensor, learning_rate: float) -> Course:
    model, losses = _v1(setting), []
    canonical.load_canonical(model, canonical.canonical_state(setting.config, setting.seed))
    optimizer = versions.load(versions.BASELINE).configure_optimizer(model, learning_rate)
    sequences, seq_len = gate_size.of_setting(setting)
    at_once = sequences if seq_len == setting.seq_len else 1
    with kept_matmul_mode():
        setting.precision.set_matmul_mode()
        for tokens, targets in batches:
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
    return _course(model, moments, setting, torch.stack(losses))


def _v1(setting: Setting) -> nn.Module:
    with torch.device(setting.device):
        return canonical.build_baseline(setting.config)


def _course(
    model: nn.Module, gradients: dict[str, Tensor], setting: Setting, losses: Tensor
) -> Course:
    for name, weight in model.named_parameters():
        weight.grad = gradients[name].to(weight.device)
    return audit.record(model, setting, losses, audit.fingerprint(model, seed=0))
