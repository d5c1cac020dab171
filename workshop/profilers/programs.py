"""The programs that the runners profile: the versions', and the labs' that take --profile-steps."""

from dataclasses import dataclass
from pathlib import Path

from workshop.versions import ROOT, VERSIONS, Version


@dataclass(frozen=True)
class Program:
    """One of them. Its folder has links to the runners, and the folder of its profiles is `key`."""

    key: str
    title: str
    path: Path
    version: Version | None = None
    watched: str = ""
    """A lab's module that has `plan(program, flags, steps)`, as profile_run.plan."""


_LABS = (
    Program(
        "inference_benchmark",
        "inference of vision networks",
        ROOT / "labs" / "inference_benchmark" / "micro_benchmarking_pytorch.py",
        watched="labs.inference_benchmark.profiling",
    ),
)
PROGRAMS = {
    program.key: program
    for program in (
        *(Program(v.key, v.title, v.path, version=v) for v in VERSIONS.values()),
        *_LABS,
    )
}


def of_folder(folder: Path) -> Program | None:
    """By the folder's name; None for one that has no such program."""
    name = folder.resolve().name
    return next((p for p in PROGRAMS.values() if p.path.parent.name == name), None)
