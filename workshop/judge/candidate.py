"""The side that is judged: it answers what the judge asks, and takes nothing from anywhere else.

It is given every size and constant of the model, its weights as the seed that they are drawn from,
each batch when it has to be used, and the seeds of sketches when the work is done.
"""

import dataclasses
import time
from typing import Any

from torch import nn

from workshop import errors
from workshop.gate import audit, canonical, parity
from workshop.gate.outcome import loss_and_gradients
from workshop.judge import wire
from workshop.judge.pipe import Message, Pipe
from workshop.request import Request
from workshop.run import startup, trainer
from workshop.run.precision import kept_matmul_mode
from workshop.run.timing import StepClock


def serve(request: Request, pipe: Pipe) -> int:
    """Answers until the judge has no more questions; the exit status. Raises Closed: the judge is
    gone."""
    asked = pipe.receive().values
    request = dataclasses.replace(
        request,
        config=request.module.TinyLlamaConfig(**asked["config"]),
        batch_size=asked["batch_size"],
        seq_len=asked["seq_len"],
    )
    startup.watch_compilers(torch_compile=request.compile_mode != "none")
    model, setup_s = request.build(), {"gate": 0.0}
    while (message := pipe.receive()).kind != "end":
        if message.kind == "gate":
            _answer_gate(request, model, pipe, message.values, setup_s)
        elif message.kind == "train":
            _train(request, model, pipe, message, setup_s)
        else:
            _show(request, model, pipe, message)
    return errors.DONE


def _show(request: Request, model: nn.Module, pipe: Pipe, asked: Message) -> None:
    """Sends the weights as they are; or, of the initial ones, the gradients of one batch."""
    if asked.kind == "weights":
        pipe.send("weights", canonical.canonical_weights(model))
        return
    initial = canonical.canonical_state(request.config, asked.values["seed"])
    canonical.load_canonical(model, initial)
    request.precision.prepare(model)
    optimizer = request.module.configure_optimizer(model, asked.values["learning_rate"])
    batch = asked.tensors["batch"].long()
    with kept_matmul_mode():
        request.precision.set_matmul_mode()
        _, found = loss_and_gradients(model, optimizer, request.precision, batch[None])
    pipe.send("gradients", {name: g for name, g in found.items() if g is not None})


def setting_of(request: Request, seed: int, *shape: int) -> parity.Setting:
    """The run's own, with a seed, and with another batch size and sequence length if given."""
    batch_size, seq_len = shape or (request.batch_size, request.seq_len)
    return parity.Setting(
        request.config, request.precision, request.device, seed, batch_size, seq_len
    )


def _answer_gate(
    request: Request, model: nn.Module, pipe: Pipe, asked: dict[str, Any], setup_s: dict[str, float]
) -> None:
    shape = asked["batch_size"], asked["seq_len"]
    setting = setting_of(request, asked["seed"], *shape)
    part = parity.parts(setting)[asked["part"]]
    compiling = "compiling and " if request.compile_mode != "none" else ""
    print(f"gate: {compiling}answering what V1 has answered ...", flush=True)
    start, compiled = time.perf_counter(), startup.compile_seconds()
    with startup.not_counted(kernels=True, graphs=shape == (request.batch_size, request.seq_len)):
        found = parity.answer(
            part,
            model,
            lambda config: dataclasses.replace(request, config=config).build_on(request.device),
            request.module.configure_optimizer,
            cuda_graph=request.cuda_graph,
            notify=lambda what: print(f"gate: {what}", flush=True),
        )
    took = time.perf_counter() - start - (startup.compile_seconds() - compiled)
    setup_s["gate"] += max(0.0, took)
    pipe.send("answered")
    seed = pipe.receive().values["seed"]
    if isinstance(found, list):
        pipe.send("refused", why=found)
    else:
        tensors, values = wire.of_outcome(wire.sketched(found, seed))
        pipe.send("outcome", tensors, **values)


def _train(
    request: Request, model: nn.Module, pipe: Pipe, asked: Message, setup_s: dict[str, float]
) -> None:
    values, batches = asked.values, asked.tensors["batches"].long()
    setting = setting_of(request, values["seed"])
    schedule = trainer.Schedule(values["warmup"], values["timed"], values["phases"])
    canonical.load_canonical(model, canonical.canonical_state(request.config, setting.seed))
    request.precision.set_matmul_mode()
    optimizer = request.module.configure_optimizer(model, values["learning_rate"])
    runner = trainer.Runner(
        model, optimizer, batches, request.precision, cuda_graph=request.cuda_graph
    )
    print(f"warming up for {schedule.warmup} steps ...", flush=True)
    setup_s |= trainer.warm_up(runner, schedule.warmup)
    audit.fingerprint(model, seed=0)  # its kernels are loaded now, not on the judge's clock
    pipe.send("ready")

    go = pipe.receive()
    clock = StepClock(runner.device)
    runner.replace_batches(schedule.warmup, go.tensors["batches"])
    trainer.timed_steps(runner, clock, schedule.timed)
    pipe.send("done", wire.of_fingerprint(audit.fingerprint(model, go.values["seed"])))

    training = trainer.Training(step_ms=clock.durations_ms())
    if runner.device.type == "cuda":  # before the copies that sketches take
        training.memory_mb = runner.memory_mb()
    seed = pipe.receive().values["seed"]
    course = audit.record(model, setting, runner.losses(), {}, seed)
    tensors, of_course = wire.of_course(course)
    pipe.send("course", tensors, **of_course)
    print("audit: measuring memory and phases ...", flush=True)
    trainer.measure_more(runner, schedule, training)
    training.setup_s = {"compile": startup.compile_seconds(), **setup_s}
    pipe.send("details", **dataclasses.asdict(training))
