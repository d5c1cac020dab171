"""Prompts: read from a file or a folder, encoded, and made into batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labs.text_generation.models import Loaded
from workshop.errors import WorkshopError


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the left: the last token of each is in the last column, and new tokens
    follow it."""

    first: int
    """The number of its first prompt, from 0."""
    rows: tuple[tuple[int, ...], ...]
    ids: Tensor
    """int64 (B, T)."""
    mask: Tensor
    """int64 (B, T), 0 where `ids` are padding."""


def read(path: Path) -> list[str]:
    """The lines of a file, or the files of a folder in the order of their names; blank ones are
    left out. Raises WorkshopError: no prompt is there, or it is not text."""
    try:
        if path.is_dir():
            files = sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".")
            texts = [file.read_text(encoding="utf-8").rstrip("\n") for file in files]
        else:
            texts = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise WorkshopError(f"--input_file {path} is not UTF-8 text") from None
    prompts = [text for text in texts if text.strip()]
    if not prompts:
        raise WorkshopError(
            f"--input_file {path} has no prompt: write one a line, or one a file of a folder"
        )
    return prompts


def encode(texts: Sequence[str], loaded: Loaded, new_tokens: int) -> list[tuple[int, ...]]:
    """Each prompt's tokens. Raises WorkshopError: one has none, or is too long for the model."""
    found, limit = [], loaded.positions
    for number, text in enumerate(texts, 1):
        tokens = tuple(loaded.tokenizer(text)["input_ids"])
        if not tokens:
            raise WorkshopError(f"prompt {number} has no token: {text!r:.60}")
        if limit is not None and len(tokens) + new_tokens > limit:
            raise WorkshopError(
                f"prompt {number} has {len(tokens):,} tokens, and --num_tokens {new_tokens:,} "
                f"follow: {loaded.name} has {limit:,} positions; shorten one of them"
            )
        found.append(tokens)
    return found


def batches(rows: Sequence[tuple[int, ...]], size: int, pad: int) -> Iterator[Batch]:
    for first in range(0, len(rows), size):
        part = tuple(rows[first : first + size])
        longest = max(map(len, part))
        ids = torch.full((len(part), longest), pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(part):
            ids[i, longest - len(row) :] = torch.tensor(row)
            mask[i, longest - len(row) :] = 1
        yield Batch(first, part, ids, mask)
