"""The labs' exercises in code, and the runs that their sheets' commands make: a wrong correction is
red where it shows, a right one is green."""

import dataclasses
import gzip
import importlib.util
import itertools
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exercise_cases import FOLDERS, changed, checked, loaded, red, shown, solution, unanswered

from labs.scale_out import request
from workshop import records
from workshop.labs import LabRun

TRACE, EFFICIENCY, FAULTS = "pipeline_2_trace", "scale_1_efficiency", "scale_2_faults"
FLOOR, PADDING = "text_1_floor", "text_2_padding"

# --- corrected code ------------------------------------------------------------------------------

FIRST = "positions = (mask.cumsum(1) - 1).clamp(min=0)"
NEXT = "positions = positions[:, -1:] + 1"
CHOICE = "        ids = output.logits[:, -1:].argmax(-1)  # (B, 1)\n        found.append(ids)\n"
TOGETHER = "    ids, mask = padded(prompts, pad)\n"
OTHERS = "other weights: prompts of"
LLAMA, GPT2, INSIDE = f"llama, {OTHERS}", f"gpt2, {OTHERS}", "of the padding occurs"
WORK, LIBRARY = "each token once", "correct your own"
BATCHES = (LLAMA, GPT2, INSIDE)
ONE_BY_ONE = "    if len(prompts) > 1:\n        return [generate(model, [one], new_tokens, pad)[0] "
THE_LIBRARY = "    found = model.generate(ids, attention_mask=mask, do_sample=False, "
EVEN, UNEVEN, THREE = ("2 processes, batches of 4", "2 processes, batches of 5", "3 processes, b")
GROUPS = (EVEN, UNEVEN, THREE)
WEIGHT = " * len(own_x) / len(x)  # its part of the mean"
OWN = "x.tensor_split(size)[rank], y.tensor_split(size)[rank]"
SHOWN = {PADDING: (*BATCHES, WORK, LIBRARY), FAULTS: GROUPS}
"""Parts of the two checks, each of which a fault makes red or not."""
WRONG: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "all positions from the padding's start": (
        PADDING, {FIRST: "positions = torch.arange(ids.shape[1]).expand_as(ids)"}, (GPT2,),
    ),
    "the longest prompt's positions for all": (
        PADDING, {NEXT: "positions = torch.full_like(ids, int(positions.max()) + 1)"}, BATCHES,
    ),
    "one position too far": (
        PADDING, {NEXT: "positions = mask.sum(1, keepdim=True)"}, BATCHES,
    ),
    "no mask": (PADDING, {"attention_mask=mask": "attention_mask=None"}, BATCHES),
    "a mask of all tokens but one": (
        PADDING, {FIRST: f"mask = (ids != pad).long()\n    {FIRST}"}, (INSIDE,),
    ),
    "padded on the right": (
        PADDING,
        {"start = longest - len(prompt)": "start = slice(len(prompt))", "ids[row, start:]":
         "ids[row, start]", "mask[row, start:]": "mask[row, start]"}, BATCHES,
    ),
    "one by one": (PADDING, {TOGETHER: f"{ONE_BY_ONE}for one in prompts]\n{TOGETHER}"}, (WORK,)),
    "all tokens anew": (
        PADDING,
        {CHOICE: "        cache = None\n        found.append(output.logits[:, -1:].argmax(-1))\n"
         "        ids = torch.cat((ids, found[-1]), 1)\n",
         NEXT: "positions = torch.cat((positions, positions[:, -1:] + 1), 1)"}, (WORK,),
    ),
    "the library's loop": (
        PADDING,
        {TOGETHER: f"{TOGETHER}{THE_LIBRARY}max_new_tokens=new_tokens)\n"
         "    return found[:, ids.shape[1]:].tolist()\n"}, (LIBRARY,),
    ),
    "the mean of the means": (FAULTS, {WEIGHT: " / size"}, (UNEVEN, THREE)),
    "a sum": (FAULTS, {WEIGHT: ""}, GROUPS),
    "right gradients, and the mean of the losses": (
        FAULTS, {"mean = loss.detach().clone()":
                 "mean = loss.detach() * len(x) / len(own_x) / size"}, (UNEVEN, THREE),
    ),
    "each keeps the weights of its own lowest loss": (
        FAULTS,
        {"if losses[-1] < lowest": "if loss.item() < lowest", "lowest = losses[-1]":
         "lowest = loss.item()", "            dist.barrier()": "            pass"}, GROUPS,
    ),
    "each computes whole batches": (FAULTS, {OWN: "x, y", WEIGHT: " / size"}, GROUPS),
}  # fmt: skip


