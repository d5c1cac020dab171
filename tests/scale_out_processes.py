"""Processes of the lab scale_out, forked from one that has imported PyTorch: a group of them starts
in no time, also by torchrun's agent. test_lab_scale_out.py starts this file, and talks to it in
lines of JSON.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which processes would import for seconds each
import torch.distributed as dist
import torch.distributed.fsdp
from conftest import ODD_SIZES
from stored_runs import lab_run
from torch import Tensor, nn
from torch.distributed import run as torchrun
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from labs import group as groups
from labs.group import RESTARTS, Group, find_group
from labs.scale_out import audit, collectives, gate, loop, request, strategies, train
from labs.scale_out.strategies import Accelerate, Ddp, Fsdp, Strategy, Zero
from workshop import versions
from workshop.gate import canonical, parity
from workshop.judge import turn

PER_PROCESS = 2  # sequences
SIZES = collectives.SIZES
ROOM = 0.8  # of what is allowed, the most that a true training may reach
_zero_backward = Zero.backward
_plain = {name: getattr(Strategy, name) for name in ("backward", "passes", "prepare", "update")}
_load, _synchronised = loop.Training.load, Ddp.synchronised


# --- planted faults ------------------------------------------------------------------------------


def on_rank_1() -> bool:
    return dist.get_rank() == 1


def reads_anothers_batch(group: Group, batch: Tensor, dim: int) -> Tensor:
    return batch.narrow(dim, 0, batch.shape[dim] // group.size)


def summed_gradients(self: Ddp, plain: nn.Module) -> nn.Module:
    def add(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    engine = nn.parallel.DistributedDataParallel(plain)
    engine.register_comm_hook(None, add)
    return engine


def never_synchronised(self: Ddp, last: bool) -> object:
    return self.engine.no_sync()


def update_skipped(self: Fsdp) -> None:
    if not on_rank_1():
        self.optimizer.step()


def last_bit_differs(self: Strategy) -> None:
    _plain["update"](self)
    if on_rank_1():
        weight = self.plain.norm.weight.data
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))


def dropped_loss(self: Strategy, loss: Tensor) -> None:
    _plain["backward"](self, loss * (0.0 if on_rank_1() else 1.0))


def zero_drops_loss(self: Zero, loss: Tensor) -> None:
    _zero_backward(self, loss * (0.0 if on_rank_1() else 1.0))


def undivided_parts(self: Strategy, loss: Tensor) -> None:
    loss.backward()


def last_part_alone(self: Strategy, loss: Tensor) -> None:
    self.clear_gradients()
    _plain["backward"](self, loss)


def stale_all_gather(self: Fsdp) -> None:
    """The next pass's weights are gathered before the update."""
    for module in self.engine.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    self.optimizer.step()


def other_weights(self: Strategy, weights: strategies.Weights, rate: float) -> object:
    if on_rank_1():
        weights = {name: weight * 1.01 for name, weight in weights.items()}
    return _plain["prepare"](self, weights, rate)


def accelerate_never_averages(self: Accelerate, last: bool) -> object:
    return self.accelerator.no_sync(self.engine)


def other_rate(self: Strategy, weights: strategies.Weights, rate: float) -> object:
    return _plain["prepare"](self, weights, rate * (1.01 if on_rank_1() else 1.0))


# Faults of the timed run alone, most of them after its third step.


def is_late(self: Any, calls: int = 1) -> bool:
    """Whether three steps are over, each of some calls; it counts its own calls."""
    self.calls = getattr(self, "calls", 0) + 1
    return bool(self.calls > 3 * calls)


def late(wrong: Callable[..., Any], true: Callable[..., Any], calls: int = 1) -> Callable[..., Any]:
    """A fault that begins after three steps."""

    def planted(self: Any, *arguments: Any, **named: Any) -> Any:
        return (wrong if is_late(self, calls) else true)(self, *arguments, **named)

    return planted


def targets_shifted_late(self: loop.Training) -> None:
    _load(self)
    if self.done >= 3:
        self.inputs[1] = self.inputs[1].roll(-1, 1)


def losses_of_rank_0(self: loop.Training) -> list[float]:
    return [float(loss) for loss in self.losses()]


def every_second_update(self: Strategy) -> None:
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls % 2:
        _plain["update"](self)


def one_gradient_doubled_late(self: Strategy) -> None:
    if is_late(self):
        self.plain.norm.weight.grad.mul_(2)
    _plain["update"](self)


