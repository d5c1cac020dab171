"""Floating-point operations and bytes that a training step must spend, counted from its sizes.

A multiplication and an addition are two operations. Element-wise work is left out, as in every
published count: it is under 1% of the operations (and most of the bytes).
"""

from dataclasses import dataclass

from workshop.versions import Sizes

ADAMW_BYTES_PER_PARAMETER = 28
"""fp32 AdamW reads weight, gradient and two moments, and writes weight and moments: 7 x 4 bytes."""

ADAMW_STATE_BYTES_PER_PARAMETER = 16
"""Memory that must exist at once to train in fp32: weight, gradient, two moments, 4 bytes each."""


@dataclass(frozen=True)
class StepFlops:
    """Operations of one training step. A backward pass multiplies twice what the forward did:
    once for the gradient of the inputs, once for that of the weights."""

    forward: float

    @property
    def backward(self) -> float:
        return 2 * self.forward

    @property
    def total(self) -> float:
        return self.forward + self.backward


def parameter_count(config: Sizes) -> int:
    """Weights of the model; the tied embedding counts once."""
    head_dim = config.hidden_dim // config.num_heads
    kv_rows = config.num_kv_heads * head_dim
    attention = 2 * config.hidden_dim * (config.hidden_dim + kv_rows)
    feed_forward = 3 * config.hidden_dim * config.intermediate_dim
    norms = 2 * config.hidden_dim
    layers = config.num_layers * (attention + feed_forward + norms)
    return layers + config.hidden_dim + config.vocab_size * config.hidden_dim


def matmul_flops(config: Sizes, tokens: int) -> float:
    """Operations of the projections and the head for `tokens` tokens, forward: 2 x weights x
    tokens, where the weights are the matrices (norms do no products; the embedding is the head)."""
    norms = config.hidden_dim * (2 * config.num_layers + 1)
    return 2.0 * (parameter_count(config) - norms) * tokens


def attention_flops(config: Sizes, batch_size: int, seq_len: int) -> float:
    """Operations of q k' and of probabilities x v in all layers, forward.

    Causal attention needs half of the (T, T) square; a version that materialises the scores
    computes all of it, but is credited with the useful half.
    """
    square = 2.0 * 2.0 * batch_size * seq_len * seq_len * config.hidden_dim * config.num_layers
    return square / 2


def step_flops(config: Sizes, batch_size: int, seq_len: int) -> StepFlops:
    """Operations of one training step on (batch_size, seq_len) tokens."""
    products = matmul_flops(config, batch_size * seq_len)
    return StepFlops(products + attention_flops(config, batch_size, seq_len))


def step_tflops(config: Sizes, batch_size: int, seq_len: int, step_ms: float) -> float:
    """The rate of a step of that duration, in TFLOP/s."""
    return step_flops(config, batch_size, seq_len).total / (step_ms / 1e3) / 1e12
