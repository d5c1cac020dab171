"""Makes the three Llamas of text_1_floor, of random weights, each with a prompt, and measures the
memory's bandwidth. They take 0.6 GB of the disk.
"""

import argparse
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from labs.text_generation import export, lm_gen, measure_engines
from workshop import errors, results
from workshop.arguments import parse
from workshop.run import hardware

FOLDER = results.DEFAULT_FOLDER / lm_gen.LAB / "floor"
NEW = 32
"""Tokens that each prompt is continued by."""
VOCABULARY = 256
"""Bytes alone: no token ends a text."""
SIZES = {  # width, feed-forward width, layers, heads, tokens of the prompt
    "wide": (2048, 8192, 2, 16, 32),
    "deep": (64, 256, 32, 4, 32),
    "long": (512, 1024, 8, 8, 4096),
}
"""Each query head has its keys and values: nothing is shared."""


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the models from the command line; returns the exit status."""
    parse(argparse.ArgumentParser(description=__doc__), argv)
    return errors.exit_status(lambda: run(FOLDER), interrupted="interrupted")


def run(folder: Path) -> int:
    errors.require(*export.PACKAGES)
    results.prepare_folder(folder.parent)
    cpu = torch.device("cpu")
    with results.atomic_path(folder) as unfinished:
        for name, (width, ffn, layers, heads, prompt) in SIZES.items():
            sizes = {
                "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
                "num_attention_heads": heads, "num_key_value_heads": heads,
                "vocab_size": VOCABULARY,
            }  # fmt: skip
            model = measure_engines.make_model(unfinished, cpu, prompt + NEW, sizes)
            model.rename(unfinished / name)
            letters = random.Random(0).choices(string.ascii_letters, k=prompt)
            results.write_text(unfinished / f"{name}.txt", "".join(letters))
    print(f"Written: {', '.join(SIZES)} in {folder}")
    threads = torch.get_num_threads()
    cores = "one core" if threads == 1 else f"{threads} threads"
    print(f"The memory's bandwidth, of {cores}: {hardware.measure_copy_gbs(cpu):.1f} GB/s (a copy)")
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
