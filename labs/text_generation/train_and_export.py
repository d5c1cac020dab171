"""Trains Tiny-LLaMA on text, each byte a token, and saves it as a Hugging Face Llama for lm_gen.py.

The step is the version's own and the harness runs it; here are the learning rate and the end of the
training. export.py saves the model.
"""

import argparse
import dataclasses
import math
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from torch import nn

from labs.text_generation import export
from workshop import errors, request, results, versions
from workshop.arguments import count, parse
from workshop.errors import WorkshopError
from workshop.gate import canonical
from workshop.run import data, hardware, presets, trainer

SIZES = presets.Preset(128, 4, 4, seq_len=320, batch_size=4)
"""For minutes on two cores."""
SHARED = ("learning_rate", "seed", "device", "precision")
"""Flags that are handed to the version's own."""
ROUND = 10
"""Steps at one learning rate, between two looks at the clock."""
SECONDS_OF_SILENCE = 10.0
WARMUP_SHARE = 0.05
"""Share of the training in which the learning rate rises; a cosine to 0 follows."""
FOLDER = results.DEFAULT_FOLDER / "text_generation" / "tiny_llama"


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 done, 1 memory ran out, 2 wrong usage, 77 something is missing on "
        "this machine, 130 interrupted (what is trained so far is saved).",
    )
    add = parser.add_argument
    number = partial(add, type=count, metavar="N")
    add("--version", choices=versions.available(), default="v2", help="of the ladder (default v2)")
    add("--minutes", type=float, default=3.0, metavar="M", help="how long it trains (default 3)")
    number("--steps", help="train N steps instead, however long they take")
    add("--config", metavar="PRESET", help=f"{', '.join(presets.PRESETS)}: model, batch size and "
        f"sequence length (default: {SIZES.hidden_dim} wide, {SIZES.num_layers} layers, "
        f"{SIZES.batch_size} x {SIZES.seq_len} bytes a step)")  # fmt: skip
    number("--batch-size", help="sequences a step")
    number("--seq-len", help="bytes of a sequence, and the model's positions")
    add("--learning-rate", type=float, default=1.5e-3, metavar="X",
        help="AdamW's highest (default 0.0015)")  # fmt: skip
    add("--text-file", "--data", type=Path, metavar="FILE",
        help="the text, byte by byte (default: the Python standard library's sources)")  # fmt: skip
    add("--seed", type=int, default=42, help="of weights and batches (default 42)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add("--precision", default="auto", help="fp32, tf32, bf16, fp16 or auto (default auto)")
    add("--output-dir", type=Path, default=FOLDER, metavar="FOLDER",
        help="becomes the model (default: results/text_generation/tiny_llama here)")  # fmt: skip
    add("--replace", action="store_true", help="an earlier model that is in --output-dir")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Trains and saves from the command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: run(arguments), interrupted="interrupted: nothing saved")


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.minutes < 1e5:
        raise WorkshopError(f"--minutes {arguments.minutes}: it must be positive, below 100,000")
    errors.require(*export.PACKAGES)
    asked = _request(arguments)
    return request.within_memory(asked, lambda: _train_and_save(asked, arguments))


def _request(arguments: argparse.Namespace) -> request.Request:
    """The run in the version's own flags, checked as its program checks them."""
    version = versions.get_version(arguments.version)
    module = versions.load(version.key)
    preset = presets.get_preset(arguments.config) if arguments.config else SIZES
    seq_len = arguments.seq_len or preset.seq_len
    values = preset.model() | {
        "vocab_size": export.VOCABULARY,
        "batch_size": arguments.batch_size or preset.batch_size,
        "seq_len": seq_len,
        "max_seq_len": seq_len,  # positions that were never trained give nonsense
        **{name: getattr(arguments, name) for name in SHARED},
    }
    # A captured step would keep the learning rate that it was captured with.
    words = ["--no-cuda-graph", *(f"--{k.replace('_', '-')}={v}" for k, v in values.items())]
    parser = request.build_parser(version, module)
    return request.check_arguments(version, module, parser.parse_args(words))


def _train_and_save(asked: request.Request, arguments: argparse.Namespace) -> int:
    corpus = data.read_corpus(arguments.text_file)
    export.prepare(arguments.output_dir, arguments.replace)  # after all that is checked without it
    request.print_configuration(asked, {"name": corpus.name})
    model = asked.build()
    canonical.load_canonical(model, canonical.canonical_state(asked.config, arguments.seed))
    losses: list[float] = []
    start, status = time.monotonic(), errors.DONE
    try:
        _train(asked, model, corpus, losses, arguments)
    except KeyboardInterrupt:
        if not losses:
            raise
        status = errors.INTERRUPTED
    seconds = time.monotonic() - start
    record = {
        "version": asked.version.key,
        "config": dataclasses.asdict(asked.config),
        "batch_size": asked.batch_size,
        "learning_rate": arguments.learning_rate,
        "seed": arguments.seed,
        "precision": asked.precision.name,
        "device": hardware.device_name(asked.device),
        "data": corpus.name,
        "software": results.describe_software(),
        "git_commit": results.git_commit(),
        "seconds": round(seconds, 1),
        "losses": results.finite(losses),
    }
    export.save(model, arguments.output_dir, record)
    interrupted = "interrupted: " if status else ""
    print(f"{interrupted}{len(losses):,} steps in {seconds:.0f} s. Model: {arguments.output_dir}")
    return status


def _train(
    asked: request.Request,
    model: nn.Module,
    corpus: data.Corpus,
    losses: list[float],
    arguments: argparse.Namespace,
) -> None:
    """Trains until the steps or the minutes are over; adds each step's loss to `losses`."""
    asked.precision.set_matmul_mode()
    optimizer = asked.module.configure_optimizer(model, arguments.learning_rate)
    start = told = share = 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * _rate(share)
        left = arguments.steps - len(losses) if arguments.steps else ROUND
        batches = data.text_batches(
            corpus,
            steps=min(ROUND, left),
            batch_size=asked.batch_size,
            seq_len=asked.seq_len,
            vocab_size=asked.config.vocab_size,
            seed=arguments.seed + len(losses),
        )
        losses += trainer.train_losses(model, optimizer, batches, asked.precision).tolist()
        now = time.monotonic()
        start = start or now  # the first round compiles, too: it takes no part of the minutes
        share = (now - start) / 60 / arguments.minutes
        if arguments.steps:
            share = len(losses) / arguments.steps
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
