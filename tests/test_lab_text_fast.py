"""The text lab's fast engine: it says what Hugging Face's Llama says, token for token."""

import copy
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from labs.text_generation import fast, plain_ops
from labs.text_generation.fast import FastLlama
from labs.text_generation.plain_ops import Weight
from workshop.errors import WorkshopError
from workshop.run.torchvision import make_importable

make_importable()  # transformers imports it where it is installed
transformers = pytest.importorskip("transformers")
triton_ops = pytest.importorskip("labs.text_generation.triton_ops", exc_type=ImportError)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "one-head-each": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "groups-of-two": {"num_key_value_heads": 3, "vocab_size": 512},
    "groups-of-four": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24},
    "llama3-rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "one-kv-head": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 112,
        "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": True,
    },
}  # fmt: skip
SIZES = {
    "vocab_size": 311, "hidden_size": 96, "intermediate_size": 152, "num_hidden_layers": 2,
    "num_attention_heads": 6, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LENGTHS = (17, 5, 11)
NEW = 128


@dataclasses.dataclass
class Case:
    """A random model in a folder, prompts padded on the left, what Hugging Face makes of them."""

    folder: Path
    model: Any
    ids: Tensor
    mask: Tensor

    @functools.cached_property
    def greedy(self) -> Tensor:
        return self.generate(eos_token_id=None, pad_token_id=0)

    def row(self, index: int) -> "Case":
        here = slice(index, index + 1)
        alone = dataclasses.replace(self, ids=self.ids[here], mask=self.mask[here])
        alone.__dict__["greedy"] = self.greedy[here]
        return alone

    def generate(self, **settings: Any) -> Tensor:
        config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, **settings)
        found: Tensor = self.model.generate(
            self.ids, attention_mask=self.mask, generation_config=config
        )
        return found[:, self.ids.shape[1] :]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def make(name: str) -> Case:
        torch.manual_seed(list(MODELS).index(name))
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | MODELS[name]))
        with torch.no_grad():
            for weight in model.parameters():  # large enough for attention to look somewhere
                std = 1.5 * weight.shape[-1] ** -0.5
                weight.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.normal_(std=std)
        folder = tmp_path_factory.mktemp(name)
        model.eval().save_pretrained(folder, max_shard_size="200KB")
        ids = torch.randint(1, model.config.vocab_size, (len(LENGTHS), max(LENGTHS)))
        places = torch.arange(max(LENGTHS))
        mask = (places >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]).long()
        return Case(folder, model, ids * mask, mask)

    return make


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_hugging_faces(case, name: str) -> None:
    it = case(name)
    ours = FastLlama(it.folder, torch.float32, "cpu")
    answer = ours.generate(it.ids, it.mask, NEW)
    assert torch.equal(answer.tokens, it.greedy)
    alone = it.row(0)  # its products are other kernels
    assert torch.equal(ours.generate(alone.ids, alone.mask, NEW).tokens, alone.greedy)
    assert all(len(set(row.tolist())) > NEW / 4 for row in answer.tokens), "too easy to be equal"
    assert answer.first_s > 0 and len(answer.step_s) == NEW - 1 and min(answer.step_s) > 0


