"""The gate: several processes train the model that V1 trains in one, on the same batches.

It is the workshop's gate (workshop/gate/parity.py), applied to all processes together: each runs
its part of every batch, the loss is the mean over all, logits and gradients are gathered under V1's
names. The tolerance follows from V1's own distance to a higher precision. Copies of one tensor in
several processes must be equal, bit by bit. audit.py compares the training itself.
"""

import dataclasses
import functools
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs import group as groups
from labs.group import Group, of_all
from labs.scale_out.request import Job
from labs.scale_out.strategies import Strategy
from workshop.errors import OutOfMemory
from workshop.gate import canonical, gate_size, parity
from workshop.gate.outcome import CURVE_STEPS, Outcome, Setting, small_config
from workshop.gate.parity import ParityReport
from workshop.judge import candidate, wire
from workshop.judge.pipe import Message
from workshop.judge.turn import Shown
from workshop.run import trainer
from workshop.run.precision import get_precision, kept_matmul_mode

_ONE_AT_A_TIME = threading.Lock()
"""A process has one mode of matrix products, and the device the memory of one gate."""


@dataclass(frozen=True)
class Gate:
    """The questions to a group before the clock, and V1's answers."""

    setting: Setting
    """The run's own."""
    parts: int
    """Parts of a batch: each is one sequence, since the audit compares the run's own batch."""
    whole_batch: bool
    """Whether the batch is the run's own: a compiled model would be compiled for another, too."""
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    """The sketches' seed."""

    @classmethod
    def of(cls, job: Job) -> "Gate":
        setting = candidate.setting_of(job.asked, job.arguments.seed)
        return cls(setting, job.parts, job.asked.compile_mode != "none")

    def settings(self) -> dict[str, Setting]:
        """The gate's settings. Faults smaller than a lower precision's roundings show in fp32, on a
        small model. Where V1 would not fit, there are fewer tokens.
        """
        asked, parts = self.setting, self.parts
        batch_size = asked.batch_size if self.whole_batch else parts
        setting = dataclasses.replace(asked, batch_size=batch_size)
        batch_size, seq_len = gate_size.of_setting(setting)
        whole = max(1, batch_size // parts) * parts  # that the processes can share
        if whole > batch_size:  # no more tokens than fit
            seq_len = min(seq_len, max(gate_size.LEAST[1], batch_size * seq_len // whole))
        as_asked = dataclasses.replace(setting, batch_size=whole, seq_len=seq_len)
        if asked.precision.name == "fp32":
            return {"": as_asked}
        small = dataclasses.replace(
            asked,
            config=small_config(asked.config),
            precision=get_precision("fp32", asked.device),
            batch_size=parts,
            seq_len=min(asked.seq_len, 65),
        )
        return {"fp32, on a small model": small, "": as_asked}

    def judge(self, ask: Callable[..., Message]) -> ParityReport:
        """Asks for each part; ends with the first that fails. Raises OutOfMemory: V1 has none."""
        settings = self.settings()
        report = ParityReport(settings[""])
        keep = functools.partial(wire.sketched, seed=self.seed)
        for where, setting in settings.items():
            shape = {"batch_size": setting.batch_size, "seq_len": setting.seq_len}
            shown = ask(small=bool(where), seed=self.seed, **shape)
            report.failures += list(map(str, shown.values["unequal"]))
            with _ONE_AT_A_TIME, trainer.memory_failure_as(_no_memory):
                truth, own = parity.references(setting, keep)
            parity.add(report, parity.Part(setting, where), wire.to_outcome(shown), truth, own)
            if not report.passed:
                break
        return report


def _no_memory(asked: str) -> OutOfMemory:
    return OutOfMemory(f"out of memory: the gate trains V1, too: {asked}; take fewer --num-layers")


def passes(job: Job, judge: Callable[[Callable[..., Shown]], bool]) -> bool:
    """Whether the gate passes. All processes have to call it.

    Args:
        judge: in the first process, asks questions by the function that it is given, which answers
            them with all processes.
    """

    def asked(**question: Any) -> Shown:
        groups.of_first(question)
        return answer(job, **question)

    if job.group.is_first:
        return bool(groups.of_first(judge(asked)))
    told: Any = groups.of_first(None)
    while isinstance(told, dict):
        answer(job, **told)
        told = groups.of_first(None)
    return bool(told)


def answer(job: Job, *, small: bool, seed: int, batch_size: int, seq_len: int) -> Shown:
    """Runs what the gate asks for; all processes have to call it. The first one's answer counts."""
    asked = dataclasses.replace(job.asked, batch_size=batch_size, seq_len=seq_len)
    if small:
        config, precision = small_config(asked.config), get_precision("fp32", asked.device)
        asked = dataclasses.replace(asked, config=config, precision=precision)
    setting = candidate.setting_of(asked, job.arguments.seed)
    unequal: list[str] = []
    with kept_matmul_mode():
        found = _run(job.make_strategy(asked), setting, job.group, unequal)
    tensors, values = wire.of_outcome(wire.sketched(found, seed))
    return tensors, values | {"unequal": unequal}


def _run(strategy: Strategy, setting: Setting, group: Group, unequal: list[str]) -> Outcome:
    """Runs what the gate runs, in all processes together; adds sentences on copies that differ."""
    batches = group.part(setting.batches(1 + CURVE_STEPS), dim=2)
    setting.precision.set_matmul_mode()
    tokens, targets = batches[0]
    strategy.prepare(setting.far_weights(), setting.learning_rate)
    with torch.no_grad(), strategy.autocast():
        logits = groups.joined(strategy(tokens))
    strategy.prepare(setting.random_weights, setting.learning_rate)
    strategy.clear_gradients()
    loss = groups.mean(strategy.passes(tokens, targets))
    gradients = strategy.gradients()
    unequal += unequal_copies("gradient", gradients)

    initial = canonical.canonical_state(setting.config, setting.seed)
    optimizer = strategy.prepare(initial, setting.learning_rate)
    before = {name: weight.clone() for name, weight in strategy.weights().items()}
    try:
        curve = trainer.train_losses(
            strategy, optimizer, batches[1:], setting.precision,
            cuda_graph=strategy.asked.cuda_graph,
        )  # fmt: skip
    except trainer.NoGradient:
        curve = torch.full((CURVE_STEPS,), math.nan)
    after = strategy.weights()
    unequal += unequal_copies("weight", after)
    moved = {name: parity.relative_rms(after[name], before[name]) for name in before}
    updates = {name: after[name] - before[name] for name in before}
    return Outcome(logits, loss, gradients, groups.mean(curve), moved, updates)


def unequal_copies(what: str, tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Compares each process's copies with the first one's, bit by bit; a sentence for each that
    differs. All processes have to call it."""
    own = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    everywhere = set.intersection(*map(set, of_all([*own])))
    differ = [name for name in own if name not in everywhere]
    for name in own:
        if name in everywhere:
            first = own[name].clone()
            dist.broadcast(first, 0)
            differ += [name] * (not torch.equal(first, own[name]))
    return [
        f"{what} of {name}: rank {rank}'s differs from rank 0's, or is missing"
        for rank, names in enumerate(of_all(differ))
        for name in names
    ]
