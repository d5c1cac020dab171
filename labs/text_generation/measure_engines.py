"""Measures and compares the engines, on a Llama of random weights.

    python measure_engines.py
    python measure_engines.py --engines hf fast --batch-sizes 1 --repeats 1

On a GPU it has 1.04 billion weights, on a CPU 3 million. Each run is a separate process; their
order alternates. Long prompts, at the largest batch size, show how fast the pass over them is. The
prompts of a batch have different lengths.
"""

import argparse
import contextlib
import functools
import itertools
import random
import re
import string
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from labs import shared
from labs.group import launcher
from labs.text_generation import export, gate, lm_gen, models, prompts
from labs.text_generation.models import Loaded
from workshop import errors, labs, results
from workshop.arguments import count, parse
from workshop.errors import NotOnThisMachine, WorkshopError
from workshop.judge import lab_record, studies
from workshop.judge.pipe import Closed
from workshop.labs import LabRow, LabRun
from workshop.run import hardware
from workshop.run.precision import get_precision, set_arithmetic
from workshop.run.torchvision import make_importable
from workshop.show import lab_table
from workshop.tables import Line, Table, number

PROGRAM = Path(__file__).with_name("lm_gen.py")
ENGINES: dict[str, tuple[str, ...]] = {
    "hf": (),
    "static": ("--engine", "static", "--no-compile"),
    "static, compiled": ("--engine", "static", "--compile"),
    "fast": ("--engine", "fast"),
    "int8 weights, fast": ("--engine", "fast", "--load_in_8bit"),
    "deepspeed": ("--engine", "deepspeed"),
    "deepspeed, kernel injection": ("--engine", "deepspeed", "--kernel_inject"),
    "vllm": ("--engine", "vllm"),
    "hf, tensor parallel": ("--tensor_parallel",),
    "static, compiled, tensor parallel": ("--engine", "static", "--compile", "--tensor_parallel"),
}
"""lm_gen.py's flags by the variants' names; the others are compared with the first."""
COMPILED = ("static, compiled", "deepspeed, kernel injection", "vllm")
"""Engines whose first process compiles and tunes, or builds kernels."""
OF_SEVERAL = ("deepspeed", "hf, tensor parallel", "static, compiled, tensor parallel")
"""Engines that several processes can share."""
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
    "cpu": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3,
            "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
LONG, LONG_NEW = {"cuda": 2048, "cpu": 256}, 16
"""Tokens of a long prompt, and after it."""
Shape = tuple[int, int, int]
"""Batch size, tokens of the longest prompt, new tokens."""
Kind = tuple[str, int]
"""An engine, and how many processes share it."""
GAIN = 1.6
"""The weights' standard deviation, times the root of the width: what a product with them multiplies
a row's size by. With much less the table of embeddings, which makes the logits too, outweighs all
layers: the last token is the next one, and a fault in a layer shows in none."""


@dataclass(frozen=True)
class Study:
    device: torch.device
    session: str
    folder: Path
    model: Path
    copy_gbs: float
    """The memory's bandwidth."""


def build_parser() -> argparse.ArgumentParser:
    parser = shared.new_parser(__doc__, "a gate or a run failed")
    add = parser.add_argument
    number = functools.partial(add, type=count, metavar="N")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME",
        help=f"of {', '.join(map(repr, ENGINES))} (default: all)")  # fmt: skip
    number("--batch-sizes", nargs="+", default=[1, 8], help="default 1 8")
    number("--prompt-tokens", default=128, help="default 128")
    number("--num-tokens", default=128, help="default 128")
    number("--long-prompt-tokens", help=f"of the prompts that {LONG_NEW} tokens follow (default "
           f"{LONG['cuda']}, CPU {LONG['cpu']})")  # fmt: skip
    number("--processes", default=1, help="that share a model, a GPU each, in rows of their own "
           "(default 1: no such rows)")  # fmt: skip
    shared.add_repeats(add)
    add("--device", default="auto", help="auto, cpu or cuda (default auto: GPU if any)")
    shared.add_output_dir(add, lm_gen.LAB)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures from the command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: measure(arguments), interrupted="interrupted")


