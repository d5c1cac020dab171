"""One set of images in seven formats, behind one interface.

The folder, LMDB, WebDataset's tar, zip and Parquet keep PNG files. HDF5 and the flat array keep
pixels, which need more room and no decoding. An item is the same tensor in all of them.
"""

import io
import itertools
import json
import math
import os
import shlex
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from workshop import errors
from workshop.errors import NotOnThisMachine, WorkshopError, printable
from workshop.run.torchvision import make_importable

LABELS = "labels.json"
MANIFEST = "manifest.json"
ROWS = 16
"""Rows in a row group of Parquet: to read one image, all of its group are read."""

_open: dict[Path, Any] = {}
"""Files that this process has open. A forked worker forgets what it inherits, and opens the files
anew: libraries do not share an open file between processes, and datasets are pickled without it."""
os.register_at_fork(after_in_child=_open.clear)


# --- from PNG to pixels ---------------------------------------------------------------------------


Decoder = Callable[[bytes], Tensor]
SIGNATURE = b"\x89PNG\r\n\x1a\n"
PACKAGES = {"pil": "PIL", "torchvision": "torchvision", "opencv": "cv2"}


def get_decoder(name: str) -> Decoder:
    """The decoder of that name, from PNG to uint8 (3, height, width) in red, green, blue. It raises
    an error of its library's where the PNG is damaged. Raises NotOnThisMachine: its library is
    missing, or can't decode here."""
    errors.require(PACKAGES[name])
    if name == "torchvision" and not (make_importable() and hasattr(torch.ops.image, "decode_png")):
        raise NotOnThisMachine(
            "torchvision decodes no images here: install the build that belongs to this PyTorch, "
            "or choose another decoder"
        )
    return {"pil": by_pil, "torchvision": by_torchvision, "opencv": by_opencv}[name]


def by_pil(png: bytes) -> Tensor:
    return torch.from_numpy(np.array(open_image(png))).permute(2, 0, 1)


def by_torchvision(png: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_png

    _check_png(png)  # torchvision 0.29 crashes on a damaged one
    content = torch.frombuffer(bytearray(png), dtype=torch.uint8)
    pixels: Tensor = decode_png(content, ImageReadMode.RGB)
    return pixels


def by_opencv(png: bytes) -> Tensor:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError("OpenCV can't decode it")
    return torch.from_numpy(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)).permute(2, 0, 1)


def open_image(content: bytes) -> Any:
    """An image file of any kind by PIL, in RGB.

    OpenCV compares a PNG's checksums. PIL does not, and may take a file whose second half is zeros,
    as a crash leaves it, for an image.
    """
    from PIL import Image

    if content.startswith(SIGNATURE):
        _check_png(content)
    return Image.open(io.BytesIO(content)).convert("RGB")


