"""The text generation lab, on small models with random weights of five families."""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HANGS_S
from stored_runs import lab_run
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

import language_models

from labs import shared
from labs.text_generation import (
    documents,
    engines,
    fast,
    gate,
    lm_gen,
    lm_gen_ds,
    measure_engines,
    models,
    plain_ops,
    prompts,
)
from labs.text_generation.engines import Answer, HuggingFace
from labs.text_generation.models import Loaded
from workshop import labs, records
from workshop.judge.pipe import Closed
from workshop.judge.turn import Turn
from workshop.labs import LabRun
from workshop.run import hardware
from workshop.run.precision import get_precision

CPU = torch.device("cpu")
PROMPTS = ("The function of proteins", "x", "Evolution", "a somewhat longer prompt, äöü")
SAMPLE = "The function of proteins is mainly dictated by its three dimensional structure."
NEW = 24


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's folder; GPT-2's tokenizer has no token for padding, as the published one."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("models") / family
            made[family] = language_models.save(family, path, pad=family != "gpt2")
        return made[family]

    return folder


@pytest.fixture
def typed(tmp_path: Path, saved, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs lm_gen on a Llama, beside prompts.txt; a later flag takes a former one's place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "measure_copy_gbs", lambda device: 10.0)  # takes half a second
    Path("prompts.txt").write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")

    def run(*words: object, main: Callable[..., int] = lm_gen.main) -> int:
        flags = ["--model_path", saved("llama"), "--input_file", "prompts.txt", "--device", "cpu"]
        flags += ["--num_tokens", NEW, "--output-dir", "results"]
        try:
            return main([str(word) for word in [*flags, *words]])
        except SystemExit as ended:
            return int(ended.code or 0)

    return run


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def all_runs() -> list[LabRun]:
    return records.load_folder(Path("results"), LabRun)


def record() -> LabRun:
    (run,) = all_runs()
    return run


def load(folder: Path, *flags: str) -> tuple[Loaded, engines.Engine]:
    arguments = lm_gen.build_parser().parse_args(["--model_path", str(folder), *flags])
    precision = get_precision(arguments.dtype, CPU)
    loaded = models.load(arguments, CPU, precision, contextlib.ExitStack())
    return loaded, engines.make(arguments, loaded, NEW)


# --- a batch is each prompt alone ----------------------------------------------------------------


CASES = [(family, engine) for family in language_models.FAMILIES for engine in ("hf", "static")]
if sys.version_info < (3, 11):  # transformers' last version for Python 3.10 fails there
    CASES.remove(("bloom", "static"))


@pytest.mark.parametrize(
    ("family", "engine"), [*CASES, ("llama", "fast"), ("llama", "fast --load_in_8bit")]
)
def test_a_batch_gives_each_prompt_what_it_gets_alone(family: str, engine: str, saved) -> None:
    loaded, generates = load(saved(family), *f"--engine {engine} --dtype fp32".split())
    rows = prompts.encode(PROMPTS, loaded, NEW)
    (together,) = prompts.batches(rows, len(rows), loaded.pad)
    for temperature in (0.0, 0.9):
        answer = generates.generate(together.ids, together.mask, NEW, temperature, seed=5)
        batch = [gate.until_end(row, loaded.ends) for row in answer.tokens.tolist()]
        assert len(answer.step_s) == answer.tokens.shape[1] - 1
        for i, one in enumerate(prompts.batches(rows, 1, loaded.pad)):
            alone = generates.generate(one.ids, one.mask, NEW, temperature, seed=5 + i)
            assert gate.until_end(alone.tokens[0].tolist(), loaded.ends) == batch[i]
        assert len({token for row in batch for token in row}) > 10  # no model of one word
        if not temperature:
            precision, run = get_precision("fp32", CPU), lab_run()
            check = gate.Check(loaded, precision, [together], NEW, plain_loop=engine == "hf")
            turn = Turn(judged=False, check=check)
            turn.begin()
            turn.end([1.0], {"tokens": answer.tokens})
            turn.answer(lambda: ({}, {}), run)
            assert run.gate.status == "pass", run.gate.failures


# --- the program ---------------------------------------------------------------------------------


def test_the_seeds_commands(typed, saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--batch_size", 2, "--temperature", 0.95, "--output_file", "made/out") == 0
    printed = capsys.readouterr().out
    for part in ("loaded in", "pass: ", "first token after", "(p99)", "tokens/s of the batch",
                 "bytes read for a token", "GB/s", "KV cache:"):  # fmt: skip
        assert part in printed, printed
    made, run = lines("made/out.jsonl"), record()
    assert [line["prompt"] for line in made] == list(PROMPTS)
    text = Path("made/out").read_text(encoding="utf-8")
    assert all(line["prompt"] + line["continuation"] == line["text"] for line in made)
    assert all(line["text"] in text and line["first_token_ms"] > 0 for line in made)
    assert run.status == "complete" and run.gate.status == "pass"
    assert run.units_per_step == 2 and run.subject.startswith("llama, batch 2, 24 + 24 tokens")
    assert str(saved("llama")) not in " ".join(run.command)
    # The command of the five words; drawn anew alone, and with another seed.
    words = [saved("llama"), "prompts.txt", "again", str(NEW), "0.95"]
    assert lm_gen.main([*map(str, words), "--device", "cpu", "--output-dir", "results"]) == 0
    again = [line["text"] for line in lines("again.jsonl")]
    assert again == [line["text"] for line in made]
    assert all("again" not in " ".join(run.command) for run in all_runs())
    typed("--temperature", 0.95, "--output_file", "other", "--seed", 1000)
    assert again != [line["text"] for line in lines("other.jsonl")]


def test_a_folder_has_a_prompt_in_each_file(typed) -> None:
    Path("texts").mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "first\nwith a line more\n")):
        Path("texts", name).write_text(text)
    assert typed("--input_file", "texts", "--output_file", "out", "--batch_size", 8) == 0
    assert [line["prompt"] for line in lines("out.jsonl")] == ["first\nwith a line more", "second"]


