"""The version files: what may differ between them, and that each is Hugging Face's Llama."""

import ast
import dataclasses
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workshop import versions
from workshop.gate import canonical, parity
from workshop.run import interpreter
from workshop.run.torchvision import make_importable
from workshop.versions import VERSIONS

KEYS = versions.available()
# Where Triton's kernels are compiled for a GPU, the CPU can't run them: test_gpu.py checks V3.
ON_CPU = [key for key in KEYS if not VERSIONS[key].triton or interpreter.asked_for()]


def definitions(key: str) -> dict[str, str]:
    """Source text of each top-level class and function."""
    text = VERSIONS[key].path.read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            source = ast.get_source_segment(text, node)
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            found[node.name] = "\n".join([*decorators, source or ""])
    return found


@pytest.mark.parametrize("key", [key for key in KEYS if VERSIONS[key].parent])
def test_a_version_changes_what_the_registry_says_and_nothing_else(key) -> None:
    version = VERSIONS[key]
    assert version.parent is not None
    before, after = definitions(version.parent), definitions(key)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == set(version.changes)


@pytest.mark.parametrize("key", KEYS)
def test_config_and_training_step_are_the_same_in_every_version(key) -> None:
    for name in ("TinyLlamaConfig", "train_step"):
        assert definitions(key)[name] == definitions("v1")[name]
    for name in ("make_capturable", "capture_step"):
        assert definitions(key).get(name) in (None, definitions("v4")[name])


@pytest.mark.parametrize("key", KEYS)
def test_a_version_file_needs_torch_alone(key) -> None:
    allowed = {"torch", *sys.stdlib_module_names} | ({"triton_kernels"} if key == "v3" else set())
    tree = ast.parse(VERSIONS[key].path.read_text(encoding="utf-8"))
    imported = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= allowed
    assert (ast.get_docstring(tree) or "").split("\n\n")[1].startswith("Changed since V")


@pytest.mark.parametrize("key", ON_CPU)
def test_weights_of_a_hugging_face_llama_give_its_logits_and_loss(key, odd_config) -> None:
    make_importable()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=odd_config.vocab_size,
            hidden_size=odd_config.hidden_dim,
            intermediate_size=odd_config.intermediate_dim,
            num_hidden_layers=odd_config.num_layers,
            num_attention_heads=odd_config.num_heads,
            num_key_value_heads=odd_config.num_kv_heads,
            max_position_embeddings=odd_config.max_seq_len,
            rms_norm_eps=odd_config.norm_eps,
            rope_theta=odd_config.rope_theta,
            tie_word_embeddings=True,
            attention_bias=False,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for parameter in theirs.parameters():  # large enough for attention to look somewhere
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.15)
    ours = versions.load(key).TinyLlama(odd_config)
    state = theirs.state_dict()
    canonical.load_canonical(ours, {name.removeprefix("model."): state[name] for name in state})

    tokens = torch.randint(odd_config.vocab_size, (3, 63))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(tokens)  # shifts the labels itself
    logits = expected.logits[:, :-1]
    torch.testing.assert_close(ours(inputs), logits, rtol=1e-4, atol=1e-4 * logits.std().item())
    loss = theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(ours(inputs, targets), loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("key", ON_CPU)
def test_initialisation_starts_at_the_loss_of_guessing(key) -> None:
    module = versions.load(key)
    torch.manual_seed(0)
    config = module.TinyLlamaConfig(num_layers=2)
    model = module.TinyLlama(config)
    tokens = torch.randint(config.vocab_size, (2, 65))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.dim() == 0
    assert abs(loss.item() - torch.tensor(config.vocab_size).log().item()) < 0.3


class Recorder(TorchDispatchMode):
    """Writes down every operation with its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        self.operations.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


def operations_of_a_step(module, model: nn.Module) -> list[str]:
    optimizer = module.configure_optimizer(model, 1e-3)
    tokens = torch.arange(2 * 9).view(2, 9)
    with Recorder() as recorder:
        model(tokens, tokens).backward()
        optimizer.step()
    return recorder.operations


def test_each_switch_of_v2_keeps_the_model_and_all_together_give_v1(odd_config) -> None:
    """test_waterfall.py shows that each changes the code that runs."""
    v1, v2 = versions.load("v1"), versions.load("v2")
    names = [field.name for field in dataclasses.fields(v2.Fusions)]
    for name in names:
        report = parity.check(
            lambda config, n=name: v2.TinyLlama(config, v2.Fusions(**{n: False})), odd_config
        )
        assert report.passed, (name, report.failures)
    fused = operations_of_a_step(v2, v2.TinyLlama(odd_config))
    nothing = v2.Fusions(**dict.fromkeys(names, False))
    plain = operations_of_a_step(v2, v2.TinyLlama(odd_config, nothing))
    assert plain == operations_of_a_step(v1, v1.TinyLlama(odd_config))
    assert len(fused) < 0.7 * len(plain)
