"""Training batches: bytes of real text, or random tokens. Same seed, same batches, any version."""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workshop.errors import WorkshopError

BYTE_VALUES = 256
MAX_TEXT_BYTES = 64 * 2**20
STDLIB_BYTES = 4 * 2**20
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, each byte a token."""

    name: str
    data: Tensor  # uint8, (N,)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(bytes(self.data.tolist())).hexdigest()


def read_corpus(path: Path | None = None) -> Corpus:
    """The bytes of `path` (its first 64 MiB), or of the Python standard library's sources, which
    every machine has. Raises WorkshopError: the file is missing, empty, a directory or not
    readable."""
    if path is None:
        return Corpus(f"Python {platform.python_version()} standard library", _standard_library())
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES)
    except OSError as error:
        raise WorkshopError(f"--text-file {path} can't be read: {error.strerror}") from None
    return Corpus(path.name, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _standard_library() -> Tensor:
    root = Path(sysconfig.get_paths()["stdlib"])
    content = bytearray()
    for path in _sources(root):
        content += path.read_bytes()
        if len(content) >= STDLIB_BYTES:
            break
    if not content:
        raise WorkshopError(f"no Python sources under {root}: give a text with --text-file")
    return torch.frombuffer(content[:STDLIB_BYTES], dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    """In the order of their paths, and no folder is looked into before its turn: there are many
    thousand files, and the first few hundred are enough."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name not in _SKIPPED and not entry.is_symlink():
                yield from _sources(entry)
        elif entry.suffix == ".py":
            yield entry


class Source:
    """Where batches are drawn from: a text, or uniformly random tokens, of which nothing is to be
    learnt beyond ln(vocab).

    Attributes:
        record: what a result file keeps of it.
    """

    def __init__(self, kind: str, text_file: Path | None = None) -> None:
        """`kind`: "text" or "synthetic". Raises WorkshopError: the text can't be read."""
        self._corpus = read_corpus(text_file) if kind == "text" else None
        self.record: dict[str, str | int] = {"name": "synthetic: uniformly random tokens"}
        if self._corpus is not None:
            corpus = self._corpus
            self.record = {"name": corpus.name, "bytes": len(corpus.data), "sha256": corpus.sha256}

    def draw(
        self, *, steps: int, batch_size: int, seq_len: int, vocab_size: int, seed: int
    ) -> Tensor:
        """Batches, int64 (steps, 2, batch_size, seq_len). Raises WorkshopError: the text is too
        short for them."""
        if self._corpus is not None:
            sizes = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len}
            return text_batches(self._corpus, **sizes, vocab_size=vocab_size, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        shape = (steps, batch_size, seq_len + 1)
        return _shift(torch.randint(vocab_size, shape, generator=generator))


def text_batches(
    corpus: Corpus, *, steps: int, batch_size: int, seq_len: int, vocab_size: int, seed: int
) -> Tensor:
    """Random windows of the corpus: int64 (steps, 2, batch_size, seq_len), where [:, 0] are the
    tokens and [:, 1] the targets, the same windows one byte later. Raises WorkshopError: the corpus
    is shorter than a sequence, or the vocabulary than a byte."""
    if vocab_size < BYTE_VALUES:
        raise WorkshopError(
            f"vocab_size {vocab_size} can't hold the {BYTE_VALUES} values of a byte: "
            "raise --vocab-size or use --data synthetic"
        )
    starts = len(corpus.data) - seq_len
    if starts < 1:
        raise WorkshopError(
            f"{corpus.name} has {len(corpus.data)} bytes, fewer than a sequence and its target "
            f"({seq_len + 1}): lower --seq-len or give a longer text"
        )
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(starts, (steps, batch_size, 1), generator=generator)
    windows = corpus.data[offsets + torch.arange(seq_len + 1)].long()
    return _shift(windows)


def _shift(windows: Tensor) -> Tensor:
    return torch.stack((windows[..., :-1], windows[..., 1:]), dim=1).contiguous()
