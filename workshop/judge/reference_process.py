"""A process in which V1 answers for the judge what others are compared with.

It answers the gate's and the audit's questions for V1 in higher precision and at the precision in
use, before any candidate starts, so that a device's memory holds either it or a candidate.
"""

import dataclasses

import torch

from workshop import errors, versions
from workshop.gate import audit, canonical, gate_size, parity
from workshop.judge import wire
from workshop.judge.pipe import Message, Pipe
from workshop.run import hardware, trainer
from workshop.run.precision import LADDER, get_precision


def main() -> int:
    return errors.exit_status(lambda: _serve(Pipe.to_judge()), interrupted="interrupted")


def _serve(pipe: Pipe) -> int:
    values = pipe.receive().values
    config = versions.load(versions.BASELINE).TinyLlamaConfig(**values["config"])
    device = torch.device(values["device"])
    precision = get_precision(values["precision"], device, LADDER)
    shape = values["batch_size"], values["seq_len"]
    setting = parity.Setting(config, precision, device, values["seed"], *shape)
    _describe(pipe, setting)
    while (asked := pipe.receive()).kind != "end":
        try:
            answer = _gate if asked.kind == "gate" else _train
            answer(pipe, setting, asked)
        except (RuntimeError, MemoryError) as error:
            if trainer.memory_asked_for(error) is None:
                raise
            pipe.send("no memory")
        if setting.device.type == "cuda":  # the candidates' memory
            torch.cuda.empty_cache()
    return errors.DONE


def _describe(pipe: Pipe, setting: parity.Setting) -> None:
    """Sends what the gate may be run on here, the sizes of V1's tensors, and the device's peak."""
    with torch.device("meta"):
        named = canonical.build_baseline(setting.config).named_parameters()
        sizes = {name: parameter.numel() for name, parameter in named}
    tflops, source = hardware.peak(setting.device, setting.precision)
    pipe.send(
        "described",
        shape=gate_size.of_setting(setting),
        sizes=sizes,
        peak_tflops=tflops,
        peak_source=source,
    )


def _gate(pipe: Pipe, setting: parity.Setting, asked: Message) -> None:
    values = asked.values
    setting = dataclasses.replace(
        setting, batch_size=values["batch_size"], seq_len=values["seq_len"]
    )
    part = parity.parts(setting)[values["part"]]
    found = parity.references(part.setting, lambda one: wire.sketched(one, values["sketch_seed"]))
    for outcome in found:
        tensors, of_outcome = wire.of_outcome(outcome)
        pipe.send("outcome", tensors, **of_outcome)


def _train(pipe: Pipe, setting: parity.Setting, asked: Message) -> None:
    values = asked.values
    course = audit.train_v1(
        setting,
        asked.tensors["batches"].long(),
        values["learning_rate"],
        in_higher_precision=values["exact"],
        fused_attention=values["fused"],
        probe_seed=values["probe_seed"],
        seed=values["sketch_seed"],
    )
    tensors, of_course = wire.of_course(course)
    pipe.send("course", tensors, **of_course)
