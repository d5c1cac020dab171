"""A trained version as a folder that AutoModelForCausalLM and AutoTokenizer load.

Every version has Hugging Face's mathematics, RoPE's pairs (i, i + D/2) too, and V1's names of
weights are Hugging Face's without `model.`: no row changes its place. What V2, V3 and V4 have
stacked is taken apart.
"""

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from workshop import results, versions
from workshop.errors import WorkshopError
from workshop.gate.canonical import canonical_weights
from workshop.run.data import BYTE_VALUES

PAD, EOS = "<pad>", "</s>"
SPECIAL = (BYTE_VALUES, BYTE_VALUES + 1)
"""Their numbers; a byte's is its value. The training text has neither."""
VOCABULARY = BYTE_VALUES + len(SPECIAL)
RECORD = "training.json"
PACKAGES = ("transformers", "tokenizers", "safetensors")


def prepare(folder: Path, replace: bool) -> None:
    """Checks before the training that it can be saved there. Raises WorkshopError: the folder can't
    be written, or holds other files, or an earlier model without `replace`."""
    results.prepare_folder(folder.parent)
    if not folder.exists():
        return
    if not (folder / RECORD).is_file():
        if not folder.is_dir() or any(folder.iterdir()):
            raise WorkshopError(f"--output-dir {folder} has other content: name a new folder")
    elif not replace:
        raise WorkshopError(f"--output-dir {folder} has a model: give --replace, or another folder")


def save(model: nn.Module, folder: Path, record: dict[str, Any]) -> None:
    """Saves a model of any version, a tokenizer and the training's record; an earlier export is
    deleted once they are complete."""
    exported = to_hugging_face(model)
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would draw one of a single file, in logs too
    with results.atomic_path(folder) as unfinished:
        exported.save_pretrained(unfinished)
        byte_tokenizer(exported.config.max_position_embeddings).save_pretrained(unfinished)
        results.write_json(unfinished / RECORD, record)
        for path in unfinished.iterdir():  # safetensors' file is its owner's alone
            shutil.copymode(unfinished / RECORD, path)


def to_hugging_face(model: nn.Module) -> Any:
    """Its LlamaForCausalLM, in fp32 on the CPU."""
    config = versions.load("hf").llama_config(model.config)
    from transformers import LlamaForCausalLM

    # Llama's own numbers of the special tokens are bytes here.
    config.bos_token_id, config.pad_token_id, config.eos_token_id = None, *SPECIAL
    exported = LlamaForCausalLM(config)
    weights = {f"model.{name}": weight for name, weight in canonical_weights(model).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    exported.load_state_dict(weights)
    return exported


def byte_tokenizer(longest: int) -> Any:
    """A fast tokenizer whose tokens are the bytes of UTF-8. Text that spells a special token is
    bytes, too: Python's sources have some.

    Args:
        longest: tokens of a text that the model was trained for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's letters: a printable byte is itself, the others are shifted beyond the bytes.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    shifted = iter(sorted(letter for letter in alphabet if ord(letter) >= BYTE_VALUES))
    letters = [c if c in alphabet else next(shifted) for c in map(chr, range(BYTE_VALUES))]
    bytes_alone = {letter: byte for byte, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_alone, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",  # new tokens follow a prompt's last
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
    )
