"""The batches: what is a token, what its target, and that all versions get the same."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
    "synthetic": partial(data.synthetic_batches, vocab_size=300),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_one_seed_gives_one_sequence_of_batches(draw: Draw) -> None:
    first = draw(**SHAPE, seed=7)
    torch.manual_seed(1)  # as if others had drawn numbers
    assert torch.equal(first, draw(**SHAPE, seed=7))
    assert not torch.equal(first, draw(**SHAPE, seed=8))
    assert len({batch.numpy().tobytes() for batch in first}) == len(first)  # none comes twice


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_targets_are_the_tokens_one_later(draw: Draw) -> None:
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


def test_a_vocabulary_must_hold_every_byte() -> None:
    with pytest.raises(WorkshopError, match=r"vocab_size 255 .* 256 values .* --vocab-size"):
        data.text_batches(counting(99), **SHAPE, vocab_size=255, seed=0)
    data.text_batches(counting(99), **SHAPE, vocab_size=256, seed=0)


def test_synthetic_tokens_fill_the_vocabulary_evenly() -> None:
    batches = data.synthetic_batches(steps=10, batch_size=10, seq_len=100, vocab_size=5, seed=0)
    counts = batches[:, 0].flatten().bincount()
    assert counts.shape == (5,)
    assert counts.min() > 1800 and counts.max() < 2200


def test_any_bytes_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "absent does not exist"),
        (lambda folder: folder, "is a directory: name one file"),
        (lambda folder: (folder / "empty").touch() or folder / "empty", "empty is empty"),
        (lambda folder: folder / ("a" * 5000), "can't be read: File name too long"),
        (lambda folder: (folder / "file").touch() or folder / "file" / "x", "can't be read"),
    ],
    ids=["missing", "directory", "empty", "long name", "below a file"],
)
def test_a_text_that_cannot_be_read_is_named(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkshopError, match=message) as caught:
        data.read_corpus(make(tmp_path))
    assert str(caught.value).startswith("--text-file ")


def test_the_standard_librarys_sources_come_in_the_order_of_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a/z.py", "a.py", "test/c.py", "a/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name};")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert bytes(data.read_corpus().data) == b"a/z.py;a.py;b.py;"
