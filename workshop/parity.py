"""The gate: does a version train the same model as V1? Its public names, and its command line.

    python -m workshop.parity --version v2 --config tiny --precision fp32

gate/parity.py has the check, gate/canonical.py V1's names of weights and gradients.
"""

import argparse
import sys
from collections.abc import Iterator

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, versions
from workshop.arguments import parse
from workshop.errors import OutOfMemory
from workshop.gate import gate_size
from workshop.gate.canonical import canonical_gradients, load_canonical
from workshop.gate.parity import ParityReport, Setting, check, check_shape, truth_dtype
from workshop.run import flops, hardware, interpreter, presets, trainer
from workshop.run.precision import get_precision

__all__ = ["ParityReport", "canonical_gradients", "check", "load_canonical", "main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.parity",
        description="Shows whether a version trains the same model as V1. Exit 0: it does; 1: no; "
        "77: the version needs something that is missing here.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", required=True, help=", ".join(versions.available()))
    parser.add_argument("--config", default="tiny", help=", ".join(presets.PRESETS))
    parser.add_argument("--precision", default="auto", help="fp32, tf32, bf16, fp16 or auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--batch-size", type=int, default=3, help="sequences")
    parser.add_argument("--seq-len", type=int, default=65, help="tokens of a sequence")
    parser.add_argument("--verbose", action="store_true", help="print every measure")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parse(_parser(), argv)
    return errors.exit_status(
        lambda: _show(arguments), interrupted="interrupted before the comparison was complete"
    )


def _show(arguments: argparse.Namespace) -> int:
    report = _check_version(arguments)
    print(f"{arguments.version} {arguments.config} {report.precision} on {report.device}, ", end="")
    print(f"against {report.reference}: {report.summary()}")
    for line in _measure_lines(report) if arguments.verbose else ():
        print(line)
    for failure in report.failures:
        print(f"  {failure}")
    return errors.DONE if report.passed else errors.ANSWER_IS_NO


def _measure_lines(report: ParityReport) -> Iterator[str]:
    for name, m in report.measures.items():
        yield f"  {name:55} error {m.error:.2e}  allowed {m.allowed:.2e}  V1 {m.baseline:.2e}"


def _check_version(arguments: argparse.Namespace) -> ParityReport:
    module = versions.load(arguments.version)
    config = module.TinyLlamaConfig(**presets.get_preset(arguments.config).model())
    device = hardware.get_device(arguments.device)
    interpreter.check_device(versions.get_version(arguments.version), device)
    precision = get_precision(arguments.precision, device)
    seed, batch_size, seq_len = arguments.seed, arguments.batch_size, arguments.seq_len
    setting = Setting(config, precision, device, seed, batch_size, seq_len)
    check_shape(setting)
    _check_memory(setting)
    try:
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
    except (RuntimeError, MemoryError) as error:
        asked = trainer.memory_asked_for(error)
        if asked is None:
            raise
        raise _out_of_memory(setting, f"a further {asked} was asked for") from None


def _check_memory(setting: Setting) -> None:
    """Refuses at once what can't fit, by a low bound: the training state of V1 in high precision,
    and what one of its steps keeps for the backward pass. A CPU that runs out of memory ends the
    process without a word."""
    config, shape = setting.config, (setting.batch_size, setting.seq_len)
    state = 4 * flops.parameter_count(config)  # weights, gradients, two moments
    kept = gate_size.activations(config, *shape, scores=True)
    needed = truth_dtype(setting).itemsize * (state + kept)
    available = hardware.memory_bytes(setting.device)
    if available is not None and needed > available:
        bound = f"at least {needed / 1e9:,.1f} GB of {available / 1e9:,.1f} needed"
        raise _out_of_memory(setting, bound)


def _out_of_memory(setting: Setting, what: str) -> OutOfMemory:
    return OutOfMemory(
        f"out of memory on {hardware.device_name(setting.device)}: {what} at --batch-size "
        f"{setting.batch_size} and --seq-len {setting.seq_len}; lower them, or take a smaller "
        "--config"
    )


if __name__ == "__main__":
    sys.exit(main())
