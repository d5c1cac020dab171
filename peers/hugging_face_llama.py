"""A peer: Hugging Face's Llama as its users train it, with torch.compile and the fused AdamW.

Not a version of the ladder: `compare_versions.py --versions v1 v3 v4 hf` measures it with them,
in the same run, through the same gate and by the same clock. hugging_face_graph.py is the same with
a graph. It needs the `transformers` package.
"""

import sys
from typing import Any

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

    from workshop.cli import leave_if_missing

    leave_if_missing("hf")

import torch
from torch import Tensor, nn

from workshop import versions
from workshop.run.torchvision import make_importable

make_importable()  # transformers imports it where it is installed

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

TinyLlamaConfig: Any = versions.load("v1").TinyLlamaConfig
CHOICES: dict[str, Any] = {"tie_word_embeddings": True, "attn_implementation": "sdpa"}


class TinyLlama(nn.Module):
    """`LlamaForCausalLM` with V1's calls, and with V1's names of weights, which are its own without
    their prefix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        model = LlamaForCausalLM(llama_config(config))
        self.embed_tokens, self.layers = model.model.embed_tokens, model.model.layers
        self.norm, self.lm_head = model.model.norm, model.lm_head
        self.rotary_emb = model.model.rotary_emb
        self.whole = (model,)  # in a tuple, for its weights have their names already

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        (model,) = self.whole
        return run(model, tokens, targets)


def run(model: Any, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
    """A `LlamaForCausalLM`'s logits, or its loss with targets: V1's calls."""
    if targets is None:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits
    labels = {"labels": targets, "shift_labels": targets}  # shifted by the data, once
    loss: Tensor = model(input_ids=tokens, **labels, use_cache=False).loss
    return loss


def llama_config(config: Any) -> LlamaConfig:
    """The sizes of a `TinyLlamaConfig` in their words."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
    }
    return LlamaConfig(**sizes, **CHOICES)


def configure_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """PyTorch's AdamW in one kernel."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)


if __name__ == "__main__":
    from workshop.cli import main

    sys.exit(main(sys.modules[__name__]))
