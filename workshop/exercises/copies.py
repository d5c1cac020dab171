"""The participant's own copies of what an exercise gives to fill."""

import shutil
from pathlib import Path

from workshop.errors import WorkshopError
from workshop.exercises.frame import COPIES

OLD = ".old"


def make(folder: Path) -> list[Path]:
    """Makes the copies that are missing in an exercise's folder; their paths."""
    made = []
    for given, mine in COPIES.items():
        if (folder / given).is_file() and not (folder / mine).exists():
            try:
                shutil.copyfile(folder / given, folder / mine)
            except OSError as error:
                raise WorkshopError(
                    f"{folder / mine} can't be written ({error.strerror}): work in a copy of the "
                    "repository that is yours"
                ) from None
            made.append(folder / mine)
    return made


def set_aside(folder: Path) -> list[Path]:
    """Renames the copies, unless nothing was written into them; the new paths. One that was set
    aside earlier is replaced."""
    kept = []
    for given, mine in COPIES.items():
        path = folder / mine
        if not path.is_file() or not (folder / given).is_file():
            continue
        try:
            if path.read_bytes() == (folder / given).read_bytes():
                path.unlink()
            else:
                kept.append(path.replace(path.with_name(path.name + OLD)))
        except OSError as error:
            raise WorkshopError(f"{path} can't be renamed: {error.strerror}") from None
    return kept
