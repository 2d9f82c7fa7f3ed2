"""What the readings suggest, in lines of a report: suspicions, and never alarms."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anynan._base.escaping import name as printed
from anynan._diagnosis.rules.evidence import group, magnitude, plural
from anynan._runs.forecast import WINDOW, Forecast, forecasts
from anynan._runs.quiet import contained, dead
from anynan._runs.record import Record

_NAMED = 3


@np.errstate(all="ignore")
def outlook(run: Record) -> list[str]:
    """Say what is to be expected, what does nothing, and where an overflow left no trace."""
    history = run.history
    found = []
    steps = history.steps()[-WINDOW:]
    # What went bad meanwhile is told already, and what grew with it is no news.
    if steps and not any(e.severity == "bad" and e.step >= steps[0] for e in run.events):
        coming = forecasts(history)
        found += [f"  forecast  {_forecast(each)}" for each in coming[:1]]
        if len(coming) > 1:
            found[-1] += f"; also in {_others(coming[1:])}"
    for each in contained(history)[:_NAMED]:
        source = "what came in" if each.before is None else _layer(each.before)
        often = f", and in {plural(each.steps - 1, 'step')} more" if each.steps > 1 else ""
        found.append(
            f"  contained {_layer(each.layer)} gave only zeros in step {each.step}{often}, right "
            f"after {source} reached {magnitude(each.size)}: the square of that overflows "
            f"{each.dtype}, and a norm that overflows leaves zeros"
        )
    quiet = dead(history)
    for value in dict.fromkeys(each.value for each in quiet):
        alike = [each for each in quiet if each.value == value]
        found.append(
            f"  dead      every number of {_layer(alike[0].layer)} was {magnitude(value)} in the "
            f"last {alike[0].steps} steps"
            + (f"; also of {_others(alike[1:])}" if alike[1:] else "")
        )
    return found


def _forecast(each: Forecast) -> str:
    where = _layer(each.layer) if each.parameter is None else printed(each.parameter)
    steps = max(1, round(each.steps))
    about = f"about {group(steps)} steps" if steps > 1 else "the next step"
    return (
        f"at this rate {each.dtype} overflows in {where} in {about}: {each.bits:.1f} bits are "
        f"left, and {each.rate:.2g} go in each step (suspect)"
    )


def _layer(name: str | None) -> str:
    return printed(name or "") or "the model itself"


def _others(found: Sequence[Any]) -> str:
    names = [_layer(each.layer) for each in found[:_NAMED]]
    more = f" and {plural(len(found) - _NAMED, 'layer')} more" if len(found) > _NAMED else ""
    return ", ".join(names) + more
