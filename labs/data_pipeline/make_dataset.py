"""Writes a folder of PNG files with labels, and packs it into other formats.

The images are scikit-learn's digits in colour, your own, or CIFAR-10's. Run it again with the same
flags, and what is whole is kept: every file's SHA-256 is in images/manifest.json.
"""

import argparse
import functools
import hashlib
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

import numpy as np

from labs import shared
from labs.data_pipeline import formats
from labs.data_pipeline.formats import LABELS, MANIFEST, PACKED, Folder, Images, open_image
from workshop import errors, results
from workshop.arguments import count, parse
from workshop.errors import WorkshopError, printable
from workshop.tables import tracked

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Path(__file__).resolve().parent
DIGITS = 1797
SIDES = (8, 1024)
MOST_SEED = 2**32 - 1
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")
GRAIN = 6
"""Standard deviation of an image's noise, of 255. Without it the PNG of a smooth digit would have
half of a photograph's size."""
PICKLED_LABELS = "labels.pkl"
CIFAR10, CIFAR10_ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
Pngs = Iterable[tuple[bytes, int]]
"""Files and labels, in order."""
Found = list[tuple[Path, int]]
"""A participant's images, and the number of each one's class."""


def build_parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Pillow is needed, scikit-learn for digits, and for a format what writes it.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group().add_argument
    what("--images", type=count, default=DIGITS, metavar="N",
         help=f"digits; above {DIGITS:,} they come again in other colours "
         f"(default {DIGITS})")  # fmt: skip
    what("--from", type=Path, dest="source", metavar="PATH",
         help="other images, of any size: a folder with a sub-folder for each class, or with PNG "
         f"files and {PICKLED_LABELS}; or CIFAR-10: {CIFAR10_ARCHIVE}, or {CIFAR10}")  # fmt: skip
    add("--size", type=count, default=32, help="side of the square images in pixels (default 32)")
    add("--seed", type=int, default=42, help="of the digits' colours (default 42)")
    add("--damaged", choices=("refuse", "skip"), default="refuse",
        help="an image of --from that can't be read: end with its name, or leave it out "
        "(default refuse)")  # fmt: skip
    add("--pack", nargs="+", choices=(*PACKED, "all"), default=[], help="formats to write as well")
    add("--output-dir", type=Path, metavar="FOLDER",
        help="a folder for this set alone (default: data/digits_N_SIZE or data/FOLDER_SIZE beside "
        "this program)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the dataset from a command line; returns the exit status."""
    arguments = parse(build_parser(), argv)
    return errors.exit_status(
        lambda: make(arguments),
        interrupted="interrupted: what was not finished is deleted; the same command goes on",
    )


def make(arguments: argparse.Namespace) -> int:
    low, high = SIDES
    if not low <= arguments.size <= high:
        raise WorkshopError(f"--size {arguments.size}: it must lie between {low} and {high}")
    check_seed(arguments.seed)
    kinds = [PACKED[key] for key in PACKED if {key, "all"} & set(arguments.pack)]
    needs = {package for kind in kinds for package in kind.packages}
    errors.require("PIL", "rich", *([] if arguments.source else ["sklearn"]), *sorted(needs))
    name = f"digits_{arguments.images}"
    if arguments.source:
        is_cifar10 = arguments.source.name in (CIFAR10, CIFAR10_ARCHIVE)
        name = "cifar10" if is_cifar10 else arguments.source.resolve().name
    folder = arguments.output_dir or FOLDER / "data" / f"{name}_{arguments.size}"
    _write_images(folder, arguments)
    for kind in kinds:
        pack(folder, kind)
    return errors.DONE


def check_seed(seed: int) -> None:
    if not 0 <= seed <= MOST_SEED:
        raise WorkshopError(f"--seed {seed}: it must lie between 0 and {MOST_SEED:,}")


def _prepare(folder: Path) -> None:
    """Makes the folder, and deletes what a killed run left there. Refuses one with other files,
    which might have a dataset's names."""
    results.prepare_folder(folder)
    for left in folder.glob(".images.*"):
        _delete(left)
    if any(folder.iterdir()) and not (folder / Folder.file_name / MANIFEST).is_file():
        raise WorkshopError(f"{folder} holds other files: name a new folder with --output-dir")


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# --- the folder of PNGs --------------------------------------------------------------------------


def _write_images(folder: Path, arguments: argparse.Namespace) -> None:
    """Writes the images, unless they are there and whole. Packed files of other images are
    deleted."""
    size, command = ["--size", str(arguments.size)], ["make_dataset.py"]
    source = arguments.source
    if source and source.name in (CIFAR10, CIFAR10_ARCHIVE):
        made: dict[str, Any] = {"command": [*command, "--from", source.name, *size]}
        classes, pngs = [str(number) for number in range(10)], _cifar10(source, arguments.size)
    elif source:
        found, classes = _own_images(source)
        files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns, label]
                 for path, label in found]  # fmt: skip
        made = {"command": [*command, "--from", "YOUR_IMAGES", *size], "files": files}
        made |= {"damaged": arguments.damaged}
        pngs = _photographs(found, arguments)
    else:
        images, seed = str(arguments.images), str(arguments.seed)
        made = {"command": [*command, "--images", images, "--seed", seed, *size]}
        classes = [str(digit) for digit in range(10)]
        pngs = _digits(arguments.images, arguments.size, arguments.seed)
    _prepare(folder)
    target, before = folder / Folder.file_name, formats.manifest(folder)
    if before.pop("sha256", None) and before == made and not find_damaged(folder):
        print(f"{target}: is there already, and whole")
        return
    if "files" in before and "files" not in made:
        raise WorkshopError(
            f"{folder} holds images of yours, which digits would replace: give --from, or another "
            "--output-dir"
        )
    with results.atomic_path(target) as temporary:
        number = _write_folder(temporary, pngs, classes, made)
        for kind in PACKED.values():
            _delete(folder / kind.file_name)
    print(f"{target}: {number:,} images of {arguments.size} x {arguments.size}")


