"""The physics: two published tables, and each argument on its own."""

import dataclasses
import json
from pathlib import Path

import pytest

from workshop.gate import plausibility
from workshop.gate.plausibility import Claim, check
from workshop.run import flops

TABLES = Path(__file__).parent / "fixtures" / "published_tables.json"


@pytest.mark.parametrize("claim", plausibility.read_claims(TABLES), ids=lambda claim: claim.name)
def test_false_rows_of_the_published_tables_are_found(claim) -> None:
    """V3 and V4 train 0.5% of their parameters; V1 and V2 are what such a machine gives."""
    sentences = check(claim)
    if "V1" in claim.name or "V2" in claim.name:
        assert sentences == []
        return
    text = "\n".join(sentences)
    assert "backward pass takes" in text
    assert "can't hold the weights and AdamW's two moments" in text
    assert "more than the chip's 163" in text
    if claim.optimizer_ms is not None:
        assert "it can't have updated all 189.8 M parameters" in text
    assert all(sentence.startswith(claim.name) for sentence in sentences)


TINY = flops.Sizes(1000, 256, 1024, 4, 8, 4)
SMALL = flops.Sizes(1000, 512, 2048, 8, 8, 4)
MEDIUM = flops.Sizes(1000, 1024, 4096, 12, 16, 8)
HONEST = Claim(
    name="honest",
    model=MEDIUM,
    batch_size=16,
    seq_len=512,
    step_ms=22.3,
    forward_ms=6.86,
    backward_ms=13.84,
    optimizer_ms=1.54,
    memory_mb=7556,
    memory_is_peak=True,
    params_with_grad=189_793_280,
    loss_first=6.91,
    peak_tflops=989.4,
    bandwidth_gbs=4800,
)


def replace(**figures: object) -> Claim:
    return Claim(**{**vars(HONEST), **figures})


@pytest.mark.parametrize(
    "claim",
    [
        HONEST,
        Claim("nothing known", MEDIUM, 16, 512),
        replace(step_ms=0.1, optimizer_ms=0.01, peak_tflops=None, bandwidth_gbs=None),
        Claim("launch-bound", SMALL, 8, 128, forward_ms=10.8, backward_ms=9.2),
        Claim("in a cache", TINY, 8, 128, optimizer_ms=0.01, bandwidth_gbs=4800),
    ],
)
def test_what_may_be_true_passes(claim) -> None:
    assert check(claim) == []


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"step_ms": 9.7}, "a step of 9.7 ms means 993 TFLOP/s"),
        ({"forward_ms": 3.2}, "a forward pass of 3.2 ms means 1,004 TFLOP/s"),
        ({"backward_ms": 6.4}, "a backward pass of 6.4 ms means 1,004 TFLOP/s"),
        ({"forward_ms": 50.0, "backward_ms": 24.0}, "0.48 of the forward's 50 ms"),
        ({"optimizer_ms": 1.1}, "4,831 GB/s, more than the memory's 4,800"),
        ({"memory_mb": 3036.0}, "3,036 MB can't hold the weights, gradients and AdamW's"),
        ({"params_with_grad": 1_024_000}, "only 1,024,000 of 189,793,280 parameters (0.5%)"),
        ({"loss_first": 942.8}, "the first loss is 942.8"),
        ({"params_with_grad": 10**12}, "1,000,000,000,000 parameters received a gradient, of"),
        ({"batch_size": 0}, "batch_size is 0, and in any run lies between 1 and"),
        ({"forward_ms": -3.0}, "forward_ms is -3.0"),
        ({"optimizer_ms": float("nan")}, "optimizer_ms is nan"),
        ({"model": dataclasses.replace(MEDIUM, num_heads=0)}, "model.num_heads is 0"),
    ],
)
def test_each_argument_on_its_own(figures, sentence) -> None:
    sentences = check(replace(**figures))
    assert len(sentences) == 1, sentences
    assert sentence in sentences[0]


def test_the_command_line(type_command) -> None:
    answer = type_command("python", "-m", "workshop.gate.plausibility", str(TABLES))
    assert answer.returncode == 1
    assert "small V1: nothing here is impossible" in answer.stdout


WRITTEN = {"name": "x", "model": vars(SMALL), "batch_size": 8, "seq_len": 128}


def test_a_file_that_holds_no_claims_is_named_in_a_line(tmp_path, capsys) -> None:
    path = tmp_path / "claims.json"
    path.write_text(json.dumps([WRITTEN, WRITTEN | {"step_ms": "3"}]))
    assert plausibility.main([str(path)]) == 2
    stderr = capsys.readouterr().err
    assert f"error: {path}: claim 2: field step_ms: expected" in stderr and stderr.count("\n") == 1