def rounded_weights_late(self: Strategy) -> None:
    _plain["update"](self)
    if is_late(self):
        for weight in self.plain.parameters():
            weight.data.copy_(weight.data.bfloat16())


def last_sequence_left_out(
    self: Strategy, tokens: Tensor, targets: Tensor, *more: object
) -> Tensor:
    return _plain["passes"](self, tokens[:-1], targets[:-1], *more)


def faster(self: Strategy, weights: strategies.Weights, rate: float) -> object:
    return _plain["prepare"](self, weights, rate * 1.05)


@dataclasses.dataclass(frozen=True)
class Case:
    strategy: str = "ddp"
    accumulate: int = 1
    version: str = "v2"
    precision: str = "fp32"
    owner: type = Strategy
    name: str = ""
    fault: Callable[..., object] | None = None
    flags: str = ""


def fault(strategy: str, owner: type, name: str, wrong: Callable[..., object],
          accumulate: int = 1, flags: str = "") -> Case:  # fmt: skip
    return Case(strategy, accumulate, owner=owner, name=name, fault=wrong, flags=flags)


FAULTS = {
    "a rank reads another's batch": fault("ddp", Group, "part", reads_anothers_batch),
    "gradients are summed": fault("ddp", Ddp, "wrap", summed_gradients),
    "a shard's update is skipped": fault("fsdp", Strategy, "update", update_skipped),
    "a copy differs in its last bit": fault("ddp", Strategy, "update", last_bit_differs),
    "a rank's loss is dropped": fault("fsdp", Strategy, "backward", dropped_loss),
    "parts are not divided": fault("fsdp", Strategy, "backward", undivided_parts, 2),
    "only the last part counts": fault("ddp", Strategy, "backward", last_part_alone, 2),
    "the all-gather is stale": fault("fsdp", Strategy, "update", stale_all_gather),
    "a shard has other weights": fault("fsdp", Strategy, "prepare", other_weights),
    "a rank has another rate": fault("ddp", Strategy, "prepare", other_rate),
}
LATE_FAULTS = {
    "all ranks train rank 0's sequences": fault("ddp", Group, "part", reads_anothers_batch),
    "targets are shifted": fault("ddp", loop.Training, "load", targets_shifted_late),
    "the losses are rank 0's": fault("ddp", loop.Training, "all_losses", losses_of_rank_0),
    "no all-reduce": fault("ddp", Ddp, "synchronised", late(never_synchronised, _synchronised)),
    "every second update": fault("fsdp", Strategy, "update", every_second_update),
    "a gradient is doubled": fault("ddp", Strategy, "update", one_gradient_doubled_late),
    "weights are rounded": fault("ddp", Strategy, "update", rounded_weights_late),
    "a sequence is left out": fault("ddp", Strategy, "passes", last_sequence_left_out),
    "the last part alone": fault(
        "ddp", Strategy, "backward", late(last_part_alone, _plain["backward"], 2), 2
    ),
    "a rate 5% higher": fault("fsdp", Strategy, "prepare", faster),
}
TRUE = {
    "v1 ddp": Case(version="v1"),
    "v2 ddp bf16 parts": Case(accumulate=2, precision="bf16", flags="--reduce-dtype bf16"),
    "v4 ddp": Case(version="v4"),
    "v1 fsdp": Case("fsdp", version="v1"),
    "v2 fsdp parts": Case("fsdp", 2),
    "v4 fsdp bf16 parts": Case("fsdp", 2, "v4", "bf16"),
    "v2 fsdp reduced in bf16": Case("fsdp", 2, precision="bf16", flags="--reduce-dtype bf16"),
}
if all(map(importlib.util.find_spec, ("accelerate", "transformers"))):
    FAULTS["accelerate does not average"] = Case(
        "accelerate-ddp", 1, "hf", "fp32", Accelerate, "synchronised", accelerate_never_averages
    )
    TRUE["accelerate ddp bf16 parts"] = Case("accelerate-ddp", 2, "hf", "bf16")