def measure(arguments: argparse.Namespace) -> int:
    errors.require("rich", *export.PACKAGES)
    device, asked = hardware.get_device(arguments.device), kinds(arguments)
    there = torch.cuda.device_count()
    if device.type == "cuda" and arguments.processes > there:
        raise NotOnThisMachine(f"--processes {arguments.processes}: this machine has {there} GPUs")
    if not asked:
        raise WorkshopError("--engines: tensor parallel takes --processes 2 or more")
    folder = results.prepare_folder(arguments.output_dir)
    long = arguments.long_prompt_tokens or LONG[device.type]
    shapes = [(n, arguments.prompt_tokens, arguments.num_tokens) for n in arguments.batch_sizes]
    shapes.append((max(arguments.batch_sizes), long, LONG_NEW))
    with tempfile.TemporaryDirectory() as scratch:
        copied = hardware.measure_copy_gbs(device)
        model = make_model(Path(scratch), device, max(prompt + new for _, prompt, new in shapes))
        study = Study(device, results.new_session(), folder, model, copied)
        measured = _runs(arguments, study, list(itertools.product(shapes, asked)))
        runs, interrupted = shared.told(measured, lambda run: shared.ms_and_gate(run, "a token"))
    groups = list(map(ladder, labs.newest(runs)))
    rows = [row for group in groups for row in group]
    shown = [*lab_table.of_labs(groups).tables, *map(costs_table, groups)]
    shared.show(shown, rows, folder / "engines.md")
    return shared.status_of(rows, interrupted)


def kinds(arguments: argparse.Namespace) -> list[Kind]:
    alone = [(name, 1) for name in arguments.engines if "tensor parallel" not in name]
    count = arguments.processes
    return alone + [(name, count) for name in arguments.engines if name in OF_SEVERAL and count > 1]


# --- what is measured ----------------------------------------------------------------------------


