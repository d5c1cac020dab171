"""The registry of versions: where each lives, what it is measured against, what it may change; and
of peers, other people's training code, which is measured like a version."""

import ast
import importlib.metadata
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from workshop.errors import NotOnThisMachine, WorkshopError

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Sizes:
    """The fields of `TinyLlamaConfig` that parameters, FLOPs and memory follow from. The counts of
    run/flops.py take a `TinyLlamaConfig` as well."""

    vocab_size: int
    hidden_dim: int
    intermediate_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class Version:
    """One rung of the ladder, or a peer."""

    key: str
    title: str
    folder: str = "peers"
    parent: str | None = None
    """The version that its docstring's "Changed since" names."""
    changes: frozenset[str] = frozenset()
    """Top-level definitions that may differ from the parent's; all others are identical."""
    compile: str = "none"
    """Its default of `--compile`."""
    cuda_graph: bool = False
    """Its default of `--cuda-graph`, on a GPU."""
    triton: bool = False
    """Whether it has kernels written in Triton, which must be installed then."""
    packages: tuple[str, ...] = ()
    """Packages that it imports besides PyTorch."""
    file: str = ""
    """Its name, if that is not tiny_llama_KEY.py."""
    colour: str = "#808080"
    """In every picture and page."""
    marker: str = "circle"
    """One of MARKERS."""
    rungs: tuple[tuple[str, str, str], ...] = ()
    """The waterfall from V1 to it, if there is one: of each rung the version whose code runs, what
    it switches on (a switch, `compile`, `cuda_graph`, or nothing), and its title. Each rung has
    what those before it of the same version have switched on."""

    @property
    def path(self) -> Path:
        return ROOT / self.folder / (self.file or f"tiny_llama_{self.key}.py")

    @property
    def exists(self) -> bool:
        return self.path.is_file()


MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
    "star": "*",
    "pentagon": "p",
}
"""Names of the markers, with Matplotlib's."""

_CHANGES = frozenset(
    "Fusions RMSNorm apply_rope Attention FeedForward Block TinyLlama configure_optimizer".split()
)
"""The definitions that V2, V3 and V4 all change."""
_STACKED = (("v2", "fuse_qkv", "fused QKV"), ("v2", "fuse_gate_up", "fused gate-up"))
"""The first rungs of both waterfalls: V2's switches for the weights that V2, V3 and V4 stack."""

# Every speed-up is derived from this version's time and every gradient compared with its gradient.
BASELINE = "v1"

VERSIONS = {
    version.key: version
    for version in (
        # Colours near Okabe and Ito's palette, distinct to all eyes; each has a contrast of 3:1 or
        # better on white and on dark.
        Version("v1", "plain PyTorch", "version1_pytorch_baseline"),
        Version(
            "v2",
            "fused operations",
            "version2_pytorch_fused",
            parent="v1",
            changes=_CHANGES,
            colour="#D55E00",
            marker="square",
        ),
        Version(
            "v3",
            "Triton kernels",
            "version3_triton",
            parent="v2",
            changes=_CHANGES | {"make_capturable", "capture_step"},
            cuda_graph=True,
            triton=True,
            colour="#0072B2",
            marker="diamond",
            # The optimizer's kernel comes first: with PyTorch's, a step at fp16 can't be captured.
            # Then the graph: without it the host can't launch the kernels fast enough for any size
            # at which a kernel saves time, and would hide what they are worth.
            rungs=(
                *_STACKED,
                ("v3", "", "V3's code, no kernel"),
                ("v3", "fuse_optimizer", "AdamW kernel"),
                ("v3", "cuda_graph", "graph"),
                ("v3", "fuse_norm", "RMSNorm kernel"),
                ("v3", "fuse_swiglu", "SwiGLU kernel"),
                ("v3", "fuse_attention", "RoPE + attention"),
                ("v3", "fuse_embedding", "embedding kernel"),
                ("v3", "fuse_loss", "linear + loss kernel"),
                ("v3", "fuse_linear", "fp32 weight grads"),
            ),
        ),
        Version(
            "v4",
            "SDPA, compiler, graph",
            "version4_pytorch_sdpa",
            parent="v2",
            changes=_CHANGES.union(
                "compile_model make_capturable capture_step"
                " WideLinear _WideProduct use_wide_gradients".split()
            ),
            compile="default",
            cuda_graph=True,
            colour="#009E73",
            marker="triangle-up",
            rungs=(
                *_STACKED,
                ("v2", "fuse_norm", "F.rms_norm"),
                ("v2", "fuse_attention", "SDPA"),
                ("v2", "fuse_gqa", "native GQA"),
                ("v2", "fuse_optimizer", "fused AdamW"),
                ("v4", "", "V4's code, eager"),
                ("v4", "compile", "torch.compile"),
                ("v4", "cuda_graph", "graph"),
                ("v4", "fuse_weight_grads", "fp32 weight grads"),
            ),
        ),
    )
}

