"""The shape that the gate is run on: V1 in high precision, which it trains beside the version,
takes more memory than the version itself."""

from workshop.gate.outcome import Setting
from workshop.run import flops, hardware

SHARE = 0.9
"""The share of the free memory that the gate may fill."""
LEAST = (3, 65)
"""Batch size and sequence length that the gate is not run below, unless the run is: its default."""
_MARGIN = 2
"""Times the activations: autocast keeps a second copy of some, and allocators leave gaps."""


def of_setting(setting: Setting) -> tuple[int, int]:
    """Batch size and sequence length of the gate: the setting's own, or less where that would not
    fit."""
    shape = setting.batch_size, setting.seq_len
    free_bytes = hardware.free_memory_bytes(setting.device)
    if free_bytes is None:
        return shape
    return fitting(setting.config, *shape, SHARE * free_bytes, setting.reference_dtype.itemsize)


def fitting(
    model: flops.Sizes, batch_size: int, seq_len: int, free_bytes: float, width: int
) -> tuple[int, int]:
    """The largest of the run's shape, halved again and again, whose gate fits: V1 in high
    precision, which it runs beside the version, needs more memory than the version itself. The
    run's own where none from LEAST on fits: fewer tokens don't help against the model's size.

    Args:
        width: bytes of a number of the reference: 8, or 4 below fp32 on a GPU.
    """
    least_batch, least_seq = min(batch_size, LEAST[0]), min(seq_len, LEAST[1])
    batches, length = batch_size, seq_len
    while bytes_needed(model, batches, length, width) > free_bytes:
        if batches > least_batch:
            batches = max(batches // 2, least_batch)
        elif length > least_seq:
            length = max(length // 2, least_seq)
        else:
            return batch_size, seq_len
    return batches, length


def bytes_needed(model: flops.Sizes, batch_size: int, seq_len: int, width: int) -> float:
    """About the most that `parity.check_model` holds at once.

    V1 in high precision, V1 and the version train one after the other: each holds weights, their
    copy, gradients, two moments, and the gradients to compare. Those, in fp32 the movements, and
    the logits outlive it.
    """
    in_reference = 4 + 6 * width  # the version's weights wait
    movements = 2 * 4 if width == 8 else 0  # below fp32 a GPU's reference keeps none
    in_version = width + 4 + movements + 6 * 4  # the two others' gradients stay
    state = 4 + 4 + max(in_reference, in_version)  # beside the two sets of weights that all load
    logits = batch_size * seq_len * model.vocab_size
    numbers = activations(model, batch_size, seq_len) + logits
    return state * flops.parameter_count(model) + _MARGIN * width * numbers


def activations(model: flops.Sizes, batch_size: int, seq_len: int) -> float:
    """Numbers that V1's step keeps for its backward pass, as measured in fp32 on a CPU."""
    tokens = batch_size * seq_len
    of_layer = tokens * (12 * model.hidden_dim + 3 * model.intermediate_dim)
    of_layer += batch_size * model.num_heads * seq_len**2
    return float(model.num_layers * of_layer + 3 * tokens * model.vocab_size)