ZERO = {f"zero{stage}": Case(f"zero{stage}", accumulate=2) for stage in (1, 2, 3)}
ZERO_FAULTS = {
    "zero1 reads another's batch": fault("zero1", Group, "part", reads_anothers_batch),
    "zero2 drops a rank's loss": fault("zero2", Zero, "backward", zero_drops_loss),
    "zero3 has another rate": fault("zero3", Strategy, "prepare", other_rate),
}
if strategies.missing("fsdp", torch.device("cpu")):  # PyTorch 2.6
    for group in (FAULTS, LATE_FAULTS, TRUE):
        for name in [name for name, case in group.items() if case.strategy == "fsdp"]:
            del group[name]
CASES = FAULTS | LATE_FAULTS | TRUE | ZERO | ZERO_FAULTS


# --- what a process does -------------------------------------------------------------------------


def check_cases(names: list[str], target: Path) -> int:
    """Runs the gate on each case, the audit alone on those of LATE_FAULTS; writes each one's
    failures."""
    parity.references = _remembering(parity.references)
    audit.train_reference = _remembering(audit.train_reference)
    groups.join(find_group(), torch.device("cpu"))
    found = {}
    for name in names:
        case = CASES[name]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ))  # accelerate changes it
            if case.fault:
                stack.enter_context(mock.patch.object(case.owner, case.name, case.fault))
            found[name] = _check(name)
    if dist.get_rank() == 0:
        target.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def _check(name: str) -> list[str]:
    case = CASES[name]
    words = f"--version {case.version} --strategy {case.strategy} --accumulate {case.accumulate} "
    words += f"--precision {case.precision} --device cpu --compile none {case.flags} "
    words += "--warmup-steps 2 --num-steps 6"
    job = request.read(words.split())
    asked = dataclasses.replace(
        job.asked,
        config=job.asked.module.TinyLlamaConfig(**ODD_SIZES),
        batch_size=PER_PROCESS * job.group.size,
        seq_len=33,
    )
    job = dataclasses.replace(job, asked=asked)
    failures = [] if name in LATE_FAULTS else _gate(job)
    failures += _audit(job) if name in LATE_FAULTS | TRUE | ZERO else []
    return failures + (_sent_in_fp32(job) if "--reduce-dtype" in case.flags else [])


def _gate(job: request.Job) -> list[str]:
    asked = job.asked
    questions = gate.Gate(audit.setting_of(job), job.parts, asked.compile_mode != "none", seed=0)
    found: list[str] = []

    def judge(show: Callable[..., Any]) -> bool:
        found.extend(questions.judge(turn.asking(show)).failures)
        return not found

    gate.passes(job, judge)
    return groups.of_first(found)


def _audit(job: request.Job) -> list[str]:
    asked = job.asked
    strategy = job.make_strategy(asked)
    initial = canonical.canonical_state(asked.config, asked.arguments.seed)
    strategy.prepare(initial, job.arguments.learning_rate)
    shape = asked.schedule.steps, 2, asked.batch_size, asked.seq_len
    generator = torch.Generator().manual_seed(asked.arguments.seed)
    batches = torch.randint(asked.config.vocab_size, shape, generator=generator)
    setting, rate = audit.setting_of(job), job.arguments.learning_rate
    steps = batches[: asked.schedule.steps]
    # Cases of one setting share a reference, and so its sketches' seed.
    job.turn.check = audit.Check(audit.Round(setting, steps, rate, seed=0), None)
    training = loop.Training(job, strategy, batches, None, {})
    training.get_ready()
    training.train()
    trained, run = audit.record(job, strategy), lab_run()
    if job.group.is_first:
        job.turn.answer(functools.partial(audit.show, setting, trained), run)
    found = groups.of_first(run.audit)
    assert found.status == ("fail" if found.failures else "pass")
    _, error, allowed = found.closest() or ("", 0.0, 1.0)
    return found.failures or [f"{error} of {allowed}"] * (error > ROOM * allowed)


def _sent_in_fp32(job: request.Job) -> list[str]:
    """The gradients that are no numbers of bf16, though they came from others in it."""
    strategy = job.make_strategy(job.asked)
    strategy.prepare(canonical.canonical_state(job.asked.config, 0), 1e-3)
    tokens = torch.arange(PER_PROCESS * 33).view(PER_PROCESS, 33)
    strategy.passes(tokens, tokens)
    found = strategy.gradients()
    return [name for name, gradient in found.items() if not gradient.equal(gradient.bfloat16())]