# fmt: off
PEERS = {
    peer.key: peer
    for peer in (
        Version("hf", "Hugging Face, compiled", compile="default", packages=("transformers",),
                file="hugging_face_llama.py", colour="#C06C9B", marker="cross"),
        Version("hf-graph", "Hugging Face, compiled, graph", compile="default", cuda_graph=True,
                packages=("transformers",), file="hugging_face_graph.py", colour="#7F6FD0",
                marker="star"),
        Version("hf-flash", "Hugging Face, compiled, graph, FlashAttention", compile="default",
                cuda_graph=True, packages=("transformers", "flash-attn-4"),
                file="hugging_face_flash.py", colour="#B5524A", marker="pentagon"),
        Version("hf-liger", "Hugging Face, Liger-Kernel", packages=("transformers", "liger-kernel"),
                file="hugging_face_liger.py", colour="#9A7B2B", marker="x"),
        Version("torchao", "V2, compiled, graph; fp8 by torchao", compile="default",
                cuda_graph=True, packages=("torchao",), file="torchao_float8.py", colour="#4C8C9E",
                marker="square"),
    )
}
# fmt: on
ALL = VERSIONS | PEERS
"""All keys of result files."""


def of_file(path: Path) -> Version:
    return next(version for version in ALL.values() if version.path.name == path.name)


def available() -> list[str]:
    """Keys of the versions whose file is in this checkout, in the ladder's order."""
    return [key for key, version in VERSIONS.items() if version.exists]


def get_version(key: str) -> Version:
    """Raises WorkshopError for an unknown key and for a version that is not in this checkout."""
    if key not in ALL:
        choice = f"{', '.join(available())}, and of the peers {', '.join(PEERS)}"
        raise WorkshopError(f"unknown version {key!r}: choose from {choice}")
    version = ALL[key]
    if not version.exists:
        here = ", ".join(available())
        remedy = f"choose from {here}" if here else "run this in a checkout of the workshop"
        raise WorkshopError(
            f"version {key} ({version.title}) is not here: "
            f"{version.folder}/{version.path.name} is missing; {remedy}"
        )
    return version


def baseline_first(keys: Iterable[str]) -> list[str]:
    """Each key once, V1 before all others, which are audited against it. Raises WorkshopError:
    there is no such version here."""
    wanted = list(dict.fromkeys(keys)) or [BASELINE]  # none is found without a checkout
    known = [get_version(key).key for key in wanted]
    return sorted(known, key=lambda key: key != BASELINE)


def missing(version: Version) -> str | None:
    """A package that a version needs and that is not installed, with how to install it, in one
    line; or None."""
    for name in version.packages:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{version.key} needs {name}, which is not installed: `pip install {name}`"
    if not version.triton or importlib.util.find_spec("triton"):
        return None
    needs = f"version {version.key} needs Triton, which is not installed"
    if sys.platform != "linux":
        return f"{needs}: it exists for Linux alone, a container of which will do"
    return (
        f"{needs}: for a CPU build of PyTorch `pip install -r setup/requirements-triton.txt`, for "
        "a GPU build the Triton of its release"
    )


def switches(version: Version) -> list[str]:
    """The names of a version's ablation switches, the fields of its `Fusions`, read from its file
    without running it; none of a file that can't be run."""
    try:
        classes = ast.parse(version.path.read_bytes()).body
    except SyntaxError:
        return []
    return [
        field.target.id
        for one in classes
        if isinstance(one, ast.ClassDef) and one.name == "Fusions"
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def load_mine(place: str, otherwise: str = "") -> tuple[ModuleType, Any]:
    """A participant's file, imported, and what it has under a name.

    Args:
        place: FILE.py:NAME.
        otherwise: the name, if `place` is FILE.py.

    Raises:
        WorkshopError: there is no such file, it can't be imported, or has nothing of that name.
    """
    path, name = mine_file(place, otherwise)
    # Not under its own name: it may be that of a file of ours, or of another of theirs.
    path = path.resolve()
    try:
        module = load_file(path, f"mine_{path.stem}_{zlib.crc32(bytes(path)):08x}")
    except WorkshopError:  # it imports a version, and says itself what is missing
        raise
    except Exception as error:
        place = last_line(error, path) or str(path)
        raise WorkshopError(f"{place}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise WorkshopError(f"{path}: there is no {name} in it")
    return module, getattr(module, name)


def mine_file(place: str, otherwise: str = "") -> tuple[Path, str]:
    """The file and the name of `load_mine`, which raises the same; nothing is imported."""
    file, colon, name = place.rpartition(":")
    path, name = (Path(file), name) if colon else (Path(place), otherwise)
    if not path.is_file():
        raise WorkshopError(f"{path}: no such file")
    if path.suffix != ".py":
        raise WorkshopError(f"{path}: the name of a Python file must end in .py")
    if not name:
        raise WorkshopError(f"{path}: the name in it is missing: {path}:NAME")
    return path, name


def last_line(error: BaseException, path: Path) -> str:
    """The last line of a file that an error passed, "FILE.py:LINE in FUNCTION"; empty if none."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if frame.filename == str(path.resolve())]
    return f"{path.name}:{found[-1].lineno} in {found[-1].name}" if found else ""


def load(key: str) -> ModuleType:
    """Imports a version's file, once, as the module `tiny_llama_vN`.

    Raises:
        WorkshopError: no such version.
        NotOnThisMachine: it needs a package that is not installed.
    """
    version = get_version(key)
    if version.path.stem not in sys.modules and (reason := missing(version)):
        raise NotOnThisMachine(reason)
    return load_file(version.path)


def load_file(path: Path, name: str = "") -> ModuleType:
    """Imports a file, once, as the module of that name, by default the file's; it can import the
    others of its folder."""
    name = name or path.stem
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    sys.path.insert(0, str(path.parent))  # V3 imports its kernels from its own folder
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module
