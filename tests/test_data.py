"""The batches: what is a token, what its target, and that all versions get the same."""

import hashlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from workshop.errors import WorkshopError
from workshop.run import data

Draw = Callable[..., Tensor]
SHAPE = {"steps": 5, "batch_size": 4, "seq_len": 8}


def counting(length: int) -> data.Corpus:
    """A text in which each byte is its own position."""
    return data.Corpus("counting", torch.arange(length, dtype=torch.uint8))


DRAWS: dict[str, Draw] = {
    "text": partial(data.text_batches, counting(200), vocab_size=300),
    "synthetic": partial(data.Source("synthetic").draw, vocab_size=300),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_one_seed_gives_one_sequence_of_batches(draw) -> None:
    first = draw(**SHAPE, seed=7)
    torch.manual_seed(1)  # as if others had drawn numbers
    assert torch.equal(first, draw(**SHAPE, seed=7))
    assert not torch.equal(first, draw(**SHAPE, seed=8))
    assert len({batch.numpy().tobytes() for batch in first}) == len(first)  # none comes twice


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_targets_are_the_tokens_one_later(draw) -> None:
    batches = draw(**SHAPE, seed=0)
    assert batches.shape == (5, 2, 4, 8)
    assert batches.dtype == torch.int64
    assert torch.equal(batches[:, 0, :, 1:], batches[:, 1, :, :-1])


def test_windows_are_pieces_of_the_text() -> None:
    batches = DRAWS["text"](**SHAPE, seed=0)
    assert torch.equal(batches[:, 1], batches[:, 0] + 1)
    assert torch.equal(batches[:, 0], batches[:, 0, :, :1] + torch.arange(8))


def test_every_window_can_be_drawn_the_last_one_too() -> None:
    draw = partial(data.text_batches, steps=50, batch_size=4, seq_len=8, vocab_size=256, seed=0)
    starts = draw(counting(12))[:, 0, :, 0]
    assert set(starts.flatten().tolist()) == {0, 1, 2, 3}
    assert set(draw(counting(9)).flatten().tolist()) == set(range(9))  # exactly one window
    with pytest.raises(WorkshopError, match=r"counting has 8 bytes, fewer than .* \(9\)"):
        draw(counting(8))


def test_any_bytes_are_text(tmp_path, monkeypatch) -> None:
    content = bytes(range(256)) * 3 + b"\xff\xfe\x00"
    path = tmp_path / "noise.bin"
    path.write_bytes(content)
    corpus = data.read_corpus(path)
    assert bytes(corpus.data.tolist()) == content
    assert corpus.name == "noise.bin"  # and not the folder, which is this machine's business
    assert corpus.sha256 == hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(data, "MAX_TEXT_BYTES", 10)
    assert bytes(data.read_corpus(path).data.tolist()) == content[:10]


def test_the_default_text_is_the_standard_library_each_time_the_same() -> None:
    corpus = data.read_corpus()
    assert 10**6 < len(corpus.data) <= data.STDLIB_BYTES
    assert bytes(corpus.data.tolist()).count(b"\n    def ") > 1000
    assert corpus.sha256 == data.read_corpus().sha256