def _write_folder(folder: Path, pngs: Pngs, classes: list[str], made: dict[str, Any]) -> int:
    """Writes PNGs, labels and manifest; the number of images."""
    folder.mkdir()
    labels, sums = {}, {}
    for index, (png, label) in enumerate(pngs):
        name = f"{index:06}.png"
        (folder / name).write_bytes(png)
        labels[name], sums[name] = label, hashlib.sha256(png).hexdigest()
    if not labels:
        raise WorkshopError("no image is left: none can be read")
    results.write_json(folder / LABELS, {"classes": classes, "labels": labels})
    sums[LABELS] = hashlib.sha256((folder / LABELS).read_bytes()).hexdigest()
    results.write_json(folder / MANIFEST, made | {"sha256": sums})
    return len(labels)


def find_damaged(folder: Path) -> Path | None:
    """A file of a dataset's images that is not as it was written, or was not."""
    images, sums = folder / Folder.file_name, formats.manifest(folder)["sha256"]
    if others := {path.name for path in images.iterdir()} - {MANIFEST, *sums}:
        return images / min(others)
    for name in tracked([*sums], "checking"):
        path = images / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sums[name]:
            return path
    return None


def _png(image: "Image") -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


# --- packed formats ------------------------------------------------------------------------------


def pack(folder: Path, kind: type[Images]) -> None:
    """Writes the folder's images in another format; raises WorkshopError."""
    source, path = Folder(folder), folder / kind.file_name
    try:
        with results.atomic_path(path) as target:
            kind.write(target, source, tracked(range(len(source)), f"packing {kind.key}"))
    except WorkshopError:
        raise
    except Exception as error:  # lmdb has its own errors for a full disk
        raise WorkshopError(f"{path} can't be written: {printable(str(error))}") from None
    print(f"{path}: {len(source):,} images")


# --- digits in colour ----------------------------------------------------------------------------


