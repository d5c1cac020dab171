"""The gate: does a version train the same model as V1? Its public names, and its command line.

    python -m workshop.parity --version v2 --config tiny --precision fp32

gate/parity.py has the check, gate/canonical.py V1's names of weights and gradients.
"""

import argparse
import dataclasses
import sys

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, versions
from workshop.arguments import parse
from workshop.errors import OutOfMemory
from workshop.gate import gate_size
from workshop.gate.canonical import canonical_gradients, load_canonical
from workshop.gate.parity import (
    ParityReport,
    Setting,
    check,
    check_shape,
)
from workshop.run import flops, hardware, interpreter, presets, trainer
from workshop.run.precision import LADDER, get_precision

__all__ = ["ParityReport", "canonical_gradients", "check", "load_canonical", "main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.parity",
        description="Shows whether a version trains the same model as V1. Exit 0: it does; 1: no; "
        "77: the version needs something that is missing here.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", required=True, help=", ".join(versions.available()))
    parser.add_argument("--config", default="tiny", help=", ".join(presets.PRESETS))
    parser.add_argument("--precision", default="auto", help=f"{', '.join(LADDER)} or auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--batch-size", type=int, default=3, help="sequences")
    parser.add_argument("--seq-len", type=int, default=65, help="tokens of a sequence")
    arguments = parse(parser, argv)
    return errors.exit_status(
        lambda: _show(arguments), interrupted="interrupted before the comparison was complete"
    )


def _show(arguments: argparse.Namespace) -> int:
    report = _check_version(arguments)
    print(f"{arguments.version} {arguments.config} {report.precision} on {report.device}, ", end="")
    print(f"against {report.reference}: {report.summary()}")
    for failure in report.failures:
        print(f"  {failure}")
    return errors.DONE if report.passed else errors.ANSWER_IS_NO


def _check_version(arguments: argparse.Namespace) -> ParityReport:
    module = versions.load(arguments.version)
    of_v1 = versions.load(versions.BASELINE).TinyLlamaConfig
    sizes = dataclasses.asdict(of_v1(**presets.get_preset(arguments.config).model()))
    config = module.TinyLlamaConfig(**sizes)  # V1's values also where its own defaults differ
    device = hardware.get_device(arguments.device)
    interpreter.check_device(versions.get_version(arguments.version), device)
    precision = get_precision(arguments.precision, device, LADDER)
    seed, batch_size, seq_len = arguments.seed, arguments.batch_size, arguments.seq_len
    setting = Setting(config, precision, device, seed, batch_size, seq_len)
    check_shape(setting)

    def out_of_memory(what: str) -> OutOfMemory:
        return OutOfMemory(
            f"out of memory on {hardware.device_name(device)}: {what} at --batch-size "
            f"{batch_size} and --seq-len {seq_len}; lower them, or take a smaller --config"
        )

    # A low bound: V1's training state in high precision, and what a step keeps to go backward.
    state = 4 * flops.parameter_count(config)  # weights, gradients, two moments
    kept = gate_size.activations(config, batch_size, seq_len, scores=True)
    least_bytes = setting.reference_dtype.itemsize * (state + kept)
    trainer.check_memory(device, least_bytes, out_of_memory)
    with trainer.memory_failure_as(out_of_memory):
        return check(
            module.TinyLlama,
            config,
            precision=precision.name,
            device=device,
            seed=seed,
            batch_size=batch_size,
            seq_len=seq_len,
            configure_optimizer=module.configure_optimizer,
        )


if __name__ == "__main__":
    sys.exit(main())
