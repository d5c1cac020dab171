"""The data lab's images: the program that writes and packs them, and the formats that read them."""

import importlib.util
import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lab_cifar import write_cifar
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from labs.cifar10_roofline.data import cifar10
from labs.data_pipeline import formats, make_dataset
from labs.data_pipeline.formats import FORMATS, PACKED, BadData, Folder, Images
from labs.data_pipeline.make_dataset import main
from workshop.errors import NotOnThisMachine

Image = pytest.importorskip("PIL.Image")
HERE = [key for key, kind in FORMATS.items() if all(map(importlib.util.find_spec, kind.packages))]
"""The formats whose packages are installed."""
PACKED_HERE = [key for key in HERE if key in PACKED]
ENCODED = [key for key, kind in FORMATS.items() if kind.image is Images.image]
COUNT, MIDDLE = 40, 17
Items = list[tuple[Tensor, int]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A participant's images, of several kinds and sizes."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(COUNT):
        path = (
            folder / ("cat", "dog", "fish")[number % 3] / f"{number}.{('png', 'JPG')[number % 2]}"
        )
        path.parent.mkdir(exist_ok=True)
        noise = random.integers(0, 30, (*random.integers(20, 60, 2), 3))
        Image.fromarray((random.integers(0, 220, 3) + noise).astype(np.uint8)).save(path)
    (folder / "cat" / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def made(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in all formats, which tests do not change."""
    folder = tmp_path_factory.mktemp("made") / "set"
    assert make(folder, "--from", photos, "--size", 24, "--pack", *PACKED_HERE) == 0
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "set"))


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> type[Images]:
    return of(request.param)


def of(key: str) -> type[Images]:
    for package in FORMATS[key].packages:
        pytest.importorskip(package)
    return FORMATS[key]


def get_decoder(name: str) -> formats.Decoder:
    try:
        return formats.get_decoder(name)
    except NotOnThisMachine as error:
        pytest.skip(str(error))


def make(folder: Path, *flags: object) -> int:
    return main([*map(str, flags), "--output-dir", str(folder)])


def expected(folder: Path) -> Items:
    """The images as PIL alone reads them."""
    labels = json.loads((folder / "images" / "labels.json").read_text())["labels"]
    return [(pixels(folder / "images" / name), labels[name]) for name in sorted(labels)]


def pixels(source: Any) -> Tensor:
    return torch.from_numpy(np.array(Image.open(source).convert("RGB"))).permute(2, 0, 1)


def same(found: Items, items: Items) -> bool:
    return len(found) == len(items) and all(
        one.dtype == torch.uint8 and torch.equal(one, other) and label == true
        for (one, label), (other, true) in zip(found, items, strict=True)
    )


def shuffled(dataset: Dataset[Any], workers: int, context: str | None = None) -> Items:
    """The items from a loader that shuffles, in their own order again."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1)).tolist()
    loader = DataLoader(
        dataset, batch_size=7, sampler=order, num_workers=workers, multiprocessing_context=context
    )
    items = [
        pair for images, labels in loader for pair in zip(images, labels.tolist(), strict=True)
    ]
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]


def refusal(*reading: Any, **options: Any) -> str:
    """The line with which a dataset does not open, or an item is not read."""
    with pytest.raises(BadData) as error:
        kind, folder, *index = reading
        dataset = kind(folder, **options)
        for place in index:
            dataset[place]
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    return str(error.value)


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# --- all formats are the same --------------------------------------------------------------------


def test_a_format_gives_the_images_in_order_and_shuffled(kind: type[Images], made: Path) -> None:
    items, dataset = expected(made), kind(made)
    assert len(items) == COUNT and items[0][0].shape == (3, 24, 24)
    assert same(list(dataset), items)
    assert same([dataset[-1], kind(made)[3]], [items[-1], items[3]])  # two of one file
    assert same(shuffled(dataset, 0), items)
    assert same(shuffled(dataset, 2, "fork"), items)  # with what this process has open
    assert forked(lambda: len(formats._open)) == 0  # which a forked one forgets


def test_workers_that_are_spawned_read_them_too(made: Path) -> None:
    together = ConcatDataset([FORMATS[key](made) for key in HERE])
    assert same(shuffled(together, 1, "spawn"), len(HERE) * expected(made))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
@pytest.mark.parametrize("decoder", formats.PACKAGES)
def test_decoders_agree(decoder: str, mode: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (13, 9, 3)).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(content, "PNG")
    assert torch.equal(get_decoder(decoder)(content.getvalue()), pixels(content))


def test_a_missing_package_is_named(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotOnThisMachine, match="pip install h5py"):
        FORMATS["hdf5"](made)
    with pytest.raises(NotOnThisMachine, match="opencv-python"):
        Folder(made, decoder="opencv")


# --- after a crash -------------------------------------------------------------------------------


def die_half_way(items: Sequence[Any], what: str) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == len(items) // 2 and what != "checking":
            os.kill(os.getpid(), signal.SIGKILL)
        yield item


def forked(work: Callable[[], object]) -> int | None:
    """The exit status of a process that does the work."""
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(work()))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("key", PACKED)
def test_what_a_killed_packing_leaves_is_not_whole(key, copy, photos, monkeypatch) -> None:
    kind, items = of(key), expected(copy)
    flags = ("--from", photos, "--size", 24, "--pack", key)
    with monkeypatch.context() as patch:
        patch.setattr(make_dataset, "tracked", die_half_way)
        assert forked(lambda: make(copy, *flags)) == -signal.SIGKILL
        assert same(list(kind(copy)), items)  # the earlier file
        path = copy / kind.file_name
        make_dataset._delete(path)
        assert forked(lambda: make(copy, *flags)) == -signal.SIGKILL
    assert refusal(kind, copy) == f"{path} is missing: run {formats.how_to_make(copy)} --pack {key}"
    assert make(copy, *flags) == 0
    assert same(list(kind(copy)), items)
    assert not list(copy.glob(".*"))


def test_what_a_killed_program_leaves_is_not_whole(photos, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "set"
    with monkeypatch.context() as patch:
        patch.setattr(make_dataset, "tracked", die_half_way)
        assert forked(lambda: make(folder, "--from", photos)) == -signal.SIGKILL
    remedy = f"run make_dataset.py --output-dir {folder}"
    assert refusal(Folder, folder) == f"{folder / 'images'} is missing: {remedy}"
    assert make(folder, "--from", photos) == 0
    assert len(Folder(folder)) == COUNT and list(folder.iterdir()) == [folder / "images"]


@pytest.mark.parametrize("key", [key for key in PACKED if key != "hdf5"])  # its library crashes
def test_without_room_nothing_is_written(key: str, copy: Path, photos: Path) -> None:
    path = copy / of(key).file_name
    make_dataset._delete(path)
    before = contents(copy)

    def work() -> int:
        with (copy.parent / "stderr").open("w") as sys.stderr:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
            return make(copy, "--from", photos, "--size", 24, "--pack", key)

    assert forked(work) == 2
    said = (copy.parent / "stderr").read_text()
    assert said.startswith(f"error: {path} can't be written: ") and said.count("\n") == 1
    assert contents(copy) == before


# --- damage --------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes] | None] = {
    "half": lambda content: content[: len(content) // 2],
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line(kind: type[Images], damage: str, copy: Path) -> None:
    path = copy / kind.file_name
    part = path / {"png": "labels.json", "flat": "images.npy"}.get(kind.key, "")
    if change := DAMAGE[damage]:
        part.write_bytes(change(part.read_bytes()))
    else:
        part.unlink()
    said = refusal(kind, copy)
    assert said.startswith(f"{path} is ") and "run make_dataset.py" in said
    assert ("damaged or cut off" in said) == path.exists()


def test_images_and_labels_that_do_not_belong_together(copy: Path) -> None:
    folder = copy / "images"
    shutil.copy(folder / "000017.png", folder / "new.png")
    assert "labels.json has no new.png" in refusal(Folder, copy)
    (folder / "new.png").unlink()
    (folder / "000017.png").unlink()
    assert "no 000017.png" in refusal(Folder, copy)


def spoil(dataset: Images, index: int) -> None:
    """The second half of an image becomes zeros, as a crash of the machine leaves it."""
    png = Folder(dataset.path.parent).encoded(index)
    path = Path(dataset.name(index)) if isinstance(dataset, Folder) else dataset.path
    content = path.read_bytes()
    assert png in content
    path.write_bytes(content.replace(png, png[: len(png) // 2].ljust(len(png), b"\0")))


@pytest.mark.parametrize("decoder", formats.PACKAGES)
@pytest.mark.parametrize("key", ENCODED)
def test_a_damaged_image_is_refused_by_name_or_skipped(key: str, decoder: str, copy: Path) -> None:
    get_decoder(decoder)
    kind, items = of(key), expected(copy)
    spoil(kind(copy), MIDDLE)
    name = {"png": copy / "images" / "000017.png"}.get(key, f"{copy / kind.file_name}: image 17")
    said = refusal(kind, copy, MIDDLE, decoder=decoder)
    assert said.startswith(f"{name} is damaged (") and "run make_dataset.py" in said
    dataset = kind(copy, decoder, damaged="skip")
    items[MIDDLE] = items[MIDDLE + 1]
    with pytest.warns(UserWarning, match="image 17|000017.png"):
        assert same(list(dataset), items)


def test_a_workers_error_is_the_same_line(copy: Path) -> None:
    spoil(Folder(copy), MIDDLE)
    batches = iter(DataLoader(Folder(copy), batch_size=7, num_workers=2))
    with pytest.raises(BadData) as error:
        list(batches)
    batches._shutdown_workers()  # garbage collection would take ten seconds for it
    assert str(error.value) == refusal(Folder, copy, MIDDLE)


# --- the program ---------------------------------------------------------------------------------


def test_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert make(tmp_path / name, "--images", 30, "--seed", seed, "--pack", *PACKED_HERE) == 0
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b and a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a if name.endswith(".png"))
    assert make(tmp_path / "few", "--images", 3, "--seed", 5) == 0
    assert same(expected(tmp_path / "few"), expected(tmp_path / "a")[:3])  # whatever their number


def test_digits_are_in_colour_and_come_again(tmp_path: Path, monkeypatch: Any) -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    monkeypatch.setattr(make_dataset, "DIGITS", 4)
    assert make(tmp_path / "set", "--images", 8) == 0
    items = expected(tmp_path / "set")
    assert [label for _, label in items] == 2 * digits.target[:4].tolist()
    for index, (image, _) in enumerate(items):
        assert image.float().mean((1, 2)).std() > 1 and not torch.equal(image, items[index - 4][0])


def test_own_images_keep_their_class_and_their_middle_and_are_turned_upright(tmp_path) -> None:
    wide, half, exif = (
        np.zeros((16, 48, 3), np.uint8),
        np.zeros((16, 16, 3), np.uint8),
        Image.Exif(),
    )
    wide[:, 16:32], half[:, 8:] = 200, 255
    exif[0x112] = 6  # orientation: its left edge is the top
    for name in ("b", "a"):
        (tmp_path / "own" / name / "deep").mkdir(parents=True)
        Image.fromarray(wide).save(tmp_path / "own" / name / "deep" / "1.png")
    Image.fromarray(half).save(tmp_path / "own" / "b" / "lies.jpg", exif=exif)
    assert make(tmp_path / "set", "--from", tmp_path / "own", "--size", 16) == 0
    *cut, (turned, _) = items = expected(tmp_path / "set")
    assert [label for _, label in items] == [0, 1, 1]
    assert all(bool((image == 200).all()) for image, _ in cut)
    assert turned[:, :8].float().mean() < 10 and turned[:, 8:].float().mean() > 245
    labels = json.loads((tmp_path / "set" / "images" / "labels.json").read_text())
    assert labels["classes"] == ["a", "b"]


class Program:
    """A call in a pickle, which reading it would run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("ran"),)


PICKLES: dict[str, tuple[bytes, str]] = {
    "as the notebook has it": (pickle.dumps({"a.png": 3, "b.png": 0, "other.png": 4}), ""),
    "of Python 2": (b"(dp0\nS'a.png'\np1\nI3\nsS'b.png'\np2\nI0\nsS'c.png'\nI4\ns.", ""),
    "a program": (pickle.dumps({"a.png": Program()}), "in it is refused"),
    "NumPy's numbers": (pickle.dumps({"a.png": np.int64(3)}), "scalar in it is refused"),
    "a missing label": (pickle.dumps({"a.png": 3}), "has no label for"),
    "cut off": (pickle.dumps({"a.png": 3})[:-4], "can't be read"),
    "a list": (pickle.dumps([3, 0]), "a pickled dict, from a PNG file's name"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_png_files_with_pickled_labels(case, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    content, refused = PICKLES[case]
    Path("own/cifar10_png").mkdir(parents=True)
    Path("own/labels.pkl").write_bytes(content)
    for value, name in ((200, "a"), (50, "b")):
        Image.new("RGB", (9, 9), (value,) * 3).save(f"own/cifar10_png/{name}.png")
    assert make(Path("set"), "--from", "own", "--size", 9) == (2 if refused else 0)
    assert not Path("ran").exists()
    if refused:
        error = capsys.readouterr().err
        assert refused in error and error.startswith("error: ") and error.count("\n") == 1
    else:
        assert [(int(image[0, 0, 0]), label) for image, label in Folder(Path("set"))] == [
            (200, 3),
            (50, 0),
        ]
        assert Folder(Path("set")).classes == 4


@pytest.mark.parametrize("name", [make_dataset.CIFAR10, make_dataset.CIFAR10_ARCHIVE])
def test_cifar10_as_it_is_distributed(name, tmp_path, monkeypatch, capsys) -> None:
    own = write_cifar(tmp_path / "own")
    with tarfile.open(own / make_dataset.CIFAR10_ARCHIVE, "w:gz") as tar:
        tar.add(own / make_dataset.CIFAR10, make_dataset.CIFAR10)
    before = contents(own)
    assert make(tmp_path / "set", "--from", own / name) == 2  # its checksums are other ones
    assert "not as it was published" in capsys.readouterr().err
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).is_file()
    )
    assert make(tmp_path / "set", "--from", own / name) == 0
    part = cifar10(own, download=False).train
    items = [*zip(part.images, part.labels.tolist(), strict=True)]
    assert same(list(Folder(tmp_path / "set")), items) and contents(own) == before


def test_what_is_whole_is_kept_and_the_rest_made_again(copy: Path, photos: Path) -> None:
    def written() -> list[int]:
        return [path.stat().st_ino for path in sorted((copy / "images").iterdir())]

    flags = ("--from", photos, "--size", 24)
    before, first = contents(copy / "images"), written()
    assert make(copy, *flags) == 0 and written() == first
    assert make(copy, "--images", 5) == 2 and written() == first  # digits do not replace photos
    made = f"make_dataset.py --from YOUR_IMAGES --size 24 --output-dir {copy}"
    assert formats.how_to_make(copy) == made
    for change in (
        lambda: (copy / "images" / "000017.png").write_bytes(b""),
        lambda: (copy / "images" / "000017.png").unlink(),
        lambda: (copy / "images" / "new.png").touch(),
        lambda: (copy / "images" / "manifest.json").write_text("{"),
        lambda: (copy / "images" / "labels.json").write_text("{}"),
    ):
        change()
        assert make(copy, *flags) == 0
        assert written() != first and contents(copy / "images") == before


@pytest.mark.parametrize("key", PACKED)
def test_packed_files_of_other_images_are_replaced_or_deleted(key, copy, photos) -> None:
    kind, flags = of(key), ("--from", photos, "--size", 16)
    old = kind(copy)
    assert make(copy, *flags, "--pack", key) == 0
    assert {path.name for path in copy.iterdir()} == {"images", kind.file_name}
    assert same(list(kind(copy)), expected(copy)) and old[0][0].shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--size 5", "--size 5: it must lie between 8 and 1024"),
        ("--from flat", "in its sub-folders, whose names are the classes"),
        ("--from damaged", "2.png can't be read as an image (it is cut off): take it out"),
        ("--from damaged --output-dir flat", "flat holds other files"),
    ],
)
def test_what_the_program_refuses(flags, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("damaged/cat", "flat"):
        Path(folder).mkdir(parents=True)
    Image.new("RGB", (9, 9)).save("flat/1.png")
    shutil.copy("flat/1.png", "damaged/cat/1.png")
    Path("damaged/cat/2.png").write_bytes(Path("flat/1.png").read_bytes()[:-20])
    before = contents(tmp_path)
    assert main(["--output-dir", "out", *flags.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and said in lines[-1]
    assert all(line.startswith("WARNING: ") for line in lines[:-1])
    assert contents(tmp_path) == before
    assert make(Path("set"), "--from", "damaged", "--damaged", "skip") == 0
    assert len(Folder(Path("set"))) == 1