def make_model(
    folder: Path, device: torch.device, longest: int, sizes: dict[str, Any] | None = None
) -> Path:
    """Saves a Llama of random weights whose tokens are bytes; its folder, named by its size.

    Args:
        sizes: LlamaConfig's; without them SIZES of the device.
    """
    make_importable()  # transformers imports torchvision
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(42)
    sizes = sizes or SIZES[device.type]
    config = LlamaConfig(
        **sizes, max_position_embeddings=longest, tie_word_embeddings=True,
        initializer_range=GAIN / sizes["hidden_size"] ** 0.5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with device:  # a billion random numbers take a CPU long
        model: Any = LlamaForCausalLM(config)
    model.to(dtype=get_precision("auto", device).autocast_dtype or torch.float32)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    path = folder / f"llama_{millions:.0f}m"
    model.save_pretrained(path)
    export.byte_tokenizer(longest).save_pretrained(path)
    del model
    torch.cuda.empty_cache()  # the engines' processes need the device's memory
    return path


@functools.cache
def _reference(model: Path, device: torch.device, int8: bool) -> Loaded:
    """Hugging Face's model; in int8 with the weights that the fast engine has then."""
    flags = ["--model_path", str(model), "--engine", "fast", *["--load_in_8bit"] * int8]
    precision = get_precision("auto", device)
    set_arithmetic(precision.name)
    arguments = lm_gen.build_parser().parse_args(flags)
    return models.load(arguments, device, precision, contextlib.ExitStack())


def make_prompts(batch: int, size: int, draw: random.Random) -> list[str]:
    """Prompts of random letters, a token each. The first has `size`, the others ever fewer, down
    to half of it: padding is in the batch, as in a service's."""
    lengths = (size - i * size // (2 * batch) for i in range(batch))
    return ["".join(draw.choices(string.ascii_letters, k=length)) for length in lengths]


# --- the runs ------------------------------------------------------------------------------------


def _runs(
    arguments: argparse.Namespace, study: Study, left: list[tuple[Shape, Kind]]
) -> Iterator[LabRun]:
    """Each run as it ends."""
    for shape, kind in [*left]:
        package = kind[0].split(", ")[0]
        try:
            errors.require(*[package] if package in ("deepspeed", "vllm") else [])
        except NotOnThisMachine as missing:
            left.remove((shape, kind))
            yield plan(study, shape, kind).skipped(str(missing))

    def alone(which: tuple[Shape, Kind], repeat: int) -> bool:
        # Compilers time kernels on the device to choose among them; later processes find the
        # choice in their caches. And processes that wait for each other keep their devices busy.
        engine, processes = which[1]
        return processes > 1 or (not repeat and engine in COMPILED)

    repeats, jobs = arguments.repeats, arguments.jobs
    yield from shared.alternating(left, repeats, lambda it, _: plan(study, *it), jobs, alone)


def plan(study: Study, shape: Shape, kind: Kind) -> studies.Plan:
    (batch, size, new), (engine, processes), model = shape, kind, study.model
    path = model.parent / f"prompts_{batch}_{size}.txt"  # of the timed ones' lengths
    path.write_text("\n".join(make_prompts(batch, size, random.Random(0))), encoding="utf-8")
    precision = get_precision("auto", study.device)
    flags = {
        "--model_path": model, "--input_file": path, "--batch_size": batch,
        "--num_tokens": new, "--device": study.device.type, "--copy-gbs": study.copy_gbs,
    }  # fmt: skip
    command = [str(PROGRAM), *ENGINES[engine], *(str(x) for pair in flags.items() for x in pair)]
    planned = lab_record.begin(
        study.device, precision.name, study.session, lm_gen.HIDDEN, command,
        lab=lm_gen.LAB,
        subject=f"{model.name}, batch {batch}, {size} + {new} tokens",
        variant=f"{precision.name}, {engine}" + f", {processes} processes" * (processes > 1),
        unit="tokens", units_per_step=batch, baseline=f"{precision.name}, {next(iter(ENGINES))}",
    )  # fmt: skip
    loaded = _reference(model, study.device, "--load_in_8bit" in ENGINES[engine])
    rows = prompts.encode(make_prompts(batch, size, random.SystemRandom()), loaded, new)
    drawn = prompts.batches(rows, batch, loaded.pad)
    check = gate.Check(loaded, precision, drawn, new, plain_loop=engine == "hf")

    def take_times(run: LabRun, spans: studies.Spans) -> None:
        (times,) = spans
        if len(times) != new:
            raise Closed(f"the process told {len(times)} times of {new} tokens")
        run.step_ms = times[1:]  # the first is the pass over the prompts

    words = [*launcher(processes if processes > 1 else 0), *command]
    return studies.Plan(words, [planned], study.folder, take_times, check)


# --- tables --------------------------------------------------------------------------------------


def ladder(rows: Sequence[LabRow]) -> list[LabRow]:
    """The rows of each subject in the order of ENGINES."""
    subjects, names = list(dict.fromkeys(row.first.subject for row in rows)), list(ENGINES)

    def place(row: LabRow) -> tuple[int, int]:
        engine = re.sub(r"^\w+, |, \d+ processes$", "", row.first.variant)
        known = names.index(engine) if engine in names else len(names)
        return subjects.index(row.first.subject), known

    return sorted(rows, key=place)


def costs_table(rows: Sequence[LabRow]) -> Table:
    """Times: of a token's bytes, of the pass over the prompts, and of compiling."""
    lines = [
        Line([row.label, number(floor := row.metric("floor_ms"), ",.3f"),
              number(row.step_ms / floor if floor and row.step_ms else None, ",.2f"),
              number(row.metric("first_token_ms"), ",.2f"),
              number(row.metric("prefill_tflops"), ",.3g"), number(compile_s(row), ",.1f")])
        for row in rows
        if row.times
    ]  # fmt: skip
    header = ("variant", "floor ms", "times it", "first token ms", "TFLOP/s", "compile s")
    notes = [
        "floor: the bytes of a token at the memory's bandwidth; a token takes so many times it",
        "TFLOP/s: of the pass over the prompts, until the first token is there",
        "compile: in the first process, before the first token",
    ]
    return Table("what a token's bytes take, and the prompts", header, lines, notes, continues=True)


def compile_s(row: LabRow) -> float | None:
    """Later processes find the compilers' caches filled."""
    return max(run.setup_s.get("compile", 0.0) for run in row.runs) or None


if __name__ == "__main__":
    sys.exit(main())
