"""The gate: several processes train the model that V1 trains in one, on the same batches.

It is the workshop's gate (workshop/gate/parity.py), applied to all processes together: each runs
its part of every batch, the loss is the mean over all, logits and gradients are gathered under V1's
names. V1 runs whole batches in the first process, and its own distance from the truth at the
precision in use sets the tolerance. Copies of one tensor in several processes must be equal, bit by
bit. The training itself, at its own batch, is compared by audit.py.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from labs.scale_out import group as groups
from labs.scale_out.group import Group
from labs.scale_out.request import Job
from labs.scale_out.strategies import Strategy
from workshop.gate import canonical, gate_size, parity
from workshop.gate.parity import CURVE_STEPS, Outcome, ParityReport, Setting
from workshop.request import Request
from workshop.run import trainer
from workshop.run.precision import get_precision, kept_matmul_mode


def check(job: Job) -> ParityReport:
    """Runs the gate on a job's strategy; returns the same report on all processes.

    All of them have to call it.
    """
    asked, group, parts = job.asked, job.group, job.group.size * job.accumulate
    setting = _setting(asked, group, parts)
    report = parity.new_report(setting)
    if asked.precision.name != "fp32":
        # Faults smaller than a lower precision's roundings show in fp32.
        small = _compared(job, *_small(asked, setting, parts))
        report.measures |= {f"{what} in fp32": m for what, m in small.measures.items()}
        report.failures += [f"{failure} (in fp32, on a small model)" for failure in small.failures]
        report.tensors_total = small.tensors_total
        report.tensors_with_grad = small.tensors_with_grad
    if report.passed:
        found = _compared(job, asked, setting)
        found.measures |= report.measures
        report = found
    return report


def _setting(asked: Request, group: Group, parts: int) -> Setting:
    """One sequence for each part, since the audit compares the run's own batch; the whole batch of
    a compiled model, which would be compiled twice. Fewer tokens where V1 would not fit."""
    eager = asked.compile_mode == "none"
    setting = Setting(
        config=asked.config,
        precision=asked.precision,
        device=asked.device,
        seed=asked.arguments.seed,
        batch_size=parts if eager else asked.batch_size,
        seq_len=asked.seq_len,
    )
    batch_size, seq_len = groups.of_first(gate_size.of_setting(setting))
    whole = max(1, batch_size // parts) * parts  # that the processes can share
    if whole > batch_size:  # no more tokens than fit
        seq_len = min(seq_len, max(gate_size.LEAST[1], batch_size * seq_len // whole))
    return dataclasses.replace(setting, batch_size=whole, seq_len=seq_len)


def _small(asked: Request, setting: Setting, parts: int) -> tuple[Request, Setting]:
    config, precision = parity.small_config(asked.config), get_precision("fp32", asked.device)
    setting = dataclasses.replace(
        setting,
        config=config,
        precision=precision,
        batch_size=parts,
        seq_len=min(setting.seq_len, 65),
    )
    return dataclasses.replace(asked, config=config, precision=precision), setting


def _compared(job: Job, asked: Request, setting: Setting) -> ParityReport:
    at_gate = dataclasses.replace(asked, batch_size=setting.batch_size, seq_len=setting.seq_len)
    report = parity.new_report(setting)
    with kept_matmul_mode():
        candidate = _run(job.make_strategy(at_gate), setting, job.group, report)
    if job.group.is_first:
        with groups.threads_of_all(job.group):
            truth, baseline = parity.references(setting)
        parity.compare(report, setting, parity.Runs(truth, baseline, candidate))
    return groups.of_first(report)


def _run(strategy: Strategy, setting: Setting, group: Group, report: ParityReport) -> Outcome:
    """Runs what the gate runs, in all processes together; adds copies that differ to the report."""
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
    report.failures += unequal_copies("gradient", gradients)

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
    report.failures += unequal_copies("weight", after)
    moved = {name: parity.relative_rms(after[name], before[name]) for name in before}
    updates = {name: after[name] - before[name] for name in before}
    return Outcome(logits, loss, gradients, groups.mean(curve), moved, updates)


def unequal_copies(what: str, tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Compares each process's copies with the first one's, bit by bit; a sentence for each that
    differs. All processes have to call it."""
    own = [name for name, tensor in tensors.items() if tensor is not None]
    of_all = groups.of_all(own)
    differ = []
    for name in own:
        tensor = tensors[name]
        if tensor is not None and all(name in names for names in of_all):
            first = tensor.clone()
            dist.broadcast(first, 0)
            if torch.equal(first, tensor):
                continue
        differ.append(name)
    return [
        f"{what} of {name}: rank {rank}'s differs from rank 0's, or is missing"
        for rank, names in enumerate(groups.of_all(differ))
        for name in names
    ]
