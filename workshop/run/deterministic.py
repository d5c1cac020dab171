"""`--deterministic`: the same seed gives the same bits, on the same machine and software."""

import os

import torch

FLAG = "--deterministic"
HELP = (
    "take only operators that give the same bits each time, at some cost of time; an operator "
    "without such a form ends the run, and is named"
)


def switch_on() -> None:
    """Has this process run deterministic operators alone, and says so. To be called before the
    first work on a GPU.

    Batches need no more: in all programs they follow from the seed, with any number of workers.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which cuBLAS reads when it starts
    # A newer compiler then takes no kernel because it was the faster one in a trial.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True)
    # Or each new tensor would be filled first, in case something reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # set_arithmetic leaves it so
    print("deterministic: on, operators that give the same bits each time", flush=True)