def test_draws_have_the_models_probabilities(case) -> None:
    it = case("one-head-each")
    ours = FastLlama(it.folder, torch.float32, "cpu")
    alone = it.ids[:1].expand(1000, -1)
    tokens = ours.generate(alone, torch.ones_like(alone), 1, temperature=0.7).tokens[:, 0]
    with torch.no_grad():
        expected = (it.model(it.ids[:1]).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(tokens, minlength=len(expected)) / len(tokens)
    assert (counts - expected).abs().max() < 5 * (0.25 / len(tokens)) ** 0.5


def forced_logits(ours: FastLlama, it: Case, steps: int) -> Tensor:
    """Logits (B, steps, vocab) of the prefill and the steps after it, on Hugging Face's tokens."""
    length = it.ids.shape[1]
    with torch.no_grad():
        session = ours.session(len(it.ids), length + steps, sampled=False)
        session.begin(it.ids.to(ours.device), length - it.mask.sum(1), 1.0, 0)
        logits = [ours.prefill(session, padded=True)]
        for step in range(1, steps):
            session.newest.copy_(it.greedy[:, step - 1])
            logits.append(ours.decode(session))
    return torch.stack(logits, 1).double().cpu()


def their_logits(model: Any, it: Case, steps: int) -> Tensor:
    ids = torch.cat((it.ids, it.greedy[:, : steps - 1]), 1)
    mask = torch.cat((it.mask, torch.ones_like(it.greedy[:, : steps - 1])), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits[:, -steps:].double()


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def copy_of(model: Any, dtype: torch.dtype) -> Any:
    return copy.deepcopy(model).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_logits_are_as_near_the_truth_as_hugging_faces(case, name: str, device: str) -> None:
    it, steps = case(name), 12
    rounded = copy_of(it.model, torch.bfloat16)
    truth = their_logits(copy_of(rounded, torch.float64), it, steps)
    ours = FastLlama(it.folder, torch.bfloat16, device)
    allowed = error(their_logits(rounded, it, steps), truth)
    assert 1e-4 < error(forced_logits(ours, it, steps), truth) < 1.5 * allowed
    assert error(forced_logits(ours, it.row(0), steps), truth[:1]) < 1.5 * allowed


WITH_KERNELS = pytest.param("one-kv-head", True, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "kernels"), [*((name, False) for name in MODELS), WITH_KERNELS])
def test_int8_logits_are_those_of_its_weights(case, name: str, kernels: bool) -> None:
    it, steps = case(name), 12
    exact = copy_of(it.model, torch.float64)
    exact.lm_head.weight = torch.nn.Parameter(exact.lm_head.weight.clone())  # its own, if tied
    for part, layer in exact.named_modules():
        if isinstance(layer, torch.nn.Linear):
            rounded = plain_ops.quantised(it.model.get_submodule(part).weight.detach())
            layer.weight.data = plain_ops.matrix(rounded, torch.float64)
    truth = their_logits(exact, it, steps)
    ours = FastLlama(it.folder, torch.float32, "cpu", int8=True, kernels=kernels)
    plain = FastLlama(it.folder, torch.float32, "cpu")
    assert error(forced_logits(ours, it, steps), truth) < 1e-5
    assert 1e-3 < error(forced_logits(plain, it, steps), truth) < 0.2  # what int8 itself costs
    assert ours.bytes_per_token() < 0.3 * plain.bytes_per_token()


def test_after_its_end_a_row_is_padding(case) -> None:
    it = case("groups-of-two")
    ends = [int(it.greedy[0, 21]), *(int(row[40]) for row in it.greedy[1:])]
    expected = it.generate(eos_token_id=ends, pad_token_id=3)
    ours = FastLlama(it.folder, torch.float32, "cpu")
    ours.eos, ours.pad = tuple(ends), 3
    streamed: list[Tensor] = []
    for on_tokens in (None, streamed.append):
        answer = ours.generate(it.ids, it.mask, NEW, on_tokens=on_tokens)
        width = expected.shape[1]
        assert width < NEW and torch.equal(answer.tokens[:, :width], expected)
        assert answer.tokens.shape == (3, NEW) and (answer.tokens[:, width:] == 3).all()
        assert width <= len(answer.step_s) + 1 <= width + fast.CHECK_EVERY
    assert torch.equal(torch.stack(streamed, 1), expected)


def test_what_it_does_not_have_is_refused(case, tmp_path) -> None:
    shutil.copytree(case("one-head-each").folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    with pytest.raises(WorkshopError, match="attention_bias True"):
        FastLlama(tmp_path, torch.float32, "cpu")


def shapes(batch: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each function of plain_ops with arguments of odd sizes, whose caches it may write."""
    width, ffn, kv_heads, group, head_dim, slots = 110, 152, 3, 5, 28, 300
    x, norm = torch.randn(batch, width), torch.rand(width) + 0.5
    for int8 in (False, True):
        weight = torch.randn(2 * ffn, width) / width**0.5
        matrix = plain_ops.quantised(weight) if int8 else Weight(weight)
        yield "project", (x, norm, matrix, 1e-5)
        yield "swiglu", (x, norm, matrix, 1e-5)
        yield "add_product", (torch.randn(batch, 2 * ffn), x, matrix)
    few = min(batch, 3)
    yield "likeliest", (torch.randint(3, (few, 9000)).float(),)  # of equals the first
    cache = torch.randn(few, 2, kv_heads, slots, head_dim)
    pads, frequencies = torch.randint(0, 140, (few,)), torch.rand(head_dim // 2)
    columns = kv_heads * (group + 2) * head_dim
    for slot in (140, 256):
        slots_of = (torch.tensor([slot]), pads, frequencies)
        yield "decode_attention", (torch.randn(few, columns), cache, *slots_of)
    yield "store_prompts", (torch.randn(few * 7, columns), cache, pads // 20, frequencies)


def moved(part: Any, device: str) -> Any:
    if isinstance(part, Weight):
        return Weight(*(moved(piece, device) for piece in part))
    return part.to(device) if torch.is_tensor(part) else part


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("batch", (1, 2, 17, triton_ops.MOST_ROWS + 1))
def test_a_kernel_does_what_the_plain_function_does(batch: int, device: str) -> None:
    torch.manual_seed(batch)
    for name, arguments in shapes(batch):
        given = [moved(part, device) for part in arguments]
        ours = copy.deepcopy(given)
        found = [getattr(triton_ops, name)(*ours), *ours[1:2]]
        expected = [getattr(plain_ops, name)(*given), *given[1:2]]  # the second may be the cache
        for a, b in zip(found, expected, strict=True):
            if torch.is_tensor(a):
                wrong = (a.double() - b.double()).norm()
                assert a.shape == b.shape and wrong <= 2e-6 * b.double().norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("int8", (False, True), ids=("plain", "int8"))
@pytest.mark.parametrize("name", MODELS)
def test_captured_kernels_do_what_the_plain_loop_does(case, name: str, int8: bool) -> None:
    it = case(name)
    eager, captured = (
        FastLlama(it.folder, torch.float32, "cuda", int8, kernels, kernels)
        for kernels in (False, True)
    )
    for rows in (slice(0, 3), slice(0, 1)):  # a single row's products are reductions
        ids, mask = it.ids[rows], it.mask[rows]
        for temperature in (0.0, 0.8):
            expected = eager.generate(ids, mask, NEW, temperature).tokens
            for _ in range(2):  # nothing of the first answer is left for the second
                assert torch.equal(captured.generate(ids, mask, NEW, temperature).tokens, expected)
        if not int8:
            assert torch.equal(captured.generate(ids, mask, NEW).tokens, it.greedy[rows])