def test_one_prompt_gives_several_texts_or_a_stream(
    typed, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("one.txt").write_text(SAMPLE)
    flags = ["--input_file", "one.txt", "--temperature", 0.95, "--batch_size", 3]
    assert typed(*flags, "--output_file", "three") == 0
    three = [line["text"] for line in lines("three.jsonl")]
    assert len(three) == 3 and len({*three}) > 1 and record().units_per_step == 3
    capsys.readouterr()
    assert typed("--stream", "--input_file", "one.txt", "--output_file", "out") == 0
    assert lines("out.jsonl")[0]["text"] in capsys.readouterr().out


def test_what_is_interrupted_leaves_what_was_done(typed, monkeypatch, capsys) -> None:
    generate, calls = HuggingFace.generate, []

    def interrupted(*arguments: Any, **more: Any) -> Answer:
        calls.append(None)
        if len(calls) == 3:  # the first warms up
            raise KeyboardInterrupt
        return generate(*arguments, **more)

    monkeypatch.setattr(HuggingFace, "generate", interrupted)
    assert typed("--batch_size", 3, "--output_file", "out") == 130
    printed = capsys.readouterr()
    assert "texts of finished batches" in printed.err and "tokens/s" not in printed.out
    assert [line["prompt"] for line in lines("out.jsonl")] == list(PROMPTS[:3])
    assert not list(Path("results").rglob("*.jsonl"))


def test_a_model_over_cpu_and_disk(typed) -> None:
    pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
              "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    Path("map.json").write_text(json.dumps(places))
    assert typed("--output_file", "plain") == 0
    shutil.rmtree("results")
    assert typed("--output_file", "spread", "--device_map", "map.json") == 0
    assert [line["text"] for line in lines("spread.jsonl")] == [
        line["text"] for line in lines("plain.jsonl")
    ]
    assert "on cpu, disk" in record().variant and "floor_ms" not in record().metrics


# --- the gate, and what a token costs ------------------------------------------------------------

Generate = Callable[..., Answer]


def one_token_less(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[torch.arange(len(mask)), mask.argmax(1)] = 0  # of each prompt the first
    return mask


def masked(wrong: Callable[[Tensor], Tensor]) -> Generate:
    return lambda true, self, ids, mask, *more: true(self, ids, wrong(mask), *more)


def answered(wrong: Callable[[Tensor], Tensor]) -> Generate:
    def fault(true: Generate, *parts: Any) -> Answer:
        answer = true(*parts)
        return dataclasses.replace(answer, tokens=wrong(answer.tokens))

    return fault


def remembered(key: Callable[[Tensor, Tensor], object]) -> Generate:
    """An earlier answer is given again, the warm-up's among them."""

    def fault(true: Generate, self: Any, ids: Tensor, mask: Tensor, *more: Any) -> Answer:
        known, name = self.__dict__.setdefault("known", {}), key(ids, mask)
        if name not in known:
            known[name] = true(self, ids, mask, *more)
        return copy.copy(known[name])

    return fault


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return (x * cos + torch.stack((-odd, even), -1).flatten(-2) * sin).to(x.dtype)


ANGLES, DECODE = plain_ops.angles, plain_ops.decode_attention


def one_position_on(slot: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    return ANGLES(slot + (slot.numel() == 4), frequencies)  # in a decode step alone


def late_mask(qkv: Tensor, cache: Tensor, slot: Tensor, *rest: Tensor) -> Tensor:
    cache[:, :, :, slot - 1] = 0  # as if the newest token but one were not seen
    return DECODE(qkv, cache, slot, *rest)


def no_padding(qkv: Tensor, cache: Tensor, slot: Tensor, pads: Tensor, *rest: Tensor) -> Tensor:
    return DECODE(qkv, cache, slot, torch.zeros_like(pads), *rest)


FAULTS: dict[str, Generate] = {
    "no mask": masked(torch.ones_like),
    "first token hidden": masked(one_token_less),
    "lengths of another prompt": masked(lambda mask: mask.roll(1, 0)),
    "one prompt's answer for all": answered(lambda tokens: tokens[:1].expand_as(tokens)),
    "answers in another order": answered(lambda tokens: tokens.roll(1, 0)),
    "every second token twice": answered(lambda t: t[:, torch.arange(t.shape[1]) // 2 * 2]),
    "remembered by the first token": remembered(lambda ids, mask: int(ids[0, 0])),
    "remembered by the pointer": remembered(lambda ids, mask: ids.data_ptr()),
    "remembered by the lengths": remembered(lambda ids, mask: tuple(mask.sum(1).tolist())),
}
PARTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "pairs side by side": ("rotate", interleaved),
    "one position on": ("angles", one_position_on),
    "a late mask": ("decode_attention", late_mask),
    "no padding in the steps": ("decode_attention", no_padding),
}
"""The fast engine's own functions, and faults of them."""


@pytest.fixture(scope="module")
def measured_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
    return measure_engines.make_model(tmp_path_factory.mktemp("measured"), CPU, 64, sizes)


@pytest.mark.parametrize(
    ("engine", "fault", "dtype"),
    [
        *(("fast", fault, "fp32") for fault in (None, *FAULTS, *PARTS)),
        *(("fast", fault, "bf16") for fault in (None, *PARTS)),
        *((engine, fault, "fp32") for engine in ("static", "hf") for fault in (None, "no mask")),
    ],
)
def test_drawn_prompts_show_what_an_engine_does_wrong(
    engine, fault, dtype, typed, measured_model, monkeypatch, capsys
) -> None:
    owner: Any = fast.FastLlama if engine == "fast" else HuggingFace
    true = owner.generate
    if fault in FAULTS:

        def generates(self: Any, *more: Any) -> Answer:
            own = engine != "static" or "cache_implementation" in self._settings
            return FAULTS[fault](true, self, *more) if own else true(self, *more)

        monkeypatch.setattr(owner, "generate", generates)
    elif fault:
        monkeypatch.setattr(plain_ops, *PARTS[fault])

    def turn(judged: bool, check: gate.Check) -> Turn:
        texts = measure_engines.make_prompts(4, 16, random.Random(5))
        rows = prompts.encode(texts, check.loaded, NEW)
        check.left = prompts.batches(rows, 4, check.loaded.pad)
        return Turn(judged, check)

    if "remembered" not in str(fault):  # that has to show in a process alone, too
        monkeypatch.setattr(lm_gen, "Turn", turn)
    lines = measure_engines.make_prompts(4, 16, random.Random(4))
    Path("prompts.txt").write_text("\n".join(lines), encoding="utf-8")
    words = ["--model_path", measured_model, "--engine", engine, "--batch_size", 4]
    status, run = typed(*words, "--dtype", dtype), record()
    assert status == (1 if fault else 0), run.gate
    if fault:
        assert run.status == "gate failed" and not labs.build_rows([run])[0].times
        printed = capsys.readouterr().out
        assert "FAIL, so no speed" in printed and "tokens/s" not in printed


def test_what_is_read_for_a_token(saved) -> None:
    """A row of the embeddings, unless the same table makes the logits; the cache of two heads."""
    loaded, _ = load(saved("llama"))
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32
    assert models.bytes_read(loaded.model) == 4 * (2 * layer + 32 + 300 * 32)
    assert models.cache_bytes(loaded) == 2 * 2 * (2 * 8) * 4
    tied, _ = load(saved("gpt2"))
    weights = sum(weight.numel() for weight in tied.model.parameters())
    assert models.bytes_read(tied.model) == 4 * (weights - language_models.POSITIONS * 32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_the_operations_of_the_prompts_pass_are_those_that_pytorch_counts(family, saved) -> None:
    """But for the causal half of attention, which it counts in full."""
    loaded, _ = load(saved(family))
    model: Any = loaded.model
    model.set_attn_implementation("eager")  # of a CPU's fused attention it counts nothing
    lengths = 5, 23
    for length in lengths:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long), logits_to_keep=1)
        unseen = 4 * 2 * 32 * (length**2 - length * (length + 1) / 2)
        assert models.prefill_flops(model, [length]) == counter.get_total_flops() - unseen
    each = sum(models.prefill_flops(model, [length]) for length in lengths)
    assert models.prefill_flops(model, lengths) == each


# --- several processes, and peers ----------------------------------------------------------------


def test_the_parts_of_two_matrices_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    first, last, x = nn.Linear(6, 8), nn.Linear(8, 4), torch.randn(3, 6)
    total = torch.zeros(3, 4)
    for rank in range(2):
        part = copy.deepcopy(first), copy.deepcopy(last)
        engines.keep_part(part[0], "colwise", rank, 2)
        engines.keep_part(part[1], "rowwise", rank, 2)
        total += part[1](part[0](x).relu())
    torch.testing.assert_close(total, last(first(x).relu()))


@pytest.mark.slow
def test_two_processes_that_share_a_model_say_what_one_says(typed, tmp_path: Path) -> None:
    folder = language_models.save("llama", tmp_path / "llama", tie_word_embeddings=True)
    assert typed("--model_path", folder, "--batch_size", 3, "--output_file", "one") == 0
    shutil.rmtree("results")
    program = Path(lm_gen.__file__)
    flags = ["--model_path", folder, "--input_file", "prompts.txt", "--device", "cpu",
             "--num_tokens", NEW, "--output-dir", "results", "--batch_size", 3,
             "--output_file", "two", "--tensor_parallel", "--engine", "static"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*torchrun, program, *map(str, flags)], check=True, timeout=HANGS_S)
    assert Path("two").read_text() == Path("one").read_text()
    run = record()
    assert run.variant == "fp32, static, tensor parallel, 2 processes" and run.processes == 2
    assert run.gate.status == "pass"


def test_vllms_steps_become_an_answer(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its engine's interface as of 0.33: prompts may begin at different steps, and end."""
    loaded, alone = load(saved("llama"))
    rows = prompts.encode(PROMPTS, loaded, NEW)
    (batch,) = prompts.batches(rows, len(rows), loaded.pad)
    want = [row.tolist() for row in alone.generate(batch.ids, batch.mask, NEW).tokens]
    loaded.ends = [want[1][5]]
    want = [gate.until_end(row, loaded.ends) for row in want]
    said: dict[int, list[int]] = {}

    class Engine:
        def add_request(self, request_id: str, prompt: dict[str, list[int]], how: Any) -> None:
            assert prompt["prompt_token_ids"] == list(rows[int(request_id)])
            said[int(request_id)] = []

        def has_unfinished_requests(self) -> bool:
            return any(said[i] != want[i] for i in said)

        def step(self) -> list[SimpleNamespace]:
            late = any(said.values())
            chosen = [i for i in said if said[i] != want[i] and (late or i != 2)]
            for i in chosen:
                said[i].append(want[i][len(said[i])])
            outputs = {i: [SimpleNamespace(token_ids=said[i])] for i in reversed(chosen)}
            return [SimpleNamespace(request_id=str(i), outputs=o) for i, o in outputs.items()]

    vllm: Any = ModuleType("vllm")
    vllm.LLM = lambda *_, **__: SimpleNamespace(llm_engine=Engine())
    vllm.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    arguments = lm_gen.build_parser().parse_args(["--engine", "vllm", "--model_path", "model"])
    answer = engines.make(arguments, loaded, 64).generate(batch.ids, batch.mask, NEW)
    assert [gate.until_end(row, loaded.ends) for row in answer.tokens.tolist()] == want
    assert len(answer.step_s) == NEW - 1 and answer.first_s > 0


# --- wrong input ---------------------------------------------------------------------------------


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def without_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path := second_shard(folder))
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path, {"format": "pt"})


LONG = str(language_models.POSITIONS)
TWO = {"WORLD_SIZE": "2"}
WRONG: list[tuple[str, str, dict[str, str]]] = [
    ("--input_file binary", "binary is not UTF-8 text", {}),
    (f"--num_tokens {LONG}", f"prompt 1 has 24 tokens, and --num_tokens {LONG} follow", {}),
    ("--input_file binary --output_file binary", "binary has the prompts", {}),
    ("--engine fast --device_map auto", "--device_map", {}),
    ("", "2 processes would all do the same", TWO),
    ("--tensor_parallel --model_path GPT2", "no plan of columns", TWO),
    ("--tensor_parallel", "llama has 2 heads of keys, which 3 processes", {"WORLD_SIZE": "3"}),
]
"""Flags, what the answer says, and the environment."""
MISSING = {
    "bitsandbytes": "--load_in_8bit",
    "accelerate": "--device_map auto",
    "deepspeed": "--engine deepspeed",
    "vllm": "--engine vllm",
}
DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: second_shard(folder).write_text("version https://git-lfs"), "git lfs pull"),
    (without_weight, "1 weights are missing or have another shape"),
]


