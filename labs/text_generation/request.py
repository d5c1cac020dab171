"""The command line of the generation."""

import argparse
import os
from functools import partial
from pathlib import Path

from labs import shared
from labs.text_generation.engines import ENGINES
from workshop.arguments import MOST, count, parse
from workshop.errors import WorkshopError
from workshop.run.precision import PRECISIONS

LAB = "text_generation"
DTYPES = ("auto", *(name for name in PRECISIONS if name != "tf32"))
WORDS = ("model_path", "input_file", "output_file", "num_tokens", "temperature")
DESCRIPTION = """\
Continues prompts with a causal language model from a folder on this machine, and says what a token
costs: its time, and the bytes that are read for it.

    python lm_gen.py --model_path MODEL --input_file prompts.txt
    python lm_gen.py --model_path MODEL --batch_size 2 --num_tokens 1000 --input_file prompts.txt \\
        --temperature 0.95 --output_file out
    lm_gen MODEL INPUT OUTPUT NUM_TOKENS TEMPERATURE
"""
HIDDEN = ("--model_path", "--input_file", "--output_file", "--output-dir", "--copy-gbs")
"""Flags that no record's command has: their values are of this machine."""


def build_parser(engine: str = "hf") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [MODEL INPUT OUTPUT NUM_TOKENS TEMPERATURE] [flags]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 the gate failed or memory ran out, 2 wrong usage, 77 "
        "something is missing\non this machine, 130 interrupted.",
    )
    add = parser.add_argument
    file = partial(add, type=Path, metavar="FILE")
    add("words", nargs="*", help=argparse.SUPPRESS)
    add("--model_path", type=Path, metavar="FOLDER", help="of the model and its tokenizer")
    file("--input_file", help="a prompt a line; or a folder, a prompt a file")
    file(
        "--output_file",
        help="for the texts; FILE.jsonl has them with their times (default: texts are printed)",
    )
    add("--num_tokens", type=count, default=50, metavar="N", help="new ones, at most (default 50)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0 takes the likeliest token, 1 draws as the model says (default 0)",
    )
    add("--batch_size", type=count, default=1, metavar="N", help="prompts at a time (default 1)")
    add("--seed", type=int, default=42, help="of drawn tokens: of the first prompt (default 42)")
    add("--stream", action="store_true", help="print tokens as they come; one prompt at a time")
    add = parser.add_argument_group("how it runs").add_argument
    switch = partial(add, action="store_true")
    add("--engine", choices=ENGINES, default=engine, help=f"default {engine}")
    add("--dtype", choices=DTYPES, default="auto", help="bf16 on a GPU that has it, else fp32")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: GPU if any)")
    add(
        "--device_map",
        metavar="MAP",
        help="accelerate spreads the model over GPUs, CPU and disk: auto, balanced, "
        "balanced_low_0, sequential, or a JSON file",
    )
    switch("--load_in_8bit", help="weights in int8, by bitsandbytes or --engine fast")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="the steps of --engine static (default: on a GPU with a compiler)",
    )
    switch("--kernel_inject", help="of --engine deepspeed: its own kernels")
    switch(
        "--tensor_parallel",
        help="under torchrun: each process has a part of every layer, by PyTorch's own means",
    )
    shared.add_output_dir(add, LAB)
    # The runs of a study have one floor: a busy minute would give one of them another.
    add("--copy-gbs", type=float, help=argparse.SUPPRESS)
    add("--candidate", action="store_true", help=argparse.SUPPRESS)  # of measure_engines.py
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher's
    return parser


def parse_words(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The flags; WORDS may be given by their places alone."""
    arguments = parse(parser, argv)
    words = arguments.words
    if words and len(words) != len(WORDS):
        parser.error(f"give MODEL INPUT OUTPUT NUM_TOKENS TEMPERATURE: {' '.join(words)!r:.80}")
    flags = [f"--{name}={word}" for name, word in zip(WORDS, words, strict=False)]
    arguments = parser.parse_args(flags, arguments)
    for name in WORDS[:2]:
        if getattr(arguments, name) is None:
            parser.error(f"--{name} is missing")
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Raises WorkshopError for numbers out of bounds and flags that do not go together."""
    for name, most in (("temperature", 100), ("seed", MOST)):
        value = getattr(arguments, name)
        if not 0 <= value <= most:
            raise WorkshopError(f"--{name} {value}: it must lie between 0 and {most:,}")
    output = arguments.output_file
    if output and output.resolve() == arguments.input_file.resolve():
        raise WorkshopError(f"--output_file {output} has the prompts: name another file")
    engine = arguments.engine
    if arguments.stream and arguments.batch_size > 1:
        raise WorkshopError("--stream prints one text at a time: leave out --batch_size")
    if arguments.device_map and engine not in ("hf", "static"):
        raise WorkshopError(f"--engine {engine} has no --device_map: leave it out")
    if arguments.load_in_8bit and engine in ("deepspeed", "vllm"):
        raise WorkshopError(f"--engine {engine} has no --load_in_8bit: leave it out")
    if arguments.compile is not None and engine != "static":
        raise WorkshopError("--compile is of --engine static")
    if arguments.kernel_inject and engine != "deepspeed":
        raise WorkshopError("--kernel_inject is of --engine deepspeed")
    several = processes() > 1
    if arguments.tensor_parallel and not several:
        raise WorkshopError(
            "--tensor_parallel takes several processes: torchrun --nproc-per-node 2 lm_gen.py ..."
        )
    if arguments.tensor_parallel and (
        engine not in ("hf", "static") or arguments.device_map or arguments.load_in_8bit
    ):
        raise WorkshopError(
            "--tensor_parallel goes with --engine hf or static, without --device_map and "
            "--load_in_8bit"
        )
    if several and not arguments.tensor_parallel and engine != "deepspeed":
        raise WorkshopError(
            f"{processes()} processes would all do the same: add --tensor_parallel, or take "
            "--engine deepspeed"
        )


def processes() -> int:
    """The number of processes that torchrun or the deepspeed launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
