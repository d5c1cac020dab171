"""The text generation lab's exercises: what a token costs."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exercise_cases import (
    FOLDERS,
    checked,
    loaded,
    only_fault,
    red,
    shown,
    solution,
    unanswered,
)

FLOOR = "text_1_floor"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"wide_ms": 41.7}, "the median, of your newest"),
        ({"deep_ms": 0.7}, "the median, of your newest"),
        ({"long_ms": 22.0}, "the median, of your newest"),
        ({"static_ms": 47.1}, "the median, of your newest"),
        ({"cache_percent": 39}, "the cache over the sum"),
        ({"copied_mb": 135}, "once it is read"),
        ({"copied_mb": 440}, "as much is written"),
        ({"layer_ms": 0.193}, "less the time that its bytes take"),
        ({"int8": "deep"}, "a small part of its time"),
        ({"int8": "long"}, "the smaller part"),
        ({"kv_heads": "wide"}, "the prompt is short"),
        ({"kv_heads": "deep"}, "a small part of its time"),
        ({"graph": "wide"}, "take long each"),
        ({"graph": "long"}, "most of its time is reading"),
    ],
)
def test_a_wrong_finding_is_the_one_that_is_red(
    answer: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert says in only_fault(FLOOR, tmp_path, answer, results=solution(FLOOR)["results"])


def test_the_floors_empty_answers_fail_and_the_solution_passes() -> None:
    unanswered(FLOOR, results=solution(FLOOR)["results"])
    items = checked(FLOOR, **solution(FLOOR))
    assert not red(items) and shown(items).count("a good prediction") == 4


def test_the_models_differ_in_what_bounds_them() -> None:
    """What the check says of them, whatever the machine."""
    check = loaded(FLOOR)
    m = check.measured(check.Work(FOLDERS[FLOOR], results=solution(FLOOR)["results"]))
    assert m.cache_mb("wide") < 0.01 * m.mb("wide") and m.mb("wide") > 500
    assert m.cache_mb("long") > 0.6 * m.mb("long")
    assert m.mb("deep") < 10  # at 5 GB/s 2 ms, of 32 layers


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_sheets_commands_make_the_runs_that_the_check_takes(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from labs.text_generation import lm_gen
    from labs.text_generation.exercises.text_1_floor import make_models

    check, first = loaded(FLOOR), "wide"
    sheet = (FOLDERS[FLOOR] / "README.md").read_text(encoding="utf-8")
    small = {first: (32, 64, 2, 4, 8), "deep": (16, 32, 3, 4, 8), "long": (32, 32, 2, 4, 40)}
    monkeypatch.setattr(make_models, "SIZES", small)
    monkeypatch.setattr(check, "SIZES", small)
    monkeypatch.setattr(make_models.hardware, "measure_copy_gbs", lambda device: 10.0)
    folder = tmp_path / check.FLOOR
    assert make_models.main(["--output-dir", str(folder)]) == 0
    monkeypatch.chdir(tmp_path)
    answers = solution(FLOOR)["answers"]
    for run in check.RUNS:
        (item,) = checked(FLOOR, answers=answers, results=tmp_path / "results")
        typed = check.command(run)
        assert item.why == (check.MAKE if run == first else typed) and f"`{run}`" in item.what
        assert f"--num_tokens 32 --engine {check.RUNS[run][1]} --device cpu" in sheet
        words = shlex.split(typed)[2:]
        assert lm_gen.main([*words, "--output-dir", f"results/{check.LAB}"]) == 0
    m = check.measured(check.Work(FOLDERS[FLOOR], results=tmp_path / "results"))
    for model, (width, ffn, layers, _, prompt) in small.items():
        weights = layers * (4 * width**2 + 3 * width * ffn + 2 * width) + 257 * width
        cache = 2 * layers * width * (prompt + make_models.NEW / 2)
        assert m.mb(model) == pytest.approx(4e-6 * (weights + cache))
