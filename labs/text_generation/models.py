"""A causal language model and its tokenizer, from a folder on this machine, and an engine on it."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.text_generation import fast, request
from labs.text_generation.engines import Engine, HuggingFace
from labs.text_generation.peer_vllm import VLLM
from labs.text_generation.plain_ops import Weight, matrix
from workshop.errors import NotOnThisMachine, WorkshopError, require
from workshop.run import memory
from workshop.run.precision import Precision
from workshop.run.torchvision import make_importable
from workshop.run.trainer import missing_for_compile

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Policies for accelerate's device maps."""
PREPARES = "DeepSpeed prepares the model; the first time it compiles for minutes ..."


@dataclass
class Load:
    """The cost of loading."""

    seconds: float = 0.0
    peak_mb: float = 0.0
    """The growth of memory at its peak: the device's; on the CPU the process's."""


@contextmanager
def watched(device: torch.device) -> Iterator[Load]:
    """Fills in what its block took."""
    found, start, before = Load(), time.perf_counter(), _process_mb("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) / memory.MB
    yield found
    found.seconds, peak = time.perf_counter() - start, _process_mb("VmHWM")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / memory.MB
    found.peak_mb = max(peak - before, 0.0)


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
    """Over which devices, in words; "" for one."""
    load: Load

    @property
    def pad(self) -> int:
        """The token in front of shorter prompts. The mask hides it, so that any will do."""
        own = self.tokenizer.pad_token_id
        return int(own) if own is not None else self.ends[0] if self.ends else 0

    @property
    def positions(self) -> int | None:
        """The longest text, in tokens; None where nothing limits it (BLOOM)."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return int(longest) if isinstance(longest, int) and longest > 0 else None

    def weights_bytes(self) -> int:
        return _bytes(self.model.parameters())


def check_map(text: str) -> str | dict[str, Any]:
    """A `--device_map`: the name of one of accelerate's policies, or a JSON file with the device of
    each module: a GPU's number, "cpu" or "disk". Raises WorkshopError."""
    if text in POLICIES:
        return text
    path = Path(text)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkshopError(
            f"--device_map {text}: neither one of {', '.join(POLICIES)} nor a JSON file ({error})"
        ) from None
    if not isinstance(content, dict):
        raise WorkshopError(f"--device_map {text}: it should hold an object, module: device")
    return content


def check_folder(folder: Path) -> None:
    """Raises WorkshopError for what is no model."""
    if not folder.is_dir():
        raise WorkshopError(
            f"--model_path {folder} is no folder: models are read from this machine alone; "
            "download it first"
        )
    if not (folder / "config.json").is_file():
        raise WorkshopError(f"--model_path {folder} is no model: it has no config.json")


def prepare_packages(arguments: argparse.Namespace) -> None:
    """Raises NotOnThisMachine where a package is missing that the flags need."""
    require("transformers", "tokenizers", "safetensors")
    if arguments.device_map:
        require("accelerate")
    if arguments.load_in_8bit and arguments.engine != "fast":
        require("accelerate", "bitsandbytes")
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
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    folder = arguments.model_path
    check_folder(folder)
    dtype = precision.autocast_dtype or torch.float32
    # Weights of another shape are reported then, as missing ones are.
    settings: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    settings["ignore_mismatched_sizes"] = True
    if arguments.device_map:
        settings["device_map"] = check_map(arguments.device_map)
        settings["offload_folder"] = cleanup.enter_context(tempfile.TemporaryDirectory())
    if arguments.load_in_8bit and arguments.engine != "fast":
        settings["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
        settings.setdefault("device_map", {"": device})
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with watched(device) as took:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **own)
            made: Any = AutoModelForCausalLM.from_pretrained(str(folder), **settings, **own)
            model, report = made
            if "device_map" not in settings:
                model.to(device)
    except ImportError as error:
        raise NotOnThisMachine(f"--model_path {folder} can't be loaded: {_line(error)}") from None
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # each format, and each model, has errors of its own
        raise WorkshopError(
            f"--model_path {folder} can't be loaded: {_line(error)}; is it a complete causal "
            "language model with its tokenizer (with git: `git lfs pull`)?"
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise WorkshopError(
            f"--model_path {folder}: {len(missing)} weights are in no file, such as {missing[0]}: "
            "download it again"
        )
    if wrong := sorted(str(key[0]) for key in report["mismatched_keys"]):
        raise WorkshopError(
            f"--model_path {folder}: {len(wrong)} weights have another shape than config.json "
            f"says, such as {wrong[0]}: they belong to different models"
        )
    if arguments.load_in_8bit and arguments.engine == "fast":
        _round_weights(model, dtype)
    places = getattr(model, "hf_device_map", {})
    spread = ", ".join(sorted({str(place) for place in places.values()}))
    return Loaded(
        folder.resolve().name, tokenizer, model.eval(), _entry(places, device), dtype,
        _ends(model, tokenizer), spread if "," in spread else "", took,
    )  # fmt: skip


def _round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights as our own loop does in int8, which is compared with this model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            values, scale = fast.quantised(module.weight.detach())
            rounded = matrix(Weight(values, scale[:, 0]), dtype)
            module.weight = nn.Parameter(rounded, requires_grad=False)


def _line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return words[0].rstrip(".:") if words else type(error).__name__


def _entry(places: dict[str, Any], device: torch.device) -> torch.device:
    """accelerate brings tokens from there to the first layer."""
    chips = [place for place in places.values() if place not in ("cpu", "disk")]
    return torch.device(chips[0]) if chips else torch.device("cpu") if places else device


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """As `generate` has them. Of the folder's other settings (sampling, penalties) none is kept: a
    text follows from the flags."""
    from transformers import GenerationConfig

    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    model.generation_config = GenerationConfig()
    return [] if found is None else sorted({found} if isinstance(found, int) else set(found))


def _process_mb(line: str) -> float:
    """The process's memory in MB: now (`VmRSS`), or at its peak (`VmHWM`)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # another system
        return 0.0
    return float(status.split(f"{line}:")[1].split()[0]) * 1024 / memory.MB


def make_engine(arguments: argparse.Namespace, loaded: Loaded, longest: int) -> tuple[Engine, str]:
    """The engine, and its name with what it does here. A model that it changes is one of its own:
    Hugging Face's remains to compare with.

    Args:
        longest: tokens of a prompt and its continuation.
    """
    if arguments.engine == "fast":
        where = arguments.model_path, loaded.dtype, loaded.device
        return fast.FastLlama(*where, arguments.load_in_8bit), "fast"
    if arguments.engine == "deepspeed":
        return _deepspeed(arguments, loaded, longest)
    if arguments.engine == "vllm":
        peer = VLLM(arguments.model_path, loaded.dtype, loaded.ends, loaded.pad, longest)
        return peer, "vllm"
    own = loaded.device, loaded.ends, loaded.pad
    model, words = loaded.model, [arguments.engine]
    if arguments.tensor_parallel:
        model = _tensor_parallel(arguments, loaded)
        words.append("tensor parallel")
    if arguments.engine == "hf":
        return HuggingFace(model, *own), ", ".join(words)
    compiled = _compiles(arguments, loaded)
    words[1:1] = ["compiled"] * compiled
    return HuggingFace(model, *own, static=True, compiled=compiled), ", ".join(words)


def _compiles(arguments: argparse.Namespace, loaded: Loaded) -> bool:
    """Whether the steps of the static cache are compiled."""
    wanted = arguments.compile
    if wanted is None:
        wanted = loaded.device.type == "cuda"
    missing = missing_for_compile(loaded.device) if wanted else None
    if missing and arguments.compile:
        raise NotOnThisMachine(f"--compile needs {missing}; install it")
    return wanted and not missing and not loaded.spread


def _again(arguments: argparse.Namespace, loaded: Loaded) -> Any:
    """The model once more, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(arguments.model_path), dtype=loaded.dtype, local_files_only=True
    ).eval()


def _tensor_parallel(arguments: argparse.Namespace, loaded: Loaded) -> nn.Module:
    """The model, of whose layers' matrices this process keeps its part, by Hugging Face's plan: the
    first ones are split by outputs, as heads are, and the last ones by inputs. The embedding stays
    whole."""
    config: Any = loaded.model.config
    plan, count = dict(getattr(config, "base_model_tp_plan", None) or {}), request.processes()
    plan.pop("embed_tokens", None)  # where it makes the logits too, their plan splits the embedding
    if not plan or not set(plan.values()) <= {"colwise", "rowwise"}:
        raise WorkshopError(
            f"--tensor_parallel: Hugging Face has no plan of columns and rows for "
            f"{config.model_type}; take a Llama, or --engine deepspeed"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % count:
        raise WorkshopError(
            f"--tensor_parallel: {loaded.name} has {heads} heads of keys, which {count} processes "
            "can't share evenly"
        )
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)
    dist.init_process_group("nccl" if loaded.device.type == "cuda" else "gloo")
    model = _again(arguments, loaded)
    for name, module in model.base_model.named_modules():
        for pattern, how in plan.items():
            if fnmatch(name, pattern):
                _keep_part(module, how, dist.get_rank(), count)
    parallel: nn.Module = model.to(loaded.device)
    return parallel


def _keep_part(module: Any, how: str, rank: int, count: int) -> None:
    """Splits by outputs ("colwise"), or by inputs: what the others have of each output is added
    then."""
    split = module.weight.chunk(count, 0 if how == "colwise" else 1)
    module.weight = nn.Parameter(split[rank].contiguous(), requires_grad=False)
    if module.bias is not None and how == "colwise":
        module.bias = nn.Parameter(module.bias.chunk(count)[rank].clone(), requires_grad=False)
    if how == "rowwise":
        if module.bias is not None and rank:
            nn.init.zeros_(module.bias)
        module.register_forward_hook(lambda module, inputs, output: dist.all_reduce(output))


@contextmanager
def deepspeeds_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Turns DeepSpeed's errors into a line. It raises any type for what it can't do here: a model,
    kernels without their compiler."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if arguments.engine != "deepspeed":
            raise
        version = sys.modules["deepspeed"].__version__
        raise NotOnThisMachine(
            f"DeepSpeed {version} can't do this here: {type(error).__name__}: {_line(error)}"
        ) from error


def _deepspeed(arguments: argparse.Namespace, loaded: Loaded, longest: int) -> tuple[Engine, str]:
    import deepspeed

    # On a CPU DeepSpeed sums over processes in shared memory, which it sets up only if this
    # variable is there: its launcher gives it, torchrun does not, and without it the first sum is
    # a SIGSEGV.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    print(PREPARES, flush=True)
    model = _again(arguments, loaded)
    before = dict(model.named_buffers())
    with deepspeeds_errors(arguments):
        engine = deepspeed.init_inference(
            model,
            dtype=loaded.dtype,
            tensor_parallel={"tp_size": request.processes()},
            replace_with_kernel_inject=arguments.kernel_inject,
            max_out_tokens=longest,
        )
    # It rounds all of the model to bf16, the rotary frequencies too: then positions are wrong.
    for name, buffer in engine.module.named_buffers():
        if name in before and before[name].dtype != buffer.dtype:
            buffer.data = before[name].to(buffer.device)
    words = ["deepspeed", *["kernel injection"] * arguments.kernel_inject]
    return HuggingFace(engine.module, loaded.device, loaded.ends, loaded.pad), ", ".join(words)


# --- what a token costs --------------------------------------------------------------------------


def bytes_read(model: nn.Module) -> int:
    """The weights that a step needs. Of a table of embeddings it needs a row a prompt, unless the
    same table makes the logits."""
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
