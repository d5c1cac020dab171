"""The courses of exercises/instructor_guide.md: when each session, lab and break of a day begins.

An exercise's minutes are its sheet's; the times of a day follow from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workshop.errors import WorkshopError
from workshop.exercises.sheet import SESSION_MINUTES, Sheet
from workshop.tables import markdown_rows as table

BEGIN = 9 * 60
"""Minutes after midnight."""
AT_HOME = ("memory_analysis", "rocm_tools_intro", "custom_kernels", "production_deployment")
"""One exercise of each session, whose minutes go to slides, questions and commands."""


@dataclass(frozen=True)
class Part:
    """Part of a day: minutes of its own, a session, or a lab: a talk of some minutes, exercises."""

    what: str
    minutes: int = 0
    session: int = 0
    exercises: str = ""


WELCOME = Part("welcome; all predict a step's time, then compare V1 and V2", 15)
SESSIONS = [Part(f"session {n}", minutes, n) for n, minutes in SESSION_MINUTES.items()]
BREAK, LUNCH = Part("break", 15), Part("lunch", 60)
PIPELINE = Part(
    "[data pipeline](../labs/data_pipeline/README.md), its ladder",
    15,
    exercises="pipeline_1_workers pipeline_2_trace",
)
TEXT = Part(
    "[text generation](../labs/text_generation/README.md), Tiny-LLaMA speaks",
    15,
    exercises="text_1_floor text_2_padding",
)
INFERENCE = Part(
    "[inference](../labs/inference_benchmark/README.md), one network's table",
    15,
    exercises="inference_1_baseline inference_2_precision inference_3_profiler",
)
COMPILED = Part(
    "inference, what compiling gains", 5, exercises="inference_4_flops inference_6_compile"
)
ROOFLINE = Part(
    "[CIFAR-10](../labs/cifar10_roofline/README.md), a step on the roofline",
    10,
    exercises="roofline_1_unseen roofline_2_first",
)
SCALE = Part(
    "[scale out](../labs/scale_out/README.md), from one process to two",
    20,
    exercises="scale_1_efficiency scale_2_faults",
)
SHEETS = Part("everyone's results sheet, three of them on the projector, and questions", 30)

MORNING = [WELCOME, SESSIONS[0], SESSIONS[1], BREAK, SESSIONS[2]]
COURSES: dict[str, list[Part]] = {
    "Half a day": [*MORNING, SESSIONS[3]],
    "One day": [*MORNING, LUNCH, SESSIONS[3], PIPELINE, BREAK, TEXT, SHEETS],
    "Two days, the first": [*MORNING, LUNCH, SESSIONS[3], ROOFLINE, BREAK, PIPELINE, SHEETS],
    "Two days, the second": [INFERENCE, BREAK, COMPILED, LUNCH, TEXT, BREAK, SCALE, SHEETS],
}


def tables(sheets: Sequence[Sheet]) -> str:
    """Markdown: a table a day.

    Raises:
        WorkshopError: an exercise that a course names has no sheet.
    """
    return "\n\n".join(_day(name, parts, sheets) for name, parts in COURSES.items())


def _day(name: str, parts: Sequence[Part], sheets: Sequence[Sheet]) -> str:
    now, rows = BEGIN, []
    for part in parts:
        its = _exercises(part, sheets)
        minutes = part.minutes + (0 if part.session else sum(sheet.minutes for sheet in its))
        words = part.what + (f": {', '.join(sheet.name for sheet in its)}" if its else "")
        rows.append((_clock(now), words, str(minutes)))
        now += minutes
    rows.append((_clock(now), "end", str(now - BEGIN)))
    return f"### {name}\n\n{table(('from', 'what', 'minutes'), rows, range(2))}"


def _exercises(part: Part, sheets: Sequence[Sheet]) -> list[Sheet]:
    found = [
        sheet for sheet in sheets
        if sheet.session == part.session and part.session and sheet.name not in AT_HOME
    ]  # fmt: skip
    by_name = {sheet.name: sheet for sheet in sheets}
    for name in part.exercises.split():
        if name not in by_name:
            raise WorkshopError(f"courses.py: {name} is no exercise")
        found.append(by_name[name])
    return found


def _clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"
