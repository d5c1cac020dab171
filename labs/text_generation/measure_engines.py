"""Measures the engines beside each other, on a Llama of random weights.

    python measure_engines.py
    python measure_engines.py --batch-sizes 1 --repeats 1

On a GPU it has 1.04 billion weights, on a CPU 3 million. Each run is a process of its own; their
order alternates. The picture has the time of a token, and as a line the least that its bytes allow.
"""

import argparse
import random
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from labs.text_generation import export, request
from workshop import errors, labs, results
from workshop.arguments import count, parse
from workshop.compare import lab_table, tables
from workshop.labs import LabRow, LabRun
from workshop.run import hardware, lab_record, timing, turns
from workshop.run.precision import get_precision
from workshop.run.torchvision import make_importable

PROGRAM = Path(__file__).with_name("lm_gen.py")
ENGINES: dict[str, tuple[str, ...]] = {
    "hf": (),
    "static": ("--engine", "static"),
    "fast": ("--engine", "fast"),
    "int8 weights, fast": ("--engine", "fast", "--load_in_8bit"),
    "deepspeed": ("--engine", "deepspeed"),
    "deepspeed, kernel injection": ("--engine", "deepspeed", "--kernel_inject"),
}
"""As a run's variant has them; the first is the one that the others are compared with."""
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
    "cpu": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3,
            "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
GAIN = 1.6
"""The weights' standard deviation, times the root of the width: what a product with them multiplies
a row's size by. With much less the table of embeddings, which makes the logits too, outweighs all
layers: the last token is the next one, and a fault in a layer shows in none."""


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 a proof is red or a run failed, 2 wrong usage, 77 something "
        "is missing on\nthis machine, 130 interrupted.",
    )
    add = parser.add_argument
    add(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=list(ENGINES),
        metavar="NAME",
        help=f"of {', '.join(map(repr, ENGINES))} (default: all)",
    )
    add("--batch-sizes", nargs="+", type=count, default=[1, 8], metavar="N", help="default 1 8")
    for name, default in (("prompt-tokens", 128), ("num-tokens", 128), ("repeats", 3)):
        add(f"--{name}", type=count, default=default, metavar="N", help=f"default {default}")
    add("--device", default="auto", help="auto, cpu or cuda (default auto: GPU if any)")
    add(
        "--output-dir",
        type=Path,
        default=results.DEFAULT_FOLDER / request.LAB,
        metavar="FOLDER",
        help=f"default: results/{request.LAB} of this checkout",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures from the command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: measure(arguments), interrupted="interrupted")


def measure(arguments: argparse.Namespace) -> int:
    errors.require("rich", "matplotlib", *export.PACKAGES)
    device = hardware.get_device(arguments.device)
    folder = results.prepare_folder(arguments.output_dir)
    session, runs = results.new_session(), list[LabRun]()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), device, arguments.prompt_tokens + arguments.num_tokens)
        for repeat in range(arguments.repeats):
            plans = [
                _plan(arguments, device, session, folder, model, engine, batch)
                for batch in arguments.batch_sizes
                for engine in arguments.engines
            ]
            for run in turns.in_turns(plans[:: 1 - 2 * (repeat % 2)], 1):
                runs.append(run)
                print(f"{run.subject}, {run.variant}: {_outcome(run)}", flush=True)
    return _show(runs, folder)


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


def _plan(
    arguments: argparse.Namespace,
    device: torch.device,
    session: str,
    folder: Path,
    model: Path,
    engine: str,
    batch: int,
) -> turns.Plan:
    prompts = model.parent / f"prompts_{batch}.txt"
    letters = random.Random(batch).choices(string.ascii_letters, k=batch * arguments.prompt_tokens)
    size = arguments.prompt_tokens
    lines = ("".join(letters[i * size : (i + 1) * size]) for i in range(batch))
    prompts.write_text("\n".join(lines), encoding="utf-8")
    precision = get_precision("auto", device).name
    does = ", compiled" * (engine == "static" and device.type == "cuda")
    variant, first = f"{precision}, {engine}{does}", f"{precision}, {next(iter(ENGINES))}"
    planned = lab_record.begin(
        device, precision, session, ("--output-dir",),
        lab=request.LAB,
        subject=f"{model.name}, batch {batch}, {size} + {arguments.num_tokens} tokens",
        variant=variant, unit="tokens", units_per_step=batch, baseline=first,
    )  # fmt: skip
    path = labs.new_path(planned, folder)
    flags = {
        "--model_path": model, "--input_file": prompts, "--batch_size": batch,
        "--num_tokens": arguments.num_tokens, "--device": device.type, "--session": session,
        "--baseline": first, "--output_file": model.parent / "texts", "--result-file": path,
    }  # fmt: skip
    command = [sys.executable, str(PROGRAM), *ENGINES[engine]]
    return turns.Plan([*command, *(str(word) for pair in flags.items() for word in pair)],
                      planned, path)  # fmt: skip


def _outcome(run: LabRun) -> str:
    if run.status != "complete":
        return run.failure
    return f"{timing.median(run.step_ms):.3f} ms a token; proof {run.proof.status}"


def _show(runs: list[LabRun], folder: Path) -> int:
    groups = labs.newest(runs)
    report = lab_table.of_labs(groups)
    report.show("table")
    rows = [row for group in groups for row in group]
    draw(rows, folder / "engines.png")
    path = folder / "engines.md"
    results.write_text(path, tables.markdown(report.tables))
    print(f"Written: {path}, {path.with_suffix('.png')}")
    print(f"Result files: {folder / 'runs' / runs[0].session}")
    return errors.ANSWER_IS_NO if any(row.failed for row in rows) else errors.DONE


def floor_ms(row: LabRow) -> float | None:
    """What the bytes of a token take at the memory's bandwidth; None for a row without times."""
    found = row.first.metrics.get("floor_ms")
    return float(found) if row.times and isinstance(found, (int, float)) else None


def draw(rows: Sequence[LabRow], target: Path) -> None:
    """The time of a token, a bar for each row that has one, and its floor as a line across it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [(row, row.step_ms) for row in rows if row.step_ms]
    figure, axes = plt.subplots(figsize=(11, 1.8 + 0.5 * len(shown)), layout="constrained")
    most = max((ms for _, ms in shown), default=1.0)
    for place, (row, ms) in enumerate(shown):
        axes.barh(place, ms, color="#0072B2")
        axes.text(ms + 0.01 * most, place, f"{ms:.3g} ms", va="center", fontsize=12)
        if floor := floor_ms(row):
            axes.plot([floor, floor], [place - 0.45, place + 0.45], color="#D55E00", linewidth=3)
    labels = [", ".join(filter(None, (row.of, row.first.variant))) for row, _ in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=12)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * most)
    axes.set_xlabel(
        "ms a token, median; the line: its bytes at the memory's bandwidth", fontsize=12
    )
    title = f"{labs.shared_subject(rows)}, {rows[0].device}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    with results.atomic_path(target) as path:
        figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
