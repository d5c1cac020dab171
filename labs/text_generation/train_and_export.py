"""Trains Tiny-LLaMA on text, each byte a token, and saves it as a Hugging Face Llama for lm_gen.py.

The step is the version's own and the harness runs it; here are the learning rate and the end of the
training. export.py saves the model.
"""

import argparse
import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from torch import nn

from labs.text_generation import export
from workshop import arguments, errors, request, results, versions
from workshop.arguments import count, option
from workshop.errors import WorkshopError
from workshop.gate import canonical
from workshop.run import data, deterministic, hardware, presets, trainer

SIZES = presets.Preset(128, 4, 4, seq_len=320, batch_size=4)
"""For minutes on two cores."""
LEARNING_RATE, SEED = 1.5e-3, 42
"""AdamW's highest rate; the seed of weights and batches."""
ROUND = 10
"""Steps at one learning rate, between two looks at the clock."""
SECONDS_OF_SILENCE = 10.0
WARMUP_SHARE = 0.05
"""Share of the training in which the learning rate rises; a cosine to 0 follows."""
FOLDER = results.DEFAULT_FOLDER / "text_generation" / "tiny_llama"


@dataclass
class Options:
    """The command line."""

    version: str = option("of the ladder", "v2", choices=versions.available())
    minutes: float = option("how long it trains", 3.0, metavar="M")
    steps: int | None = option("train N steps instead, however long they take", type=count)
    config: str | None = option(
        f"{', '.join(presets.PRESETS)}: model, batch size and sequence length (default: "
        f"{SIZES.hidden_dim} wide, {SIZES.num_layers} layers, {SIZES.batch_size} x {SIZES.seq_len} "
        "bytes a step)",
        metavar="PRESET",
    )
    seq_len: int | None = option("bytes of a sequence, and the model's positions", type=count)
    text_file: Path | None = option(
        "the text, byte by byte (default: the Python standard library's sources)", metavar="FILE"
    )
    device: str = option("auto, cpu, cuda or cuda:N (default auto: GPU if any)", "auto")
    deterministic: bool = option(deterministic.HELP)
    output_dir: Path = option(
        "becomes the model (default: results/text_generation/tiny_llama here)", FOLDER
    )
    replace: bool = option("an earlier model that is in --output-dir")


def main(argv: list[str] | None = None) -> int:
    """Trains and saves from the command line; returns the exit status."""
    return arguments.run(
        Options,
        run,
        argv,
        interrupted="interrupted: nothing saved",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 memory ran out, 2 wrong usage, 77 something is missing\non "
        "this machine, 130 interrupted (what is trained so far is saved).",
    )


def run(options: Options) -> int:
    if not 0 < options.minutes < 1e5:
        raise WorkshopError(f"--minutes {options.minutes}: it must be positive, below 100,000")
    errors.require(*export.PACKAGES)
    asked = _request(options)
    return request.within_memory(asked, lambda: _train_and_save(asked, options))


def _request(options: Options) -> request.Request:
    """The run in the version's own flags, checked as its program checks them."""
    version = versions.get_version(options.version)
    module = versions.load(version.key)
    preset = presets.get_preset(options.config) if options.config else SIZES
    seq_len = options.seq_len or preset.seq_len
    values = preset.model() | {
        "vocab_size": export.VOCABULARY,
        "batch_size": preset.batch_size,
        "seq_len": seq_len,
        "max_seq_len": seq_len,  # positions that were never trained give nonsense
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
        "device": options.device,
    }
    # A captured step would keep the learning rate that it was captured with.
    words = ["--no-cuda-graph", *(f"--{k.replace('_', '-')}={v}" for k, v in values.items())]
    words += [deterministic.FLAG] if options.deterministic else []
    parser = request.build_parser(version, module)
    return request.check_arguments(version, module, parser.parse_args(words))


def _train_and_save(asked: request.Request, options: Options) -> int:
    corpus = data.read_corpus(options.text_file)
    export.prepare(options.output_dir, options.replace)  # after all that is checked without it
    request.print_configuration(asked, {"name": corpus.name})
    model = asked.build()
    canonical.load_canonical(model, canonical.canonical_state(asked.config, SEED))
    losses: list[float] = []
    start, status = time.monotonic(), errors.DONE
    try:
        _train(asked, model, corpus, losses, options)
    except KeyboardInterrupt:
        if not losses:
            raise
        status = errors.INTERRUPTED
    seconds = time.monotonic() - start
    record = {
        "version": asked.version.key,
        "config": dataclasses.asdict(asked.config),
        "batch_size": asked.batch_size,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
        "precision": asked.precision.name,
        "device": hardware.device_name(asked.device),
        "data": corpus.name,
        "software": results.describe_software(),
        "git_commit": results.git_commit(),
        "seconds": round(seconds, 1),
        "losses": results.finite(losses),
    }
    export.save(model, options.output_dir, record)
    interrupted = "interrupted: " if status else ""
    print(f"{interrupted}{len(losses):,} steps in {seconds:.0f} s. Model: {options.output_dir}")
    return status


def _train(
    asked: request.Request,
    model: nn.Module,
    corpus: data.Corpus,
    losses: list[float],
    options: Options,
) -> None:
    """Trains until the steps or the minutes are over; adds each step's loss to `losses`."""
    asked.precision.set_matmul_mode()
    optimizer = asked.module.configure_optimizer(model, LEARNING_RATE)
    start = told = share = 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _rate(share)
        left = options.steps - len(losses) if options.steps else ROUND
        batches = data.text_batches(
            corpus,
            steps=min(ROUND, left),
            batch_size=asked.batch_size,
            seq_len=asked.seq_len,
            vocab_size=asked.config.vocab_size,
            seed=SEED + len(losses),
        )
        losses += trainer.train_losses(model, optimizer, batches, asked.precision).tolist()
        now = time.monotonic()
        start = start or now  # the first round compiles, too: it takes no part of the minutes
        share = (now - start) / 60 / options.minutes
        if options.steps:
            share = len(losses) / options.steps
        if now - told >= SECONDS_OF_SILENCE or share >= 1:
            mean = sum(losses[-ROUND:]) / len(losses[-ROUND:])
            print(f"{now - start:6.0f} s  step {len(losses):>6,}  loss {mean:.4f}", flush=True)
            told = now


def _rate(share: float) -> float:
    """Share of the highest learning rate, when that share of the training is done."""
    if share < WARMUP_SHARE:
        return (share + WARMUP_SHARE / 10) / (1.1 * WARMUP_SHARE)
    return (1 + math.cos(math.pi * share)) / 2


if __name__ == "__main__":
    sys.exit(main())