def _check_png(png: bytes) -> None:
    """Raises ValueError unless all chunks of a PNG are there, each with its checksum."""
    start, kind = len(SIGNATURE), b""
    while kind != b"IEND":
        kind = png[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(png[start : start + 4], "big")  # length, kind, data, sum
        if end > len(png):
            raise ValueError("it is cut off")
        if zlib.crc32(png[start + 4 : end - 4]) != int.from_bytes(png[end - 4 : end], "big"):
            raise ValueError("a checksum is wrong")
        start = end


class BadData(WorkshopError):
    """A dataset is missing, damaged or cut off.

    PyTorch passes a worker's error on as a text with the worker's traceback: its last line is ours.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{BadData.__name__}: ")[2].strip())


class Images(Dataset[tuple[Tensor, int]]):
    """Item `i` is an image, uint8 (3, height, width), and its label.

    A format defines `open`, `read_labels`, `write`, and `encoded` or `image`.

    Args:
        folder: as make_dataset.py writes it.
        decoder: of PNGs: one of PACKAGES.
        damaged: "refuse" raises BadData where an image is damaged; "skip" warns, and gives the next
            whole one, so that a batch keeps its size.

    Raises:
        BadData: the file is missing, damaged or cut off; from an item too.
        NotOnThisMachine: a package is missing.
    """

    key: str
    """A key of FORMATS."""
    file_name: str
    """In the dataset's folder."""
    packages: tuple[str, ...] = ()

    def __init__(self, folder: Path, decoder: str = "pil", damaged: str = "refuse") -> None:
        errors.require(*self.packages)
        self.decode = get_decoder(decoder)
        self.skip = damaged == "skip"
        self.path = folder / self.file_name
        _open.pop(self.path, None)  # it may have been written anew
        if not self.path.exists():
            raise BadData(f"{self.path} is missing: {self.remedy}")
        try:
            self.labels = np.array(self.read_labels(), np.int64)
            if not len(self.labels):
                raise ValueError("no images")
        except Exception as error:  # what a damaged file raises is not listed anywhere
            problem = f"{self.path} is damaged or cut off ({printable(str(error))})"
            raise BadData(f"{problem}: {self.remedy} again") from None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index = range(len(self))[index]  # IndexError ends a loop over the dataset
        for place in itertools.chain(range(index, len(self)), range(index)):
            try:
                return self.image(place), int(self.labels[place])
            except Exception as error:
                problem = f"{self.name(place)} is damaged ({printable(str(error))})"
            if not self.skip:
                raise BadData(f"{problem}: {self.remedy} again, or skip what is damaged")
            warnings.warn(f"{problem}: the next image takes its place", stacklevel=2)
        raise BadData(f"{self.path}: all images are damaged: {self.remedy} again")

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def remedy(self) -> str:
        pack = "" if self.key == Folder.key else f" --pack {self.key}"
        return f"run {how_to_make(self.path.parent)}{pack}"

    @property
    def file(self) -> Any:
        """The file that `open` opened in this process."""
        if self.path not in _open:
            _open[self.path] = self.open()
        return _open[self.path]

    def name(self, index: int) -> str:
        return f"{self.path}: image {index}"

    def image(self, index: int) -> Tensor:
        return self.decode(self.encoded(index))

    def open(self) -> Any:
        raise NotImplementedError

    def read_labels(self) -> Sequence[int]:
        """The label of each image, in order; raises anything where the file is damaged."""
        raise NotImplementedError

    def encoded(self, index: int) -> bytes:
        """The PNG file. Formats that keep pixels define `image` instead."""
        raise NotImplementedError

    @staticmethod
    def write(target: Path, source: "Folder", indices: Iterable[int]) -> None:
        """Packs the images of a folder.

        Args:
            indices: all of them, in order; taking the next one shows progress.
        """
        raise NotImplementedError


def manifest(folder: Path) -> dict[str, Any]:
    """A dataset's manifest; empty where it can't be read."""
    try:
        found: dict[str, Any] = json.loads((folder / Folder.file_name / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def how_to_make(folder: Path) -> str:
    """The command that writes this dataset."""
    words = manifest(folder).get("command", ["make_dataset.py"])
    return shlex.join([*words, "--output-dir", str(folder)])


# --- PNG files -----------------------------------------------------------------------------------


class Named(Images):
    """PNG files by their names, with labels.json among them. A format defines `read`."""

    def read(self, name: str) -> bytes:
        raise NotImplementedError

    def read_labels(self) -> Sequence[int]:
        labels: dict[str, int] = json.loads(self.read(LABELS))["labels"]
        self.names = sorted(labels)
        return [labels[name] for name in self.names]

    def encoded(self, index: int) -> bytes:
        return self.read(self.names[index])


class Folder(Named):
    """A PNG file for each image: each is found, opened and closed for itself."""

    key, file_name = "png", "images"

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_labels(self) -> Sequence[int]:
        labels = super().read_labels()
        found = {path.name for path in self.path.glob("*.png")}
        if different := sorted(found ^ {*self.names}):
            missing = LABELS if different[0] in found else "the folder"
            raise ValueError(f"{missing} has no {different[0]}")
        return labels

    def name(self, index: int) -> str:
        return str(self.path / self.names[index])


class Lmdb(Named):
    """A database in memory-mapped pages: a file's name is the key to its bytes."""

    key, file_name, packages = "lmdb", "images.lmdb", ("lmdb",)

    def open(self) -> Any:
        import lmdb

        file = lmdb.open(str(self.path), subdir=False, readonly=True, lock=False, readahead=False)
        pages, size = file.info()["last_pgno"] + 1, self.path.stat().st_size
        if pages * file.stat()["psize"] > size:  # to read there would end the process: SIGBUS
            file.close()
            raise ValueError(f"its {pages} pages do not fit into {size} bytes")
        return file

    def read(self, name: str) -> bytes:
        with self.file.begin() as transaction:
            return bytes(transaction.get(name.encode()))

    @staticmethod
    def write(target: Path, source: Folder, indices: Iterable[int]) -> None:
        import lmdb

        files = [source.path / name for name in (LABELS, *source.names)]
        most = sum(path.stat().st_size + 2 * 4096 for path in files) + 2**20  # pages are not full
        with (
            lmdb.open(str(target), subdir=False, lock=False, map_size=most) as file,
            file.begin(write=True) as transaction,
        ):
            transaction.put(LABELS.encode(), files[0].read_bytes())
            for index in indices:
                transaction.put(source.names[index].encode(), source.encoded(index))


class Tar(Images):
    """WebDataset's tar, `000000.png` and `000000.cls` in turn. It is made to be read from its start
    to its end; here the headers are read once, and then any image by its offset."""

    key, file_name = "webdataset", "images.tar"

    def open(self) -> Any:
        return self.path.open("rb", buffering=0)

    def read_labels(self) -> Sequence[int]:
        block, offset, places = tarfile.BLOCKSIZE, 0, []
        while (header := self._at(offset, block)) != bytes(block):  # a block of zeros is the end
            if len(header) < block:
                raise ValueError(f"its end is missing, after {offset:,} bytes")
            size = int(header[124:135], 8)
            places.append((offset + block, size))
            offset += block * (1 + math.ceil(size / block))
        self.places = np.array(places[::2])
        return [int(self._at(*place)) for place in places[1::2]]

    def encoded(self, index: int) -> bytes:
        return self._at(*self.places[index].tolist())

    def _at(self, offset: int, size: int) -> bytes:
        return os.pread(self.file.fileno(), size, offset)

    @staticmethod
    def write(target: Path, source: Folder, indices: Iterable[int]) -> None:
        with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
            for index in indices:
                label = str(int(source.labels[index])).encode()
                for suffix, content in (("png", source.encoded(index)), ("cls", label)):
                    member = tarfile.TarInfo(f"{index:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


class Zip(Named):
    """The folder as it is, not compressed: PNGs are. Every process reads the list of all files."""

    key, file_name = "zip", "images.zip"

    def open(self) -> Any:
        return zipfile.ZipFile(self.path)

    def read(self, name: str) -> bytes:
        content: bytes = self.file.read(name)
        return content

    @staticmethod
    def write(target: Path, source: Folder, indices: Iterable[int]) -> None:
        with zipfile.ZipFile(target, "w") as file:
            file.writestr(zipfile.ZipInfo(LABELS), (source.path / LABELS).read_bytes())
            for index in indices:
                file.writestr(zipfile.ZipInfo(source.names[index]), source.encoded(index))


class Parquet(Images):
    """A table with a column of PNG files and one of labels, in groups of ROWS rows."""

    key, file_name, packages = "parquet", "images.parquet", ("pyarrow",)

    def open(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.path, memory_map=True)

    def read_labels(self) -> Sequence[int]:
        labels: list[int] = self.file.read(["label"], use_threads=False)["label"].to_pylist()
        return labels

    def encoded(self, index: int) -> bytes:
        group = self.file.read_row_group(index // ROWS, ["image"], use_threads=False)
        content: bytes = group["image"][index % ROWS].as_py()
        return content

    @staticmethod
    def write(target: Path, source: Folder, indices: Iterable[int]) -> None:
        import pyarrow
        import pyarrow.parquet

        columns = pyarrow.schema([("image", pyarrow.binary()), ("label", pyarrow.int64())])
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        rest = iter(indices)
        with pyarrow.parquet.ParquetWriter(target, columns, **plain) as file:
            while group := list(itertools.islice(rest, ROWS)):
                images = [source.encoded(index) for index in group]
                labels = source.labels[group]
                file.write_table(pyarrow.table([images, labels], schema=columns))


# --- pixels --------------------------------------------------------------------------------------


class Hdf5(Images):
    """An array of pixels and one of labels. Without chunks, an image is one piece of the file."""

    key, file_name, packages = "hdf5", "images.h5", ("h5py",)

    def open(self) -> Any:
        import h5py

        return h5py.File(self.path)["images"]  # to find it again for each image would take longer

    def read_labels(self) -> Sequence[int]:
        labels: Sequence[int] = self.file.parent["labels"][:]
        return labels

    def image(self, index: int) -> Tensor:
        return torch.from_numpy(self.file[index])

    @staticmethod
    def write(target: Path, source: Folder, indices: Iterable[int]) -> None:
        import h5py

        with h5py.File(target, "w") as file:
            file["labels"] = source.labels
            shape = (len(source), *source[0][0].shape)
            images = file.create_dataset("images", shape, np.uint8)
            for index in indices:
                images[index] = source[index][0].numpy()


class Flat(Images):
    """Pixels as one array that is mapped into memory: an image is a copy, nothing is parsed."""

    key, file_name = "flat", "images.flat"

    def open(self) -> Any:
        return np.load(self.path / "images.npy", mmap_mode="r")

    def read_labels(self) -> Sequence[int]:
        labels: Sequence[int] = np.load(self.path / "labels.npy")
        if len(self.file) != len(labels):
            raise ValueError(f"{len(labels)} labels for {len(self.file)} images")
        return labels

    def image(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self.file[index]))

    @staticmethod
    def write(target: Path, source: Folder, indices: Iterable[int]) -> None:
        target.mkdir()
        np.save(target / "labels.npy", source.labels)
        shape = (len(source), *source[0][0].shape)
        with (target / "images.npy").open("wb") as file:
            what = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, what)
            for index in indices:
                file.write(source[index][0].numpy().tobytes())


_KINDS: tuple[type[Images], ...] = (Folder, Hdf5, Lmdb, Tar, Zip, Parquet, Flat)
FORMATS: dict[str, type[Images]] = {kind.key: kind for kind in _KINDS}
PACKED = {key: kind for key, kind in FORMATS.items() if kind is not Folder}