def _remembering(references: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def remembered(setting: parity.Setting, *more: object) -> object:
        key = f"{dataclasses.astuple(setting)}"
        if key not in known:
            known[key] = references(setting, *more)
        return known[key]

    return remembered


# --- a training that is killed -------------------------------------------------------------------


def train_until_killed(words: list[str], log: str) -> int:
    """Trains, and notes each step of rank 0 in `log`. Rank 1 is killed in its fifth step; started
    again, while it saves its third checkpoint; then no more."""
    attempt = int(os.environ.get("SLURM_RESTART_COUNT") or os.environ[RESTARTS[0]])
    advance, passes, write = loop.Training.advance, Strategy.passes, FileSystemWriter.write_data
    mine = os.environ["RANK"] == "1"

    def noted(self: loop.Training) -> None:
        advance(self)
        if not mine:
            with Path(log).open("a") as file:
                print(attempt, self.first + self.done, file=file)

    def killed_in_step(self: Strategy, *batch: object) -> Tensor:
        loss = passes(self, *batch)
        self.trained = getattr(self, "trained", 0) + 1
        if self.trained == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def killed_in_save(self: FileSystemWriter, *parts: object) -> object:
        done = write(self, *parts)
        done.wait()
        if "step_00000006" in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(loop.Training, "advance", noted))
        if mine and attempt == 0:
            stack.enter_context(patch(Strategy, "passes", killed_in_step))
        if mine and attempt == 1:
            stack.enter_context(patch(FileSystemWriter, "write_data", killed_in_save))
        return train.main(words)


def send_wrong(words: list[str], wrong: str) -> int:
    """Measures the collectives with a message each; one message leaves out what rank 1 gets."""

    def leave_out(receive: Tensor, send: Tensor) -> None:
        right(receive, send)
        if on_rank_1():
            receive.zero_()

    right = collectives.OPERATIONS.get(wrong, collectives.OPERATIONS["all-reduce"])
    faults = {wrong: leave_out} if wrong else {}
    with mock.patch.dict(collectives.OPERATIONS, faults), mock.patch.dict(SIZES, cpu=[4096]):
        return collectives.main(words)


def launch(size: int, program: str, words: list[str]) -> int:
    """Runs a program in `size` processes, or in this one if that is 0; the highest status."""
    main = {"train.py": train.main, "collectives.py": collectives.main}[Path(program).name]
    if size == 0:
        return main(words)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(size))
    children = []
    for rank in range(size):
        if (number := os.fork()) == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            status = main(words)
            sys.stdout.flush()
            os._exit(status)
        children.append(number)
    return max(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children)


def do(task: dict[str, Any]) -> int:
    if "cases" in task:
        return check_cases(task["cases"], Path(task["words"][0]))
    if "wrong_collective" in task:
        return send_wrong(task["words"], task["wrong_collective"])
    if "log" in task:
        return train_until_killed(task["words"], task["log"])
    return train.main(task["words"])


# --- the server ----------------------------------------------------------------------------------


def torchrun_starts(task: dict[str, Any]) -> int:
    """Starts processes as torchrun does, by forking."""
    words = [*task["torchrun"], "--nproc-per-node", str(task["size"]), "train.py"]
    config, _, _ = torchrun.config_from_args(torchrun.parse_args(words))
    config.start_method = "fork"
    try:
        elastic_launch(config, started_by_torchrun)(task)
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


def started_by_torchrun(task: dict[str, Any]) -> None:
    with Path(task["folder"], "workers").open("a") as file:
        print(os.getpid(), file=file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and not torchrun's own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    sys.exit(do(task))


def child(rank: int, task: dict[str, Any]) -> None:
    """One of a group's processes, or torchrun; never returns."""
    status = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{task['folder']}/{name}{rank}", os.O_CREAT | os.O_WRONLY), number)
        if "torchrun" in task:
            Path(task["folder"], "pid").write_text(str(os.getpid()))
            groups.PATIENCE_S = 10.0  # it ends them
            status = torchrun_starts(task)
        else:
            os.environ.update(task["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
            torch.set_num_threads(1)
            status = do(task)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        for name in task.get("cases", ()):
            versions.load(CASES[name].version)  # that of accelerate imports for seconds
        children = []
        for rank in range(1 if "torchrun" in task else task["size"]):
            if (number := os.fork()) == 0:
                child(rank, task)
            children.append(number)
        ends = [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children]
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    groups.PATIENCE_S = 0.5  # no launcher ends them
    if sys.argv[1:]:  # measure.py has started it
        torch.set_num_threads(1)
        sys.exit(launch(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    serve()
