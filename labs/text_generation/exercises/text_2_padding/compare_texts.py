"""Compares the texts that prompts get in a batch, by mine.py, with those they get alone.

    python compare_texts.py
    python compare_texts.py --model gpt2 --lengths 9 9 9

The models are small, of random weights, and compute in fp64: rounding changes no token.
"""

import argparse
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import torch

from workshop import errors
from workshop.arguments import count, parse
from workshop.errors import WorkshopError, require
from workshop.exercises.frame import MINE, import_file
from workshop.run.torchvision import make_importable

MODELS = ("llama", "gpt2")
LENGTHS = (3, 9, 17, 24)
"""Tokens of the prompts."""
NEW = 20
VOCABULARY, POSITIONS = 300, 128
PAD = 0


def make_model(family: str, seed: int = 0) -> Any:
    """A small causal model of random weights, in fp64.

    Args:
        family: one of MODELS.

    Raises:
        NotOnThisMachine: transformers is missing.
    """
    require("transformers")
    make_importable()  # transformers imports torchvision
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
    from transformers.utils import logging

    # From 5.24 on the argument has another name, too, which older ones do not know.
    warnings.filterwarnings("ignore", ".*past_key_values", FutureWarning)
    logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": POSITIONS,
        "bos_token_id": None, "eos_token_id": None,
        "initializer_range": 0.4,  # large: the likeliest tokens change from step to step
    }  # fmt: skip
    torch.manual_seed(seed)
    config = (
        LlamaConfig(**sizes, intermediate_size=96) if family == "llama" else GPT2Config(**sizes)
    )
    return AutoModelForCausalLM.from_config(config).double().eval()


def make_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def alone(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """A prompt's new tokens, the whole text read anew for each: nothing is padded or cached."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same, up to the first that differs."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default=MODELS[0], help="its family (default llama)")
    add(
        "--lengths",
        type=count,
        nargs="+",
        default=LENGTHS,
        metavar="N",
        help=f"tokens of each prompt (default {' '.join(map(str, LENGTHS))})",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compares from the command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(lambda: run(arguments), interrupted="interrupted")


def run(arguments: argparse.Namespace) -> int:
    longest = max(arguments.lengths)
    if longest + NEW > POSITIONS:
        raise WorkshopError(f"--lengths {longest}: {POSITIONS - NEW} are the most")
    model, prompts = make_model(arguments.model), make_prompts(arguments.lengths)
    together = import_file(Path(__file__).with_name(MINE)).generate(model, prompts, NEW, PAD)
    for prompt, new in zip(prompts, together, strict=True):
        equal = same(new, alone(model, prompt, NEW))
        says = f"differs from new token {equal + 1} on" if equal < NEW else "is the same"
        print(f"{len(prompt):3} tokens, {longest - len(prompt):3} of padding: the text {says}")
    return errors.DONE


if __name__ == "__main__":
    sys.exit(main())
