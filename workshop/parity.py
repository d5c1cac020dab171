"""The gate: does a version train the same model as V1? Its public names, and its command line.

    python -m workshop.parity --version v2 --config tiny --precision fp32
    python -m workshop.parity --model my_llama.py

gate/parity.py has the check, gate/canonical.py V1's names of weights and gradients.
"""

import dataclasses
import sys
from dataclasses import dataclass

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop import errors, versions
from workshop.arguments import option, run
from workshop.errors import OutOfMemory, WorkshopError
from workshop.gate import gate_size
from workshop.gate.canonical import canonical_gradients, load_canonical
from workshop.gate.outcome import Setting, check_shape
from workshop.gate.parity import ParityReport, check
from workshop.run import flops, hardware, interpreter, presets, trainer
from workshop.run.precision import LADDER, get_precision

__all__ = ["ParityReport", "canonical_gradients", "check", "load_canonical", "main"]

MOST_REASONS = 10
"""Lines on what is wrong: one fault may change every gradient."""


@dataclass
class Options:
    """The command line."""

    version: str = option(f"{', '.join(versions.available())}", "")
    model: str = option(
        "a model of your own in the place of a version: what makes it from a version's config "
        "(NAME is TinyLlama unless given)",
        "",
        metavar="FILE.py[:NAME]",
    )
    config: str = option(", ".join(presets.PRESETS), "tiny")
    precision: str = option(f"{', '.join(LADDER)} or auto", "auto")
    device: str = option("auto, cpu, cuda or cuda:N", "auto")
    seed: int = option("of weights and tokens", 0)
    batch_size: int = option("sequences", 3)
    seq_len: int = option("tokens of a sequence", 65)


def main(argv: list[str] | None = None) -> int:
    return run(
        Options,
        _show,
        argv,
        interrupted="interrupted before the comparison was complete",
        prog="python -m workshop.parity",
        description="Shows whether a version, or a model of yours, trains the same model as V1.",
        epilog="A model's file: NAME(config) makes it, of V1's TinyLlamaConfig or of a "
        "TinyLlamaConfig there with V1's fields. Called with tokens it returns the logits, with "
        "tokens and targets the loss. Its weights have V1's names, or `fused_weights` says which "
        "of them one holds. A configure_optimizer there takes the place of V1's. "
        "Exit status: 0 it does, 1 it does not, 2 wrong usage, 77 the version needs something "
        "that is missing here, 130 interrupted.",
    )


def _show(options: Options) -> int:
    report = _check_version(options)
    print(
        f"{options.version or options.model} {options.config} {report.setting.precision.name} on ",
        end="",
    )
    print(f"{report.setting.device}, against {report.setting.reference_name}: {report.summary()}")
    # A missing gradient explains what is wrong elsewhere.
    failures = sorted(report.failures, key=lambda failure: "is missing" not in failure)
    for failure in failures[:MOST_REASONS]:
        print(f"  {failure}")
    if more := failures[MOST_REASONS:]:
        print(f"  and {len(more)} more")
    return errors.DONE if report.passed else errors.ANSWER_IS_NO


def _check_version(options: Options) -> ParityReport:
    if bool(options.version) == bool(options.model):
        raise WorkshopError("--version or --model: one of them")
    device, v1 = hardware.get_device(options.device), versions.load(versions.BASELINE)
    if options.version:
        module = versions.load(options.version)
        build = module.TinyLlama
        interpreter.check_device(versions.get_version(options.version), device)
    else:
        module, build = versions.load_mine(options.model, "TinyLlama")
    sizes = dataclasses.asdict(v1.TinyLlamaConfig(**presets.get_preset(options.config).model()))
    try:  # V1's values also where its own defaults differ
        config = getattr(module, "TinyLlamaConfig", v1.TinyLlamaConfig)(**sizes)
    except TypeError as error:
        raise WorkshopError(
            f"{module.__file__}: TinyLlamaConfig needs V1's fields: {error}"
        ) from None
    precision = get_precision(options.precision, device, LADDER)
    shape = options.batch_size, options.seq_len
    setting = Setting(config, precision, device, options.seed, *shape)
    check_shape(setting)

    def out_of_memory(what: str) -> OutOfMemory:
        return OutOfMemory(
            f"out of memory on {hardware.device_name(device)}: {what} at --batch-size "
            f"{shape[0]} and --seq-len {shape[1]}; lower them, or take a smaller --config"
        )

    # A low bound: V1's training state in high precision, and what a step keeps to go backward.
    state = 4 * flops.parameter_count(config)  # weights, gradients, two moments
    kept = gate_size.activations(config, *shape)
    trainer.check_memory(device, setting.reference_dtype.itemsize * (state + kept), out_of_memory)
    with trainer.memory_failure_as(out_of_memory):
        return check(
            build,
            config,
            precision=precision.name,
            device=device,
            seed=options.seed,
            batch_size=shape[0],
            seq_len=shape[1],
            configure_optimizer=getattr(module, "configure_optimizer", None),
        )


if __name__ == "__main__":
    sys.exit(main())
