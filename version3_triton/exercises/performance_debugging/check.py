"""Grades a diagnosis against the participant's own results of the six stages."""

import functools
import math
from collections.abc import Callable, Container, Iterator
from functools import partial

from debug_causes import CAUSES, NO_REPAIRS, NONE, REPAIRS, Sight, found_in
from debug_claims import check_claims
from debug_results import COUNTS, FOLDER, HEALTHY, METRICS, load_all

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Missing, Work, judged
from workshop.exercises.predict import Predicted, ask

FAULTY = ("stage1", "stage2", "stage3", "stage4", "stage5")
_RUN = "version3_triton/exercises/performance_debugging/run_all_stages.sh"
_MOST_METRICS = 4
_COPYING_ERROR = 1e-3
"""Relative, of a metric that was copied from the tables; counts are copied whole."""

Load = Callable[[Work], dict[str, Sight]]


def check(work: Work) -> Iterator[Item]:
    load = functools.cache(_sights)
    parts = [partial(_diagnosis, load=load, key=key) for key in FAULTY]
    yield from ask(work, load, (_results, *PREDICTIONS, *parts, partial(_healthy, load=load)))
    yield from check_claims(work)


def _sights(work: Work) -> dict[str, Sight]:
    """Each stage that has run, beside the healthy one.

    Raises:
        Missing: the healthy stage has no result yet.
        WorkshopError: a result can't be read.
    """
    found = load_all(work.results / FOLDER.name)
    _need(found, HEALTHY)
    return {key: Sight(stage, found[HEALTHY]) for key, stage in found.items()}


def _need(found: Container[str], *keys: str) -> None:
    if missing := [key for key in keys if key not in found]:
        numbers = [key.removeprefix("stage") for key in missing]
        raise Missing(f"no result yet of {', '.join(missing)}:", " ".join([_RUN, *numbers]))


def _results(work: Work) -> Iterator[Item]:
    _need(_sights(work), *FAULTY)
    yield Item(True, "your results of the six stages")


def _show_in_the_loss(sights: dict[str, Sight]) -> int:
    _need(sights, *FAULTY)
    losses = ("loss_first", "loss_last")
    return sum(any(sights[key].differs(loss) for loss in losses) for key in FAULTY)


PREDICTIONS: tuple[Predicted[dict[str, Sight]], ...] = (
    Predicted(
        "predict.first_loss", "the first loss of a sound model", "",
        lambda sights: sights[HEALTHY].here["loss_first"],
        "A model that knows nothing gives each of V tokens the same chance: ln(V).", within=0.1,
    ),
    Predicted(
        "predict.loss_differs", "how many of the five faults show in the loss", "",
        _show_in_the_loss,
        "And only one of them is so far off that it can't pass for a good loss.", within=0.1,
    ),
)  # fmt: skip


# --- a diagnosis ---------------------------------------------------------------------------------


def _diagnosis(work: Work, *, load: Load, key: str) -> Iterator[Item]:
    """The cause; while that is wrong, nothing of evidence and fix, which would give it away."""
    sights = load(work)
    _need(sights, key)
    sight = sights[key]
    if sight.stage.setting != sight.healthy.setting:
        raise WorkshopError(
            f"{key} ran elsewhere, or with other sizes, than {HEALTHY}: run all stages again"
        )
    if found_in(sight) == NONE:
        why = f"has {sight.stage.stage}.py been changed? The exercise needs the original"
        yield Item(False, f"{key}: your result shows no fault", why)
        return
    cause = _cause(work, sight, key)
    yield cause
    if cause.ok:
        yield from work.each(partial(_evidence, sight=sight, key=key))
        yield from work.each(partial(_fix, sight=sight, key=key))


def _cause(work: Work, sight: Sight, key: str) -> Item:
    """Whether the stage's metrics show the cause that was named."""
    cause = CAUSES[work.answers.choice(f"{key}.cause", tuple(CAUSES))]
    why = "" if cause.holds(sight) else f"no: {sight.fill(cause.answer)}"
    return Item(not why, f"{key}: {cause.clause}", why)


def _evidence(work: Work, *, sight: Sight, key: str) -> Iterator[Item]:
    metric = work.answers.choice(f"{key}.metric", tuple(METRICS))
    here, there = sight.stage.text(metric), sight.healthy.text(metric)
    actual = sight.here[metric]
    if math.isnan(actual):
        why = "this machine gives no such metric: take another"
    elif not sight.differs(metric):
        why = f"it is {here} here and {there} in stage 6: what is the same in both is not evidence"
    elif metric not in CAUSES[found_in(sight)].metrics:
        why = (
            f"it differs, {here} against {there}, but so it may where nothing is wrong, or "
            "something else: which metric is the cause itself, counted?"
        )
    else:
        noted = work.answers.number(f"{key}.value")
        error = 0.0 if metric in COUNTS else _COPYING_ERROR * abs(actual)
        right = abs(noted - actual) <= error or noted == float(here.replace(",", ""))
        why = METRICS[metric] if right else f"you noted {noted:g}, your result has {here}"
        yield Item(right, f"{key}: {metric} gives it away", why)
        return
    yield Item(False, f"{key}: {metric}", why)


def _fix(work: Work, *, sight: Sight, key: str) -> Iterator[Item]:
    name = work.answers.choice(f"{key}.fix", (*REPAIRS, *NO_REPAIRS))
    repaired = REPAIRS.get(name)
    why = NO_REPAIRS.get(name) or f"that is for another fault: {CAUSES[repaired or NONE].clause}"
    yield judged(repaired == found_in(sight), f"{key}: {name.replace('_', ' ')}", f"no: {why}")


# --- the healthy stage ---------------------------------------------------------------------------


def _healthy(work: Work, *, load: Load) -> Iterator[Item]:
    sights = load(work)
    sight = sights[HEALTHY]
    if found_in(sight) != NONE:
        why = f"{CAUSES[found_in(sight)].clause}: has {sight.stage.stage}.py been changed?"
        yield Item(False, f"{HEALTHY}: your result shows a fault", why)
        return
    yield _cause(work, sight, HEALTHY)
    names = work.answers.names(f"{HEALTHY}.cleared_by", tuple(METRICS))
    yield judged(
        len(names) <= _MOST_METRICS,
        f"{HEALTHY}: no more than {_MOST_METRICS} metrics",
        f"yours are {len(names)}: which say the same?",
    )
    _need(sights, *FAULTY)
    for key in FAULTY:
        yield _excluded(sights[key], names)


def _excluded(sight: Sight, names: list[str]) -> Item:
    """Whether one of the metrics excludes a faulty stage: it shows that stage's cause."""
    key, telling = sight.stage.key, CAUSES[found_in(sight)].metrics
    metric = next((name for name in names if name in telling and sight.differs(name)), None)
    if metric:
        return Item(True, f"{HEALTHY}: {metric} excludes the fault of {key}")
    return Item(
        False,
        f"{HEALTHY}: nothing in your list excludes the fault of {key}",
        f"a sound run may have {key}'s " + ", ".join(f"{n} {sight.stage.text(n)}" for n in names),
    )