def _digits(images: int, size: int, seed: int) -> Iterator[tuple[bytes, int]]:
    """Image i depends on the seed and i alone."""
    processes = min(os.cpu_count() or 1, 1 + images // 256)
    with multiprocessing.Pool(processes, _leave_signals) as pool:
        drawn = pool.imap(functools.partial(_digit, size, seed), range(images), chunksize=64)
        for _, digit in zip(tracked(range(images), "writing"), drawn, strict=True):
            yield digit


def _leave_signals() -> None:
    """Ctrl-C reaches the pool's processes too, but it is their parent that ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _digit(size: int, seed: int, index: int) -> tuple[bytes, int]:
    digits = _scans()
    ink = np.uint8(digits.images[index % DIGITS] * (255 / 16))
    image = _coloured(ink, size, np.random.default_rng([seed, index]))
    return _png(image), int(digits.target[index % DIGITS])


@functools.cache
def _scans() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


def _coloured(ink: np.ndarray, size: int, random: np.random.Generator) -> "Image":
    """A digit, from uint8 (8, 8), enlarged, shifted by up to an eighth of the side, in a bright
    colour on a dark one, with grain."""
    from PIL import Image

    shift = size // 8
    sheet = Image.new("L", (size, size))
    digit = Image.fromarray(ink).resize((size, size), Image.Resampling.BILINEAR)
    sheet.paste(digit, tuple(random.integers(-shift, shift + 1, 2).tolist()))
    dark, bright = random.integers(0, 110, 3), random.integers(145, 256, 3)
    share = np.asarray(sheet)[..., None] / 255
    pixels = dark + share * (bright - dark) + random.normal(0, GRAIN, (size, size, 3))
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


# --- a participant's images ----------------------------------------------------------------------


def _own_images(folder: Path) -> tuple[Found, list[str]]:
    """The images of a folder, sorted, and the classes' names; raises WorkshopError without one."""
    if (folder / PICKLED_LABELS).is_file():
        return _labelled_images(folder)
    paths = (path for path in sorted(folder.glob("*/**/*")) if path.name[0] != ".")
    found = [path for path in paths if path.suffix.lower() in SUFFIXES]
    if not found:
        raise WorkshopError(
            f"--from {folder}: no images ({', '.join(SUFFIXES)}) in its sub-folders, whose names "
            f"are the classes, and no {PICKLED_LABELS}"
        )
    names = [path.relative_to(folder).parts[0] for path in found]
    classes = sorted({*names})
    return [(path, classes.index(name)) for path, name in zip(found, names, strict=True)], classes


def _labelled_images(folder: Path) -> tuple[Found, list[str]]:
    """PNG files, in the folder or below it, whose names are the keys of its PICKLED_LABELS."""
    pickled = folder / PICKLED_LABELS
    try:
        with pickled.open("rb") as file:
            labels = dict(_PlainUnpickler(file).load())
        numbers = {int(label) for label in labels.values()}
        if not numbers or min(numbers) < 0:
            raise ValueError("no labels, or one below 0")
    except Exception as error:  # what a damaged pickle raises is not listed anywhere
        raise WorkshopError(
            f"{pickled} can't be read ({printable(str(error))}): it has to be a pickled dict, from "
            "a PNG file's name to the number of its class"
        ) from None
    paths = sorted(folder.glob("**/*.png"))
    if not paths:
        raise WorkshopError(f"--from {folder}: no PNG files beside {PICKLED_LABELS} or below it")
    if without := [path for path in paths if path.name not in labels]:
        raise WorkshopError(f"{pickled} has no label for {without[0]}")
    found = [(path, int(labels[path.name])) for path in paths]
    return found, [str(number) for number in range(max(numbers) + 1)]


class _PlainUnpickler(pickle.Unpickler):
    """Reads texts, numbers, lists and dicts. All else names a class or a function, NumPy's numbers
    too, and a function may be any program."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in it is refused")


def _cifar10(source: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """The training images of CIFAR-10 as it is distributed: the archive, or the folder in it."""
    from PIL import Image, ImageOps

    from labs.cifar10_roofline.data import cifar10

    shared.import_torchvision()
    with tempfile.TemporaryDirectory() as unpacked:
        root = source.resolve().parent
        try:
            if source.name == CIFAR10_ARCHIVE:
                _unpack(source, Path(unpacked) / CIFAR10)
                root = Path(unpacked)
            images = cifar10(root, download=False).train
        except (OSError, EOFError, RuntimeError, tarfile.TarError) as error:
            raise WorkshopError(
                f"--from {source} can't be read ({printable(str(error))}): it is missing, or not "
                "as it was published"
            ) from None
    pixels = images.images.permute(0, 2, 3, 1).numpy()
    for image, label in zip(tracked(pixels, "writing"), images.labels.tolist(), strict=True):
        yield _png(ImageOps.fit(Image.fromarray(image), (size, size))), label


def _unpack(archive: Path, target: Path) -> None:
    """Writes the archive's files into one folder, whatever theirs."""
    target.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            if content := tar.extractfile(member):  # a folder has none
                (target / Path(member.name).name).write_bytes(content.read())


def _photographs(found: Found, arguments: argparse.Namespace) -> Iterator[tuple[bytes, int]]:
    """Upright, cut to a square at the middle, and scaled."""
    from PIL import ImageOps

    side = (arguments.size, arguments.size)
    for path, label in tracked(found, "writing"):
        try:
            image = ImageOps.exif_transpose(open_image(path.read_bytes()))
        except Exception as error:  # what a damaged image raises is not listed anywhere
            problem = f"{path} can't be read as an image ({printable(str(error))})"
            if arguments.damaged == "refuse":
                raise WorkshopError(f"{problem}: take it out, or give --damaged skip") from None
            print(f"WARNING: {problem}: it is left out", file=sys.stderr)
            continue
        yield _png(ImageOps.fit(image, side)), label


if __name__ == "__main__":
    sys.exit(main())
