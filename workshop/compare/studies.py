"""Which runs are those of a waterfall or of a sweep, and which of ordinary comparisons.

The former would fill a table of versions with single changes and odd sizes.
"""

from collections.abc import Sequence

from workshop.compare import sweep, waterfall
from workshop.compare.sweep import AXES, Sweep
from workshop.compare.waterfall import Waterfall
from workshop.results import RunResult


def ordinary(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs of neither."""
    by_session: dict[str, list[RunResult]] = {}
    for run in runs:
        by_session.setdefault(run.session, []).append(run)
    own = {id(run) for session in by_session.values() for run in _of_studies(session)}
    return [run for run in runs if id(run) not in own]


def preferred(wanted: Sequence[RunResult], among: Sequence[RunResult]) -> list[RunResult]:
    """Those of the wanted runs that are ordinary among all; all of them if none is, so that who
    has only ever run a waterfall or a sweep sees something."""
    kept = {id(run) for run in ordinary(among)}
    return [run for run in wanted if id(run) in kept] or list(wanted)


def _of_studies(runs: list[RunResult]) -> list[RunResult]:
    """Those of one session that a waterfall or a sweep is made of."""
    found = [one.runs for one in waterfall.find(runs)]
    found += [own for axis in AXES.values() for own in sweep.find(runs, axis)]
    return [run for own in found for run in own]


def of_waterfall(run: RunResult, one: Waterfall) -> bool:
    """Whether a run is of the session and size that a waterfall is made from."""
    size = (run.config_name, run.batch_size, run.seq_len)
    return _place(run) == (one.session, one.device) and (
        size == (one.config, one.batch_size, one.seq_len)
    )


def of_sweep(run: RunResult, one: Sweep) -> bool:
    """Whether a run is one that a sweep tells of."""
    kind = (run.precision, sweep.preset_name(AXES[one.axis], run))
    return _place(run) == (one.session, one.device) and kind == (one.precision, one.config)


def _place(run: RunResult) -> tuple[str, str]:
    return (run.session, str(run.device.get("name")))