@pytest.fixture
def refuses(typed, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., None]]:
    Path("binary").write_bytes(b"\xff\xfe\x00")

    def check(flags: list[str], status: int, message: str, **more: Any) -> None:
        assert typed("--output_file", "out", *flags, **more) == status, flags
        printed = capsys.readouterr()
        (line,) = [x for x in printed.err.splitlines() if not x.startswith(("usage:", " "))]
        assert message in line, line
        assert printed.out == "" and not Path("out").exists()

    yield check


@pytest.mark.parametrize(("flags", "message", "environment"), WRONG)
def test_what_is_wrong_is_said_in_a_line(
    flags, message, environment, refuses, saved, monkeypatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = [str(saved("gpt2")) if word == "GPT2" else word for word in flags.split()]
    refuses(words, 2, message)


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_a_damaged_model_is_refused(damage, message, saved, refuses, tmp_path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved("llama"), folder)
    damage(folder)
    refuses(["--model_path", str(folder)], 2, message)


def test_what_this_machine_has_not_is_said_in_a_line(refuses, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *_: None if name in MISSING else find(name)
    )
    for name, flags in MISSING.items():
        refuses(flags.split(), 77, f"{name} ")
    refuses(["--load_in_8bit"], 77, "or take --engine fast")
    refuses([], 77, "deepspeed is missing", main=lambda argv: lm_gen_ds.main(argv, "deepspeed"))


# --- comparison of the engines -------------------------------------------------------------------


def test_the_measured_model_says_one_token_after_another(tmp_path: Path) -> None:
    """Not the same one for ever, which a faulty layer would not change."""
    _, engine = load(measure_engines.make_model(tmp_path, CPU, 64), "--engine", "hf")
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    rows = engine.generate(ids, torch.ones_like(ids), 32).tokens.tolist()
    assert all(len(set(row)) > 16 for row in rows)


def test_a_study_draws_prompts_and_wants_a_time_for_each_token(measured_model, tmp_path) -> None:
    study = measure_engines.Study(CPU, "s", tmp_path, measured_model, 10.0)
    plans = [measure_engines.plan(study, (2, 8, 4), ("fast", 1)) for _ in range(2)]
    drawn = [plan.check.draw()[0] for plan in plans if plan.check]
    assert torch.equal(drawn[0]["mask"], drawn[1]["mask"])
    assert drawn[0]["mask"].sum(1).tolist() == [8, 6]
    assert not torch.equal(drawn[0]["ids"], drawn[1]["ids"])
    (run,) = plans[0].planned
    plans[0].take_times(run, [[9.0, 1.0, 2.0, 3.0]])
    assert run.step_ms == [1.0, 2.0, 3.0]
    with pytest.raises(Closed, match="7 times of 4 tokens"):
        plans[0].take_times(run, [[9.0, *[1.0] * 6]])


def test_what_compiles_prepares_alone_and_what_failed_is_not_tried_again(monkeypatch) -> None:
    turns: list[tuple[int, list[str]]] = []

    def in_turns(plans: list[str], jobs: int) -> Iterator[LabRun]:
        turns.append((jobs, plans))
        return (lab_run(status="failed" if plan == "c" else "complete") for plan in plans)

    monkeypatch.setattr(shared.studies, "in_turns", in_turns)
    plan: Any = lambda case, repeat: case  # noqa: E731
    list(shared.alternating("abcd", 2, plan, 4, lambda case, repeat: case == "b" and not repeat))
    assert turns == [(4, ["a", "c", "d"]), (1, ["b"]), (4, ["d", "b", "a"]), (1, [])]


@pytest.mark.slow
def test_engines_are_measured_in_turns(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the program needs no installation
    flags = "--engines fast vllm --batch-sizes 2 --prompt-tokens 8 --num-tokens 4 --repeats 2"
    words = [*flags.split(), "--long-prompt-tokens", "40", "--jobs", "2", "--device", "cpu"]
    assert measure_engines.main([*words, "--output-dir", str(tmp_path)]) == 0
    runs = records.load_folder(tmp_path, LabRun)
    assert {run.subject: len(run.step_ms) for run in runs if run.status == "complete"} == {
        "llama_3m, batch 2, 8 + 4 tokens": 3,
        "llama_3m, batch 2, 40 + 16 tokens": 15,
    }
    done = [run for run in runs if run.variant == "fp32, fast"]
    assert len(done) == 4 and all(run.gate.status == "pass" for run in done)
    assert len({run.metrics["copy_gbs"] for run in done}) == 1  # one floor for each subject
    assert [run.status for run in runs if run not in done] == ["skipped", "skipped"]
    assert (tmp_path / "engines.md").read_text().count("| pass |") == 2
    found = documents.parts(runs)[documents.README]["engines"]
    assert found.count("| fp32, fast | ") == 2 and found.count("| skipped |") == 2
    assert "vllm is missing" in found
