"""A tracker's state in a few lines of text, or as a flat dict of numbers."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from anynan._base.escaping import name as printed
from anynan._diagnosis.rules.evidence import group, magnitude, plural
from anynan._readings.norms import FEWEST
from anynan._readings.readings import layer_norms
from anynan._reports.report import folded
from anynan._runs.forecast import WINDOW, Forecast, forecasts
from anynan._runs.narrower import ONLY
from anynan._runs.quiet import contained, dead
from anynan._runs.record import Record

if TYPE_CHECKING:
    from anynan._readings.history import History
    from anynan._readings.readings import Reading
    from anynan._steps.judge import Judge
    from anynan._steps.tracked import Tracked
    from anynan.events import Event

CLEAN = "nothing went bad"  # in what was read
READ = "nothing bad was read"  # where that would be taken for more
SHOWN_EVENTS = 10
SHOWN_LAYERS = 5
LINE = 1000
NAMED = 3  # of what the readings suggest
JUMP = 2.0  # an update that is so many times the usual one is worth a word


def metrics(tracker: "Tracked", *, layers: bool = False) -> dict[str, float]:
    """Return the last read step's numbers under flat names.

    What is bad is told as such: a gradient norm is NaN or Inf then, and so is the largest
    magnitude of a bad layer; headroom is NaN where there is a NaN, and 0 bits at an Inf. What
    may be meant (a mask's -Inf, missing data) is left out.

    They are the step, the tightest headroom in bits, the gradient norm over all weights, of a
    step that ``updates=`` looked at the norm of the update and its ratio to that of the weights,
    and the counts of events. With ``layers`` there are, per layer and phase,
    ``anynan/absmax/<phase>/<layer>`` and ``anynan/headroom/<phase>/<layer>``, too, and for the
    gradients of each layer's own weights ``anynan/gradient_norm/<layer>`` and
    ``anynan/headroom/gradient/<layer>`` (at least that many bits, as it follows from the norm).
    """
    numbers: dict[str, float] = {}
    readings = tracker.history.last()
    headroom = math.inf
    for reading in readings:
        bits = reading.headroom
        broken = reading.kind is not None and _is_broken(tracker.judge, reading)
        if bits is None and broken:
            bits = math.nan if reading.kind == "nan" else 0.0
        layer = reading.layer or "model"
        name = f"anynan/headroom/{reading.phase if reading.norm is None else 'gradient'}/{layer}"
        if bits is not None:
            numbers[name] = min(bits, numbers.get(name, bits), key=_nan_last)
        absmax, meant = reading.absmax, reading.kind is not None and not broken
        if reading.site.bound or absmax is None or meant:
            continue
        name = f"anynan/absmax/{reading.phase}/{reading.site.parameter or layer}"
        numbers[name] = max(absmax, numbers.get(name, 0.0), key=_nan_first)
        for stat, value in _stats(tracker.judge, reading):
            numbers[name.replace("absmax", stat, 1)] = value
        if bits is not None:
            headroom = min(headroom, bits, key=_nan_last)
    numbers |= _of_step(tracker, readings, headroom)
    for word in ("bad", "suspect", "expected"):
        numbers[f"anynan/{word}"] = float(tracker.count(word))
    return {name: value for name, value in numbers.items() if layers or name.count("/") == 1}


def _of_step(tracker: "Tracked", readings: "list[Reading]", headroom: float) -> dict[str, float]:
    """Give the numbers that belong to no one reading of a step."""
    numbers = {"anynan/step": float(readings[-1].step)} if readings else {}
    if headroom != math.inf:
        numbers["anynan/headroom"] = headroom
    norms = layer_norms(readings)
    if norms:
        numbers["anynan/gradient_norm"] = math.hypot(*norms.values())
        numbers |= {f"anynan/gradient_norm/{k or 'model'}": v for k, v in norms.items()}
    for step, update, size in tracker.history.updates()[-1:]:
        if readings and step == readings[-1].step:
            numbers["anynan/update_norm"] = update
            numbers["anynan/update_ratio"] = update / size if size else math.inf
    return numbers


def _stats(judge: "Judge", reading: "Reading") -> "Iterator[tuple[str, Any]]":
    """Yield the statistics that were asked for with ``stats=``."""
    known: dict[str, Any] = dict(zip(judge.options.extra, reading.stats, strict=False))
    known |= {"min": reading.lo, "max": reading.hi}
    return ((stat, known[stat]) for stat in judge.options.stats if stat in known)


def _is_broken(judge: "Judge", reading: "Reading") -> bool:
    """Tell whether a reading is bad for sure: not what came in, no state, and not excused."""
    kind, site = reading.kind, reading.site
    if kind is None or site.phase == "input" or (site.buffer and site.phase == "parameter"):
        return False
    return judge.monitor.is_bad(kind, site.phase, site.layer)


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _nan_last(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def tightest(history: "History") -> "dict[str, Reading]":
    """Return each layer's reading that came nearest to overflow, tightest first."""
    best: dict[str, Reading] = {}
    for reading in history.largest():
        headroom = reading.headroom
        if headroom is None or reading.site.bound or reading.layer is None:
            continue
        held = best.get(reading.layer)
        if held is None or headroom < _bits(held):
            best[reading.layer] = reading
    return dict(sorted(best.items(), key=lambda item: _bits(item[1])))


def _bits(reading: "Reading") -> float:
    bits = reading.headroom
    return math.inf if bits is None else bits


def _at_first(history: "History", reading: "Reading") -> str:
    """Say how much headroom the same place had in the oldest step that is still known."""
    first = history.first(reading.site)
    if first is None or first.step == reading.step or first.headroom is None:
        return ""
    return f" ({first.headroom:.1f} at step {first.step})"


def _gradients(history: "History") -> list[str]:
    """Give the last gradient norms in a line: all weights, the largest and the smallest layer."""
    readings = history.last()
    norms = layer_norms(readings)
    if not norms:
        return []
    text = f"  gradient  norm {magnitude(math.hypot(*norms.values()))}, step {readings[-1].step}"
    bad = [layer for layer, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        named = ", ".join(layer or "(the model itself)" for layer in bad[:SHOWN_LAYERS])
        text += f"; not finite in {len(bad)} of {plural(len(norms), 'layer')}: {named}"
        text += ", ..." if len(bad) > SHOWN_LAYERS else ""
    elif len(norms) > 1:
        ranked = sorted(norms.items(), key=lambda item: item[1])
        (low, least), (high, most) = ranked[0], ranked[-1]
        text += (
            f"; largest {magnitude(most)} {high or '(the model itself)'}, "
            f"smallest {magnitude(least)} {low or '(the model itself)'}"
        )
    return [text]


def _updates(history: "History") -> list[str]:
    """Give the last update that was looked at in a line, with the layer that moved most."""
    known = history.updates()
    if not known:
        return []
    step, update, size = known[-1]
    share = f", {update / size:.2g} of the weights'" if size else ""
    text = f"  update    norm {magnitude(update)}{share}, step {step}"
    held = next(e.updates for e in reversed(history.entries()) if e.updates)
    layers = [(norm / all_, layer) for layer, (norm, all_) in held.items() if all_]
    if len(layers) > 1:
        most, layer = max(layers)
        text += f"; the largest share {most:.2g}, {layer or '(the model itself)'}"
    usual = median(norm for _, norm, _ in known[-1 - FEWEST : -1]) if len(known) > FEWEST else 0.0
    if usual and update > JUMP * usual:
        text += f"; {update / usual:.1f} times the median of the {FEWEST} before"
    return [text]


def verdict(run: Record) -> str:
    """Say in a line what came of the watching: steps, layers, readings, tightest headroom."""
    return _verdict(run, tightest(run.history))


def _verdict(run: Record, best: "dict[str, Reading]") -> str:
    last = [*run.history.steps()[-1:], *(event.step for event in run.events[-1:])]
    if not last:
        return printed(f"anynan: {run.name}: nothing was read yet", LINE)
    bad, count = run.counts["bad"], max(run.step, max(last) + 1)
    suspects = [e for e in run.events if e.severity == "suspect" and not e.expected and _tells(e)]
    readings = run.history.last()
    given = all(reading.phase == "input" for reading in readings)  # nothing it made
    text = f"{group(bad)} bad" if bad else READ if run.harms or given else CLEAN
    if not (bad or readings or best):  # another framework's function, say
        text = "nothing was read"
    if suspects and not bad:  # no all-clear
        text = f"0 bad, {len(suspects)} suspect"
    text += (
        f" in {_steps(count, run.evaluated)}: {plural(len(run.layers), 'layer')}, "
        f"{plural(len(readings), 'reading')} in the last step"
    )
    # What was finite before it went bad says nothing of how a run ended.
    for layer, reading in [] if bad or run.harms else list(best.items())[:1]:
        where = layer or "the model itself"
        text += f", tightest headroom {reading.headroom:.1f} bits at {where} ({ONLY})"
    return printed(f"anynan: {run.name}: {text}", LINE)


def _steps(count: int, evaluated: int) -> str:
    """Count the iterations of a training, and the calls without gradients beside them."""
    if not 0 < evaluated < count:
        return plural(count, "step")
    calls = plural(evaluated, "call")
    return f"{plural(count - evaluated, 'iteration')} and {calls} without gradients"


def _tells(event: "Event") -> bool:
    """Tell whether a suspect is more than a mask: an operation made it, or NaN went through."""
    through = event.kind == "nan" and event.phase in ("forward", "loss", "backward")
    return event.operation is not None or through


def all_clear(run: Record) -> str:
    """Say what came of the watching, and what the readings suggest."""
    return "\n".join([verdict(run), *(printed(line, LINE) for line in outlook(run))])


def kept(history: "History", layers: int) -> str:
    """Say in a line which steps are held."""
    steps = history.steps()
    if not steps:
        return "  steps     none yet"
    return (
        f"  steps     {steps[0]} to {steps[-1]} in the history, "
        f"{plural(layers, 'layer')}, {history.nbytes / 2**20:.1f} MiB"
    )


def numbers(history: "History", best: "dict[str, Reading] | None" = None) -> list[str]:
    """Give a line to each number that matters: headroom of the tightest layers, norms."""
    best = tightest(history) if best is None else best
    return [
        *(
            f"  headroom  {reading.headroom:.1f} bits  {layer or '(the model itself)'} "
            f"{reading.phase}, step {reading.step}, {reading.site.dtype}"
            f"{_at_first(history, reading)}"
            for layer, reading in list(best.items())[:SHOWN_LAYERS]
        ),
        *([f"            {ONLY}: what is computed inside may need more"] if best else []),
        *_gradients(history),
        *_updates(history),
    ]


def overview(run: Record, told: Sequence[str] | None = None) -> str:
    """Return what was seen of a run as text.

    Args:
        run: The run.
        told: What its readings suggest, where that is known already.
    """
    history, best = run.history, tightest(run.history)
    steps = history.steps()
    lines = [_verdict(run, best), kept(history, len(run.layers))]
    lines.append(
        f"  events    {run.counts['bad']} bad, {run.counts['suspect']} suspect, "
        f"{run.counts['expected']} expected"
    )
    lines += numbers(history, best)
    lines += outlook(run) if told is None else told
    lines += [f"  harm      {harm}" for harm in run.harms]
    lines += [f"  event     {line}" for line in folded(run.events)[-SHOWN_EVENTS:]]
    lines += [f"  allowed   {text}" for text in run.allowed]
    lines += [f"  note      {note}" for note in (*run.notes, *run.remarks, *run.damage)]
    never = run.unseen
    if steps and never:
        names = ", ".join(name or "(the model itself)" for name in never[:SHOWN_LAYERS])
        more = ", ..." if len(never) > SHOWN_LAYERS else ""
        lines.append(
            f"  not seen  {len(never)} watched {'layer was' if len(never) == 1 else 'layers were'} "
            f"never read: {names}{more} (not called, called past the hooks, or without float "
            "outputs)"
        )
    return "\n".join(printed(line, LINE) for line in lines)


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
    for each in contained(history)[:NAMED]:
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
    names = [_layer(each.layer) for each in found[:NAMED]]
    more = f" and {plural(len(found) - NAMED, 'layer')} more" if len(found) > NAMED else ""
    return ", ".join(names) + more
