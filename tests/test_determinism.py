"""--deterministic: what it switches, what it says of an operator that it refuses, and the program
that trains the same seed twice."""

import subprocess
import sys

import pytest
import torch

from workshop import determinism, errors, versions
from workshop.run import deterministic
from workshop.run.precision import set_arithmetic


@pytest.fixture
def switched_on(monkeypatch):
    """The switch, of this process, and back."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory
    deterministic.switch_on()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def test_convolutions_are_not_chosen_by_their_time(switched_on) -> None:
    set_arithmetic("fp32")
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_a_refused_operator_is_one_line_with_its_place(switched_on, capsys) -> None:
    def work() -> int:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        return 0

    assert errors.exit_status(work, interrupted="") == errors.ANSWER_IS_NO
    line = capsys.readouterr().err
    assert line.startswith("error: --deterministic: put_ has no deterministic form (tests/test_det")
    assert line.count("\n") == 1 and "in work): leave the flag out" in line


def test_v3_embedding_gradient_of_one_order(switched_on) -> None:
    pytest.importorskip("triton")
    kernels = versions.load("v3").tk
    weight, tokens = torch.randn(7, 4, requires_grad=True), torch.tensor([1, 1])
    name = lambda: type(kernels.embedding(weight, tokens).grad_fn).__name__  # noqa: E731
    assert name() == "EmbeddingBackward0"  # PyTorch's
    torch.use_deterministic_algorithms(True, warn_only=True)  # as the kernels' tests have it
    assert name() == "_EmbeddingBackward"


def test_bits_are_compared_not_values() -> None:
    one = {"a": torch.tensor([1.0, 2.0, 0.0]), "b": torch.tensor([float("nan")])}
    assert not [*determinism.differing(one, one)]
    other = {"a": torch.tensor([1.0, 2.0 + 2**-22, -0.0]), "b": one["b"]}
    (found,) = determinism.differing(one, other)
    assert found == {"name": "a", "numbers": 3, "differ": 2, "at_most": 2**-23}


@pytest.mark.parametrize(
    "second",
    [pytest.param((), marks=pytest.mark.slow), ("--second", "ATEN_CPU_CAPABILITY=default")],
)
def test_the_same_seed_twice(second, tmp_path) -> None:
    command = [sys.executable, "-m", "workshop.determinism", "--versions", "v1", "--device", "cpu"]
    command += ["--num-steps", "1", "--output-dir", str(tmp_path), *second]
    done = subprocess.run(command, capture_output=True, text=True, cwd=versions.ROOT)
    rows = determinism.results.read_json(tmp_path / determinism.FILE)["rows"]
    assert [row["deterministic"] for row in rows] == [False, True]
    assert all(len(one["step_ms"]) == 1 for row in rows for one in row["processes"])
    assert done.returncode == (errors.ANSWER_IS_NO if second else errors.DONE), done.stderr
    assert determinism.is_equal(rows[1]) is not bool(second)
    if second:
        assert rows[1]["gradients"]["differ"][0]["name"] == "embed_tokens.weight"
        assert ".weight differs most, in " in done.stdout
