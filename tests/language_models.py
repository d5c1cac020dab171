"""Small causal models of several families with random weights, and a tokenizer, saved as Hugging
Face saves them."""

from pathlib import Path
from typing import Any

import torch

from labs.text_generation.export import byte_tokenizer

FAMILIES = ("llama", "gpt2", "opt", "neox", "bloom")
POSITIONS = 128
SHARD = "40KB"


def save(family: str, folder: Path, *, pad: bool = True, **changes: Any) -> Path:
    """Writes a model of 300 tokens and 2 layers in several shards; its folder.

    Args:
        pad: whether the tokenizer has a token for padding.
        changes: of the config, under Hugging Face's names.
    """
    from workshop.run.torchvision import make_importable

    make_importable()  # transformers imports it
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.disable_progress_bar()
    kinds = {
        "llama": (transformers.LlamaConfig, {"num_key_value_heads": 2, "intermediate_size": 96}),
        "gpt2": (transformers.GPT2Config, {}),
        "opt": (transformers.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 32}),
        "neox": (transformers.GPTNeoXConfig, {"intermediate_size": 96}),
        "bloom": (transformers.BloomConfig, {}),
    }
    kind, own = kinds[family]
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bos_token_id": None, "eos_token_id": 257, "pad_token_id": None,
    }  # fmt: skip
    if family != "bloom":
        sizes["max_position_embeddings"] = POSITIONS
    # With weights as large as these the likeliest tokens change from step to step.
    spread = {"init_std" if family == "opt" else "initializer_range": 0.4}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(kind(**sizes, **own, **spread, **changes))
    model.save_pretrained(folder, max_shard_size=SHARD)
    tokenizer = byte_tokenizer(POSITIONS)
    if not pad:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return folder
