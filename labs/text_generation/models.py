"""A causal language model and its tokenizer, from a folder on this machine, and what a token of it
costs."""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labs.text_generation.plain_ops import matrix, quantised
from workshop.errors import NotOnThisMachine, WorkshopError, require
from workshop.run import memory
from workshop.run.precision import Precision
from workshop.run.torchvision import make_importable

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""accelerate's policies for --device_map."""


@dataclass
class Loaded:
    """A model, ready to generate."""

    name: str
    tokenizer: Any
    model: nn.Module
    device: torch.device
    """Where tokens go in."""
    dtype: torch.dtype
    ends: list[int]
    """The tokens that end a text."""
    spread: str
    """The devices over which it is spread; "" for one."""
    cost: dict[str, float]
    """The cost of loading, as `watched` measures it."""

    @property
    def pad(self) -> int:
        """The token in front of shorter prompts. The mask hides it, so any will do."""
        own = self.tokenizer.pad_token_id
        return int(own) if own is not None else self.ends[0] if self.ends else 0

    @property
    def positions(self) -> int | None:
        """The longest text, in tokens; None where nothing limits it (BLOOM)."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return int(longest) if isinstance(longest, int) and longest > 0 else None

    def weights_bytes(self) -> int:
        return _bytes(self.model.parameters())


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, float]]:
    """Measures its block: seconds, and the growth of memory at its peak in MB, the device's or on
    a CPU the process's."""
    cost: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start, before = time.perf_counter(), _memory_mb(device, peak=False)
    yield cost
    cost["load_s"] = time.perf_counter() - start
    cost["load_peak_mb"] = max(_memory_mb(device, peak=True) - before, 0.0)


def _memory_mb(device: torch.device, *, peak: bool) -> float:
    if device.type == "cuda":
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return read(device) / memory.MB
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # another system than Linux
        return 0.0
    return int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) * 1024 / memory.MB


# --- loading -------------------------------------------------------------------------------------


def import_transformers(arguments: argparse.Namespace) -> None:
    """Imports it without network and messages. Raises NotOnThisMachine: a package is missing that
    the flags need."""
    require("transformers", "tokenizers", "safetensors")
    if arguments.device_map:
        require("accelerate")
    if arguments.load_in_8bit and arguments.engine != "fast":
        own = "take --engine fast, which has its own int8 for Llamas"
        require("accelerate", "bitsandbytes", instead=own)
    if arguments.engine in ("deepspeed", "vllm"):
        require(arguments.engine)
    make_importable()  # transformers imports torchvision
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load(
    arguments: argparse.Namespace, device: torch.device, precision: Precision, cleanup: ExitStack
) -> Loaded:
    """Reads tokenizer and model. It is made without weights first, so that it is never in memory
    twice.

    Args:
        cleanup: deletes what is offloaded to the disk.

    Raises:
        WorkshopError: the folder is no causal model, or not complete.
        NotOnThisMachine: a package is missing.
    """
    folder, int8 = arguments.model_path, arguments.load_in_8bit
    settings: dict[str, Any] = {"dtype": precision.autocast_dtype or torch.float32}
    if arguments.device_map:
        settings["device_map"] = _device_map(arguments.device_map)
        settings["offload_folder"] = cleanup.enter_context(tempfile.TemporaryDirectory())
    if not (folder / "config.json").is_file():
        raise WorkshopError(
            f"--model_path {folder} is no model: it has no config.json. Models are read from this "
            "machine alone: download it first"
        )
    import_transformers(arguments)
    if int8 and arguments.engine != "fast":
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
        # It would write a line for each layer and token: that activations are cast to fp16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        settings.setdefault("device_map", {"": device})
    with watched(device) as cost:
        tokenizer, model = _read(folder, settings)
        if "device_map" not in settings:
            model.to(device)
    if int8 and arguments.engine == "fast":
        _round_weights(model, settings["dtype"])
    places = getattr(model, "hf_device_map", {})
    if places:  # accelerate brings tokens from there to the first layer
        chips = [place for place in places.values() if place not in ("cpu", "disk")]
        device = torch.device(chips[0] if chips else "cpu")
    spread = sorted({str(place) for place in places.values()})
    return Loaded(
        folder.resolve().name, tokenizer, model.eval(), device, settings["dtype"],
        _ends(model, tokenizer), ", ".join(spread) if len(spread) > 1 else "", cost,
    )  # fmt: skip


