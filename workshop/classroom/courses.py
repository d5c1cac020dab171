"""The courses of exercises/instructor_guide.md: when each session, lab and break of a day begins.

An exercise's minutes are its sheet's; the times of a day follow from them.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from workshop.errors import WorkshopError
from workshop.exercises.sheet import SESSION_MINUTES, Sheet
from workshop.tables import markdown_rows as table

BEGIN = 9 * 60
"""Minutes after midnight."""
AT_HOME = ("memory_analysis", "rocm_tools_intro", "custom_kernels", "production_deployment")
"""One exercise of each session, whose minutes go to slides, questions and commands. The profilers'
has a part of its own."""


class Part(NamedTuple):
    """Part of a day: minutes of its own, a session, or a lab: a talk of some minutes, exercises."""

    what: str
    minutes: int = 0
    session: int = 0
    exercises: str = ""


def _lab(folder: str, talk: str, minutes: int, exercises: str) -> Part:
    name = {"cifar10_roofline": "CIFAR-10", "inference_benchmark": "inference"}.get(folder)
    link = f"[{name or folder.replace('_', ' ')}](../labs/{folder}/README.md)"
    return Part(f"{link}, {talk}", minutes, exercises=exercises)


WELCOME = Part("welcome; all predict a step's time, then compare V1 and V2", 15)
SESSIONS = [Part(f"session {n}", minutes, n) for n, minutes in SESSION_MINUTES.items()]
PROFILERS = Part("AMD's profilers, or your GPU's", 10, exercises="rocm_tools_intro")
BREAK, LUNCH = Part("break", 15), Part("lunch", 60)
PIPELINE = _lab("data_pipeline", "its ladder", 15, "pipeline_1_workers pipeline_2_trace")
TEXT = _lab("text_generation", "Tiny-LLaMA speaks", 15, "text_1_floor text_2_padding")
INFERENCE = _lab(
    "inference_benchmark", "one network's table", 15,
    "inference_1_baseline inference_2_precision inference_3_profiler",
)  # fmt: skip
COMPILED = Part(
    "inference, what compiling gains", 5, exercises="inference_4_flops inference_6_compile"
)
ROOFLINE = _lab(
    "cifar10_roofline", "a step on the roofline", 10, "roofline_1_unseen roofline_2_first"
)
SCALE = _lab("scale_out", "from one process to two", 20, "scale_1_efficiency scale_2_faults")
SHEETS = Part("everyone's results sheet, three of them on the projector, and questions", 30)

MORNING = [WELCOME, SESSIONS[0], SESSIONS[1], BREAK, PROFILERS, SESSIONS[2]]
COURSES: dict[str, list[Part]] = {
    "Half a day": [*MORNING, SESSIONS[3]],
    "One day": [*MORNING, LUNCH, SESSIONS[3], PIPELINE, BREAK, TEXT, SHEETS],
    "Two days, the first": [*MORNING, LUNCH, SESSIONS[3], ROOFLINE, BREAK, PIPELINE, SHEETS],
    "Two days, the second": [INFERENCE, BREAK, COMPILED, LUNCH, TEXT, BREAK, SCALE, SHEETS],
}


def tables(sheets: Sequence[Sheet]) -> str:
    """Markdown: a table with a column a day, whose cells say when a part begins and how many
    minutes it takes.

    Raises:
        WorkshopError: an exercise that a course names has no sheet.
    """
    days = [_day(parts, sheets) for parts in COURSES.values()]
    return table(COURSES, itertools.zip_longest(*days, fillvalue=""), range(len(days)))


def _day(parts: Sequence[Part], sheets: Sequence[Sheet]) -> list[str]:
    now, cells = BEGIN, []
    for part in parts:
        its = _exercises(part, sheets)
        minutes = part.minutes + (0 if part.session else sum(sheet.minutes for sheet in its))
        words = part.what + (f": {', '.join(sheet.name for sheet in its)}" if its else "")
        cells.append(f"**{_clock(now)}** {words} ({minutes})")
        now += minutes
    return [*cells, f"**{_clock(now)}** end"]


def _exercises(part: Part, sheets: Sequence[Sheet]) -> list[Sheet]:
    if part.session:
        return [s for s in sheets if s.session == part.session and s.name not in AT_HOME]
    by_name = {sheet.name: sheet for sheet in sheets}
    names = part.exercises.split()
    for name in names:
        if name not in by_name:
            raise WorkshopError(f"courses.py: {name} is no exercise")
    return [by_name[name] for name in names]


def _clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"
