"""Answers that name a kernel of a profile's hot list."""

from workshop.profilers.names import ELLIPSIS, display_name
from workshop.profilers.table import KernelTable


def not_the_hottest(table: KernelTable, answer: str) -> str:
    """Why an answer is not the kernel that takes the most time; empty if it is."""
    kernels = enumerate(table.kernels, start=1)
    rank = next((rank for rank, kernel in kernels if names(answer, kernel.name)), None)
    if rank is None:
        return f"no row of the hot list is called {answer!r:.60}"
    return "" if rank == 1 else f"it is number {rank} by its total time"


def names(answer: str, name: str) -> bool:
    """Whether an answer is a kernel's name, in full or as the hot list shortens it."""
    answer = answer.replace("...", ELLIPSIS)
    words = [word for word in answer.split(ELLIPSIS) if word]
    whole = {name, name.removeprefix("aten::"), display_name(name, 10_000)}
    shortened = ELLIPSIS in answer and any(all(word in one for word in words) for one in whole)
    return shortened or answer.casefold() in {one.casefold() for one in whole}