def _read(folder: Path, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Tokenizer and model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    # Weights of another shape are reported then, as missing ones are.
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **own)
        made: Any = AutoModelForCausalLM.from_pretrained(str(folder), **settings, **reported, **own)
    except ImportError as error:
        raise NotOnThisMachine(f"--model_path {folder} can't be loaded: {line(error)}") from None
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # each format, and each model, has other errors
        raise WorkshopError(
            f"--model_path {folder} can't be loaded: {line(error)}; is it a complete causal "
            "language model with its tokenizer (with git: `git lfs pull`)?"
        ) from None
    model, report = made
    wrong = [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]
    if wrong:
        raise WorkshopError(
            f"--model_path {folder}: {len(wrong)} weights are missing or have another shape than "
            f"config.json says, such as {min(map(str, wrong))}: download it again"
        )
    return tokenizer, model


def _device_map(text: str) -> str | dict[str, Any]:
    """The name of one of accelerate's policies, or a JSON file with the device of each module: a
    GPU's number, "cpu" or "disk"."""
    if text in POLICIES:
        return text
    try:
        return dict(json.loads(Path(text).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WorkshopError(
            f"--device_map {text}: it is not one of {', '.join(POLICIES)}, nor a JSON file with an "
            f"object, module: device ({error})"
        ) from None


def line(error: Exception) -> str:
    """An error's first line."""
    words = str(error).strip().splitlines()
    return words[0].rstrip(".:") if words else type(error).__name__


def _round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights as our own loop does in int8, which is compared with this model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rounded = matrix(quantised(module.weight.detach()), dtype)
            module.weight = nn.Parameter(rounded, requires_grad=False)


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text for `generate`. The folder's other settings (sampling, penalties)
    are dropped: a text follows from the flags."""
    from transformers import GenerationConfig

    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    model.generation_config = GenerationConfig()
    return [] if found is None else sorted({found} if isinstance(found, int) else set(found))


# --- what a token costs --------------------------------------------------------------------------


def bytes_read(model: nn.Module) -> int:
    """The weights that a step reads: a table of embeddings counts only if it makes the logits,
    too."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    read: list[Tensor] = list(model.parameters())
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (head is None or module.weight is not head.weight):
            read = [tensor for tensor in read if tensor is not module.weight]
    return _bytes(read)


def cache_bytes(loaded: Loaded) -> float:
    """The KV cache's bytes for each token of a prompt."""
    model: Any = loaded.model
    ids = torch.zeros(1, 2, dtype=torch.long, device=loaded.device)
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    return _bytes(t for layer in cache.layers for t in (layer.keys, layer.values)) / ids.numel()


def prefill_flops(model: nn.Module, lengths: Sequence[int]) -> float:
    """Operations of the pass over prompts of these lengths: a multiplication and an addition for
    each weight of a matrix and token, for the logits of each prompt's last token alone, and for
    attention to the tokens before. Padding is no work."""
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} | {head}
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1 and p not in tables)
    config: Any = model.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    pairs = sum(n * (n + 1) / 2 for n in lengths)  # of a token with itself and those before
    products = weights * sum(lengths) + head.numel() * len(lengths)
    return 2.0 * products + 4.0 * config.num_hidden_layers * width * pairs


def _bytes(tensors: Iterable[Tensor]) -> int:
    # A tensor that accelerate has put on the disk has no storage.
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
