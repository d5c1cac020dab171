"""The named sizes: `--config tiny`, ..., `very_large`."""

from dataclasses import dataclass
from typing import Any

from workshop.errors import WorkshopError

ROPE_ROWS = 2048
"""Rows of a model's RoPE tables, unless the sequence is longer: `TinyLlamaConfig.max_seq_len`."""


@dataclass(frozen=True)
class Preset:
    """Sizes of a model and of its training batch."""

    hidden_dim: int
    num_layers: int
    num_heads: int
    seq_len: int
    batch_size: int
    vocab_size: int = 1000

    def model(self) -> dict[str, int]:
        """The fields of `TinyLlamaConfig` that this preset sets: two query heads share a
        key/value head, and the feed-forward layer is four times as wide as the model."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": 4 * self.hidden_dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_heads // 2,
        } | ({"max_seq_len": self.seq_len} if self.seq_len > ROPE_ROWS else {})


PRESETS = {
    "tiny": Preset(256, 4, 8, seq_len=128, batch_size=8),
    "small": Preset(512, 8, 8, seq_len=128, batch_size=8),
    "medium": Preset(1024, 12, 16, seq_len=512, batch_size=16),
    # medium's model and tokens, in one sequence: attention is a third of the products' work.
    "long": Preset(1024, 12, 16, seq_len=8192, batch_size=1),
    "large": Preset(2048, 16, 32, seq_len=1024, batch_size=8, vocab_size=32000),
    "very_large": Preset(4096, 24, 32, seq_len=2048, batch_size=4, vocab_size=32000),
}


def check_sizes(config: Any) -> None:
    """Raises WorkshopError, one line, if a `TinyLlamaConfig`'s sizes do not make a model."""
    for name, value in vars(config).items():
        if not value > 0:
            raise WorkshopError(f"{name} is {value}: it must be positive")
    if config.hidden_dim % config.num_heads:
        raise WorkshopError(
            f"hidden_dim {config.hidden_dim} is not divisible by num_heads {config.num_heads}"
        )
    if config.num_heads % config.num_kv_heads:
        raise WorkshopError(
            f"num_heads {config.num_heads} is not divisible by num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise WorkshopError(
            f"head size {config.head_dim} (hidden_dim / num_heads) is odd: RoPE rotates pairs"
        )


def rank(name: str) -> int:
    """Its place among PRESETS, the smallest first; other names come last."""
    names = list(PRESETS)
    return names.index(name) if name in names else len(names)


def get_preset(name: str) -> Preset:
    """Raises WorkshopError for a name that is not in PRESETS."""
    if name not in PRESETS:
        raise WorkshopError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]


def default_preset(device_type: str) -> str:
    """Preset of a run without `--config`: `tiny` without a GPU, else `small`."""
    return "tiny" if device_type == "cpu" else "small"