def needs(name: str) -> None:
    if name == PADDING:
        pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def texts_alone_once() -> Iterator[None]:
    """Each prompt's own text, with which all corrections are compared, is generated once."""
    if not importlib.util.find_spec("transformers"):
        yield
        return
    from labs.text_generation.exercises.text_2_padding import compare_texts

    alone, known = compare_texts.alone, dict[tuple[float, ...], list[int]]()

    def remembered(model: Any, prompt: list[int], new: int) -> list[int]:
        weights = next(model.parameters()).flatten()[:9].tolist()
        key = (*weights, new, *prompt)
        if key not in known:
            known[key] = alone(model, prompt, new)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_texts, "alone", remembered)
        yield


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that hangs is ended soon."""
    monkeypatch.setattr(loaded(FAULTS).run_group, "HANGS_S", 1.0)


@pytest.mark.parametrize(
    ("name", "expected", "never"),
    [
        (PADDING, BATCHES, WORK),
        (FAULTS, (f"{EVEN}: process 0 waits in all_reduce: starter.py",), UNEVEN),
    ],
)
def test_the_untouched_code_is_red_and_the_solution_passes(name, expected, never, soon) -> None:
    needs(name)
    found = red(unanswered(name, mine=FOLDERS[name] / "starter.py"))
    assert all(part in found for part in expected) and never not in found
    assert not red(checked(name, **solution(name)))


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_correction_is_red_where_it_shows(fault: str, tmp_path: Path) -> None:
    name, changes, where = WRONG[fault]
    needs(name)
    mine = changed(name, tmp_path, changes)
    found = red(checked(name, mine=mine, answers=solution(name)["answers"]))
    for part in SHOWN[name]:
        assert (part in found) == (part in where), found


@pytest.mark.parametrize(
    "correction", ["positions = mask.sum(1, keepdim=True) - 1", f"{FIRST}[:, -1:]"]
)
def test_each_right_correction_is_green(correction: str, tmp_path: Path) -> None:
    needs(PADDING)
    mine = changed(PADDING, tmp_path, {NEXT: correction})
    assert not red(checked(PADDING, mine=mine, answers=solution(PADDING)["answers"]))


def test_the_given_program_shows_where_texts_begin_to_differ(capsys, monkeypatch) -> None:
    needs(PADDING)
    from labs.text_generation.exercises.text_2_padding import compare_texts

    monkeypatch.setattr(compare_texts, "MINE", "starter.py")
    for model in compare_texts.MODELS:
        assert compare_texts.main(["--model", model]) == 0
        *padded, longest = capsys.readouterr().out.splitlines()
        assert longest == " 24 tokens,   0 of padding: the text is the same"
        assert min(int(line.split("new token ")[1].split()[0]) for line in padded) == 2


# --- measured runs -------------------------------------------------------------------------------


def test_the_recorded_trace_shows_the_fault_and_nothing_of_its_machine() -> None:
    path = FOLDERS[TRACE] / loaded(TRACE).TRACE
    found, loop = loaded(TRACE).read(path), loaded(TRACE, "training_loop")
    assert found.rounds == loop.BATCH and found.loading.batches == 3
    assert found.waiting < 0.1 and found.between_ms / found.step_ms > 0.4
    text = gzip.decompress(path.read_bytes()).decode()
    assert not re.search(r"/(tmp|root|home|work|usr)/|\.py\b|host_?name", text, re.IGNORECASE)


def test_the_loop_without_its_fault_trains_the_same() -> None:
    loop = loaded(TRACE, "training_loop").Loop
    pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)
    batch = pixels, torch.randint(0, 10, (64,))
    slow, fixed = (loop(torch.device("cpu"), 16, fixed=fixed) for fixed in (False, True))
    losses = [[one.step(*batch) for _ in range(5)] for one in (slow, fixed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("slowed", "factors", "ok", "says"),
    [
        ("1 process, 1 sequence", (2.0,), False, "an efficiency is above 100%"),
        ("2 processes, 8", (2.0,), False, "8 parts are less efficient than one"),
        ("1 process, 1 sequence", (1.0, 1.5), True, "if other programs ran, repeat it"),
        ("1 process, 8", (1.0,), True, "the runs were not disturbed"),
    ],
)
def test_runs_that_were_disturbed_are_to_be_repeated(slowed, factors, ok, says, tmp_path) -> None:
    mine = Path(shutil.copytree(solution(EFFICIENCY)["results"], tmp_path / "mine"))
    for path in mine.rglob("runs/*.jsonl"):
        comparison = records.load(path)
        for run in comparison.runs:
            if slowed in run.variant:
                pairs = zip(run.step_ms, itertools.cycle(factors), strict=False)
                run.step_ms = [ms * factor for ms, factor in pairs]
        comparison.write(path)
    found = checked(EFFICIENCY, answers=solution(EFFICIENCY)["answers"], results=mine)
    assert found[0].ok == ok and says in shown(found[:1])


def test_train_and_the_sheet_know_the_commands_of_the_check() -> None:
    check, sheet = loaded(EFFICIENCY), (FOLDERS[EFFICIENCY] / "README.md").read_text("utf-8")
    words = re.sub(r"\s*\\\n\s*", " ", sheet)
    for processes, parts in ((1, 1), (2, 1), (1, 8), (2, 8)):
        command = check._command(processes, parts)
        assert command in words
        arguments = request.build_parser().parse_args(command.partition("train.py ")[2].split())
        assert (arguments.accumulate, arguments.batch_size) == (parts, processes * parts)


def test_the_sheets_commands_make_the_runs_that_the_check_takes(tmp_path, monkeypatch) -> None:
    needs(PADDING)
    from labs.text_generation import lm_gen
    from labs.text_generation.exercises.text_1_floor import make_models

    check, threads = loaded(FLOOR), torch.get_num_threads()
    small = {"wide": (32, 64, 2, 4, 8), "deep": (16, 32, 3, 4, 8), "long": (32, 32, 2, 4, 40)}
    for module, name, value in (
        (make_models, "SIZES", small), (check, "SIZES", small),
        (make_models, "FOLDER", tmp_path / check.FLOOR),
        (make_models.hardware, "measure_copy_gbs", lambda device: 10.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.chdir(tmp_path)
    assert make_models.main([]) == 0
    torch.set_num_threads(1)
    try:
        for run in check.RUNS:
            (item,) = checked(FLOOR, answers=solution(FLOOR)["answers"], results=Path("results"))
            assert f"`{run}`" in item.what
            words = shlex.split(check.command(run))[2:]
            assert lm_gen.main([*words, "--output-dir", f"results/{check.LAB}"]) == 0
    finally:
        torch.set_num_threads(threads)
    runs = records.load_folder(Path("results"), LabRun)
    record = next(run for run in runs if run.subject.startswith("deep"))
    deep = records.path_in(Path("results", check.LAB), record.session)
    older = dataclasses.replace(record, created="2000-01-01", step_ms=[1e3])
    records.save(older, deep.with_name("older.jsonl"))
    m = check.measured(check.Work(FOLDERS[FLOOR], results=Path("results")))
    assert m.runs["deep"].created == record.created
    for model, (width, ffn, layers, _, prompt) in small.items():
        weights = layers * (4 * width**2 + 3 * width * ffn + 2 * width) + 257 * width
        cache = 2 * layers * width * (prompt + make_models.NEW / 2)
        assert m.mb(model) == pytest.approx(4e-6 * (weights + cache))
