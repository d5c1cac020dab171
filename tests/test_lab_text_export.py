"""Text lab: what train_and_export.py saves is the trained model, and a tokenizer of bytes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from labs.text_generation import export, train_and_export
from workshop import errors, versions
from workshop.gate import canonical
from workshop.run import data, trainer
from workshop.run.precision import PRECISIONS
from workshop.run.torchvision import make_importable

make_importable()  # transformers imports it where it is installed

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

PROGRAM = versions.ROOT / "labs/text_generation/train_and_export.py"
SMALL = "--config tiny --seq-len 19 --device cpu".split()


@pytest.mark.parametrize("key", versions.available())
def test_the_saved_model_is_the_trained_one(key, odd_config, tmp_path) -> None:
    # Large weights, a large epsilon and a short period, so that each mistake shows.
    sizes = dataclasses.replace(odd_config, rope_theta=500.0, norm_eps=1e-2)
    module = versions.load(key)
    model = module.TinyLlama(module.TinyLlamaConfig(**dataclasses.asdict(sizes)))
    torch.manual_seed(0)
    state = canonical.canonical_state(sizes, seed=0)
    large = {
        name: 5 * weight if weight.dim() > 1 else weight + 0.3 * torch.randn_like(weight)
        for name, weight in state.items()
    }
    del large["lm_head.weight"]  # tied
    canonical.load_canonical(model, large)
    optimizer = module.configure_optimizer(model, 1e-2)
    batches = torch.randint(sizes.vocab_size, (3, 2, 2, 37))
    trainer.train_losses(model, optimizer, batches, PRECISIONS["fp32"])
    export.save(model, tmp_path / "saved", {})
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        ours, theirs = model(batches[0, 0]), saved(batches[0, 0]).logits
    assert ours.std() > 1
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert saved.lm_head.weight is saved.model.embed_tokens.weight


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "model"
    assert train_and_export.main([*SMALL, "--steps", "7", "--output-dir", str(folder)]) == 0
    return folder


def test_a_folder_has_all_that_a_loader_needs(trained) -> None:
    assert [path.name for path in trained.parent.iterdir()] == ["model"]
    names = "config.json generation_config.json model.safetensors tokenizer.json training.json"
    assert set(names.split()) < {path.name for path in trained.iterdir()}
    modes = {path.stat().st_mode for path in trained.iterdir()}
    assert len(modes) == 1
    record = json.loads((trained / export.RECORD).read_text())
    assert len(record["losses"]) == 7
    assert record["losses"][-1] < record["losses"][0]


def test_tokens_are_bytes(trained) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    every = "".join(map(chr, range(0xD800))) + "😀 </s><pad> n't  .\r\n\t end "
    tokens = tokenizer(every)["input_ids"]
    assert tokens == list(every.encode())
    assert tokenizer.decode(tokens) == every
    letters = tokenizer.convert_ids_to_tokens(list(range(data.BYTE_VALUES)))
    assert len(set(letters)) == data.BYTE_VALUES  # bytes that UTF-8 never has are tokens, too
    assert len(tokenizer) == export.VOCABULARY and tokenizer.padding_side == "left"
    for settings in (
        AutoConfig.from_pretrained(trained),
        GenerationConfig.from_pretrained(trained),
    ):
        numbers = (settings.bos_token_id, settings.pad_token_id, settings.eos_token_id)
        assert numbers == (None, tokenizer.pad_token_id, tokenizer.eos_token_id) == (None, 256, 257)


def test_a_seed_gives_the_same_model(trained, tmp_path) -> None:
    again = tmp_path / "model"
    assert train_and_export.main([*SMALL, "--steps", "7", "--output-dir", str(again)]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (trained, again)]
    assert weights[0] == weights[1]


def test_an_export_that_ends_early_leaves_what_was_there(tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "model"
    command = [*SMALL, "--steps", "1", "--output-dir", str(folder)]

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export, "byte_tokenizer", interrupted)
        assert train_and_export.main(command) == errors.INTERRUPTED
        assert capsys.readouterr().err.endswith("interrupted: nothing saved\n")
        assert not list(tmp_path.iterdir())
    assert train_and_export.main(command) == errors.DONE
    assert train_and_export.main(command) == errors.WRONG_USAGE
    assert "has a model: give --replace" in capsys.readouterr().err
    command.append("--replace")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(export, "byte_tokenizer", interrupted)
        assert train_and_export.main(command) == errors.INTERRUPTED
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_ctrl_c_saves_what_is_trained(tmp_path) -> None:
    command = [sys.executable, PROGRAM, *SMALL, "--steps", "1000000"]
    process = subprocess.Popen(
        [*command, "--output-dir", tmp_path / "model"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(" s  step " in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == errors.INTERRUPTED
    assert json.loads((tmp_path / "model" / export.RECORD).read_text())["losses"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
