"""Grades a diagnosis against the participant's own results of the six stages."""

from collections.abc import Iterator
from functools import partial

from debug_causes import CAUSES, FIXES, NONE, Sight, found_in
from debug_claims import check_claims
from debug_results import COUNTS, FOLDER, HEALTHY, METRICS, StageResult, load_all, shown

from workshop.errors import WorkshopError
from workshop.exercises.frame import Item, Missing, Work, judged
from workshop.exercises.predict import Predicted, ask

FAULTY = ("stage1", "stage2", "stage3", "stage4", "stage5")
_RUN = "version3_triton/exercises/performance_debugging/run_all_stages.sh"
_MOST_METRICS = 4
_COPYING_ERROR = 1e-3
"""Relative, of a metric that was copied from the tables; counts are copied whole."""


def check(work: Work) -> Iterator[Item]:
    diagnoses = (partial(_diagnosis, key=key) for key in FAULTY)
    yield from ask(work, _sights, (_results, *PREDICTIONS, *diagnoses, _healthy))
    yield from check_claims(work)


def _load(work: Work) -> dict[str, StageResult]:
    return load_all(work.results / FOLDER.name)


def _require_all(found: dict[str, StageResult]) -> None:
    """Raises Missing: a stage has no result yet."""
    missing = [key for key in (*FAULTY, HEALTHY) if key not in found]
    if missing:
        numbers = [key.removeprefix("stage") for key in missing]
        raise Missing(f"no result yet of {', '.join(missing)}:", " ".join([_RUN, *numbers]))


def _results(work: Work) -> Iterator[Item]:
    _require_all(_load(work))
    yield Item(True, "your results of the six stages")


def _sight(work: Work, key: str) -> Sight:
    """A stage beside the healthy one.

    Raises:
        Missing: one of them has no result yet.
        WorkshopError: they can't be compared.
    """
    found = _load(work)
    if key not in found or HEALTHY not in found:
        _require_all(found)
    sight = Sight(found[key], found[HEALTHY])
    if sight.stage.setting != sight.healthy.setting:
        raise WorkshopError(
            f"{key} ran elsewhere, or with other sizes, than {HEALTHY}: run all stages again"
        )
    return sight


def _sights(work: Work) -> list[Sight]:
    return [_sight(work, key) for key in FAULTY]


def _show_in_the_loss(sights: list[Sight]) -> int:
    losses = ("loss_first", "loss_last")
    return sum(any(sight.differs(loss) for loss in losses) for sight in sights)


PREDICTIONS: tuple[Predicted[list[Sight]], ...] = (
    Predicted(
        "predict.first_loss", "the first loss of a sound model", "",
        lambda sights: sights[0].of_healthy("loss_first"),
        "A model that knows nothing gives each of V tokens the same chance: ln(V).", within=0.1,
    ),
    Predicted(
        "predict.loss_differs", "how many of the five faults show in the loss", "",
        _show_in_the_loss,
        "And only one of them is so far off that it can't pass for a good loss.", within=0.1,
    ),
)  # fmt: skip


# --- a diagnosis ---------------------------------------------------------------------------------


def _diagnosis(work: Work, *, key: str) -> Iterator[Item]:
    """The cause; while that is wrong, nothing of evidence and fix, which would give it away."""
    sight = _sight(work, key)
    if found_in(sight) == NONE:
        why = f"has {sight.stage.stage}.py been changed? The exercise needs the original"
        yield Item(False, f"{key}: your result shows no fault", why)
        return
    cause = _cause(work, sight, key)
    yield cause
    if cause.ok:
        yield from work.each(*(partial(part, key=key, sight=sight) for part in (_evidence, _fix)))


def _cause(work: Work, sight: Sight, key: str) -> Item:
    """Whether the stage's metrics show the cause that was named."""
    cause = CAUSES[work.answers.choice(f"{key}.cause", tuple(CAUSES))]
    return judged(cause.holds(sight), f"{key}: {cause.clause}", f"no: {cause.answer(sight)}")


def _evidence(work: Work, *, key: str, sight: Sight) -> Iterator[Item]:
    metric = work.answers.choice(f"{key}.metric", tuple(METRICS))
    here, there = sight.text(metric), sight.healthy_text(metric)
    actual = sight.stage.metrics()[metric]
    if actual is None:
        why = "this machine gives no such metric: take another"
    elif not sight.differs(metric):
        why = f"it is {here} here and {there} in stage 6: what is the same in both is not evidence"
    elif metric not in CAUSES[found_in(sight)].metrics:
        why = (
            f"it differs, {here} against {there}, but so it may where nothing is wrong, or "
            "something else: which metric is the cause itself, counted?"
        )
    else:
        yield _value(key, metric, work.answers.number(f"{key}.value"), actual)
        return
    yield Item(False, f"{key}: {metric}", why)


def _value(key: str, metric: str, noted: float, actual: float) -> Item:
    text = shown(metric, actual)
    error = 0.0 if metric in COUNTS else _COPYING_ERROR * abs(actual)
    right = abs(noted - actual) <= error or noted == float(text.replace(",", ""))
    why = METRICS[metric] if right else f"you noted {noted:g}, your result has {text}"
    return Item(right, f"{key}: {metric} gives it away", why)


def _fix(work: Work, *, key: str, sight: Sight) -> Iterator[Item]:
    name = work.answers.choice(f"{key}.fix", tuple(FIXES))
    fix, right = FIXES[name], FIXES[name].repairs == found_in(sight)
    why = fix.why_not or f"that is for another fault: {CAUSES[fix.repairs or NONE].clause}"
    yield judged(right, f"{key}: {name.replace('_', ' ')}", f"no: {why}")


# --- the healthy stage ---------------------------------------------------------------------------


def _healthy(work: Work) -> Iterator[Item]:
    sight = _sight(work, HEALTHY)
    if found_in(sight) != NONE:
        why = f"{CAUSES[found_in(sight)].clause}: has {sight.stage.stage}.py been changed?"
        yield Item(False, f"{HEALTHY}: your result shows a fault", why)
        return
    yield _cause(work, sight, HEALTHY)
    names = _names(work, f"{HEALTHY}.cleared_by")
    yield judged(
        len(names) <= _MOST_METRICS,
        f"{HEALTHY}: no more than {_MOST_METRICS} metrics",
        f"yours are {len(names)}: which say the same?",
    )
    for key in FAULTY:
        yield _excluded(_sight(work, key), names)


def _names(work: Work, key: str) -> list[str]:
    """Names of metrics; WorkshopError for anything else."""
    names = work.answers[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WorkshopError(f'{key} should be a list of metrics, such as ["peak_mb"]')
    unknown = next((name for name in names if name not in METRICS), None)
    if unknown is not None:
        raise WorkshopError(f"{key}: {unknown!r} is none of {', '.join(METRICS)}")
    return list(dict.fromkeys(names))


def _excluded(sight: Sight, names: list[str]) -> Item:
    """Whether one of the metrics excludes a faulty stage: it shows that stage's cause."""
    key = sight.stage.key
    telling = [
        name for name in names if name in CAUSES[found_in(sight)].metrics and sight.differs(name)
    ]
    if telling:
        return Item(True, f"{HEALTHY}: {telling[0]} excludes the fault of {key}")
    return Item(
        False,
        f"{HEALTHY}: nothing in your list excludes the fault of {key}",
        f"a sound run may have {key}'s " + ", ".join(f"{n} {sight.text(n)}" for n in names),
    )
