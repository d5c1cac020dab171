"""The text generation lab's exercises: what a token costs, and a batch that answers differently."""

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exercise_cases import (
    FOLDERS,
    changed,
    checked,
    loaded,
    red,
    solution,
    unanswered,
)

from workshop import records
from workshop.labs import LabRun

FLOOR, PADDING = "text_1_floor", "text_2_padding"

# --- what a token costs --------------------------------------------------------------------------


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
    monkeypatch.setattr(make_models, "FOLDER", folder)
    assert make_models.main([]) == 0
    monkeypatch.chdir(tmp_path)
    answers = solution(FLOOR)["answers"]
    for run in check.RUNS:
        (item,) = checked(FLOOR, answers=answers, results=tmp_path / "results")
        typed = check.command(run)
        assert item.why == (check.MAKE if run == first else typed) and f"`{run}`" in item.what
        assert f"--num_tokens 32 --engine {check.RUNS[run][1]} --device cpu" in sheet
        words = shlex.split(typed)[2:]
        assert lm_gen.main([*words, "--output-dir", f"results/{check.LAB}"]) == 0
    runs = records.load_folder(tmp_path / "results", LabRun)
    record = next(run for run in runs if run.subject.startswith("deep"))
    deep = records.path_in(tmp_path / "results" / check.LAB, record.session)
    older = deep.with_name("older.jsonl")
    records.save(dataclasses.replace(record, created="2000-01-01", step_ms=[1e3]), older)
    m = check.measured(check.Work(FOLDERS[FLOOR], results=tmp_path / "results"))
    assert m.runs["deep"].created == record.created
    for model, (width, ffn, layers, _, prompt) in small.items():
        weights = layers * (4 * width**2 + 3 * width * ffn + 2 * width) + 257 * width
        cache = 2 * layers * width * (prompt + make_models.NEW / 2)
        assert m.mb(model) == pytest.approx(4e-6 * (weights + cache))
    older.unlink()
    deep.unlink()
    records.save(dataclasses.replace(record, device=record.device | {"threads": 2}), deep)
    (item,) = checked(FLOOR, answers=answers, results=tmp_path / "results")
    assert item.what.startswith("`deep` is not measured yet on one core")


# --- a batch that answers differently ------------------------------------------------------------

FIRST = "positions = (mask.cumsum(1) - 1).clamp(min=0)"
NEXT = "positions = positions[:, -1:] + 1"
CHOICE = "        ids = output.logits[:, -1:].argmax(-1)  # (B, 1)\n        found.append(ids)\n"
TOGETHER = "    ids, mask = padded(prompts, pad)\n"
OTHERS = "other weights: prompts of"
LLAMA, GPT2, INSIDE = f"llama, {OTHERS}", f"gpt2, {OTHERS}", "of the padding occurs"
WORK, LIBRARY = "each token once", "correct your own"
ALL = (LLAMA, GPT2, INSIDE)
ONE_BY_ONE = "    if len(prompts) > 1:\n        return [generate(model, [one], new_tokens, pad)[0] "
THE_LIBRARY = "    found = model.generate(ids, attention_mask=mask, do_sample=False, "
WRONG: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "all positions from the padding's start": (
        {FIRST: "positions = torch.arange(ids.shape[1]).expand_as(ids)"}, (GPT2,),
    ),
    "no positions at all": ({"position_ids=positions": "position_ids=None"}, (GPT2,)),
    "the longest prompt's positions for all": (
        {NEXT: "positions = torch.full_like(ids, int(positions.max()) + 1)"}, ALL,
    ),
    "one position too far": ({NEXT: "positions = mask.sum(1, keepdim=True)"}, ALL),
    "no mask": ({"attention_mask=mask": "attention_mask=None"}, ALL),
    "new tokens masked": ({"value=1": "value=0"}, ALL),
    "a mask of all tokens but one": (
        {FIRST: f"mask = (ids != pad).long()\n    {FIRST}"}, (INSIDE,),
    ),
    "padded on the right": (
        {"start = longest - len(prompt)": "start = slice(len(prompt))", "ids[row, start:]":
         "ids[row, start]", "mask[row, start:]": "mask[row, start]"}, ALL,
    ),
    "one by one": ({TOGETHER: f"{ONE_BY_ONE}for one in prompts]\n{TOGETHER}"}, (WORK,)),
    "all tokens anew": (
        {CHOICE: "        cache = None\n        found.append(output.logits[:, -1:].argmax(-1))\n"
         "        ids = torch.cat((ids, found[-1]), 1)\n",
         NEXT: "positions = torch.cat((positions, positions[:, -1:] + 1), 1)"}, (WORK,),
    ),
    "the library's loop": (
        {TOGETHER: f"{TOGETHER}{THE_LIBRARY}max_new_tokens=new_tokens)\n"
         "    return found[:, ids.shape[1]:].tolist()\n"}, (LIBRARY,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_correction_is_red_where_it_shows(fault: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    changes, where = WRONG[fault]
    mine = changed(PADDING, tmp_path, changes)
    found = red(checked(PADDING, mine=mine, answers=solution(PADDING)["answers"]))
    for part in (LLAMA, GPT2, INSIDE, WORK, LIBRARY):
        assert (part in found) == (part in where), found


@pytest.mark.parametrize(
    "correction", [NEXT, "positions = mask.sum(1, keepdim=True) - 1", f"{FIRST}[:, -1:]"]
)
def test_each_right_correction_is_green(correction: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    mine = changed(PADDING, tmp_path, {NEXT: correction})
    assert not red(checked(PADDING, mine=mine, answers=solution(PADDING)["answers"]))


def test_the_untouched_program_and_answers_are_red() -> None:
    pytest.importorskip("transformers")
    found = red(unanswered(PADDING, mine=FOLDERS[PADDING] / "starter.py"))
    assert all(part in found for part in ALL) and WORK not in found


def test_the_given_program_shows_what_the_answers_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from labs.text_generation.exercises.text_2_padding import compare_texts

    monkeypatch.setattr(compare_texts, "MINE", "starter.py")
    for model in compare_texts.MODELS:
        assert compare_texts.main(["--model", model]) == 0
        *padded, longest = capsys.readouterr().out.splitlines()
        assert longest == " 24 tokens,   0 of padding: the text is the same"
        assert min(int(line.split("new token ")[1].split()[0]) for line in padded) == 2
        assert compare_texts.main(["--model", model, "--lengths", "9", "9"]) == 0
        assert capsys.readouterr().out.count("is the same") == 2
    assert compare_texts.main(["--lengths", "109"]) == 2
