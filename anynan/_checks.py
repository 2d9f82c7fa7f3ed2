"""The direct checks: ``check`` and ``summarize``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from anynan._arrays.access import dtype_max, library_name, type_name
from anynan._arrays.bulk import is_finite, left
from anynan._arrays.chunked import holds_floats, is_chunked
from anynan._arrays.containers import Parts, is_container, is_leaf, leaves
from anynan._arrays.measures import measure
from anynan._arrays.messages import UNLOOKED
from anynan._arrays.probe import ends, is_clean, probe
from anynan._base import context
from anynan._base.escaping import name as printed
from anynan._base.notices import warn
from anynan._base.sources import user_source
from anynan._base.summary import Summary
from anynan._base.tracebacks import shorten
from anynan._readings.policy import DEFAULT, Policy, reading_kind
from anynan._reports.logs import log
from anynan._reports.report import render
from anynan.errors import AnomalyError, NonFiniteError, reason
from anynan.events import NON_FINITE, Event, Kind, Operation, Phase, Severity, Source
from anynan.options import environment

T = TypeVar("T")

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold what one array was found to be."""

    path: str
    array: Any
    kind: Kind
    severity: Severity
    summary: Summary


def check(x: T, name: str = "array", *, policy: Policy | None = None) -> T:
    """Return ``x`` unchanged, or raise if it holds a NaN or an infinity.

    Args:
        x: An array of any library, a Python float, or a nested container of them
            (mappings, sequences, named tuples, dataclasses).
        name: What to call it in the report.
        policy: What counts as bad; ``Policy()`` by default.

    Returns:
        ``x`` itself, the same object.

    Raises:
        NonFiniteError: If a value is NaN, +Inf or -Inf and that is not expected here.
        AnomalyError: If a finite value is one that the policy makes bad.
        TypeError: If ``x`` is neither an array nor a container, or is used up by reading.

    Warns:
        AnynanWarning: If a value is only suspect, or under ``ANYNAN=warn``.

    Example:
        >>> import anynan, numpy
        >>> weights = numpy.ones(3)
        >>> anynan.check(weights, "weights") is weights
        True
    """
    action = environment()
    if action == "off":
        return x
    policy = DEFAULT if policy is None else policy
    _refuse_options(name, policy)
    if policy.unlimited and is_finite(x):
        return x
    if not is_leaf(x) and not is_container(x):
        _refuse(x, "check")
    layer = context.scope_path()
    found, unread = look_at_all(x, name, policy, layer)
    if unread is not None and not any(finding.severity == "bad" for finding in found):
        raise unread
    running = context.running.get()
    bad = [finding for finding in found if finding.severity == "bad"]
    if bad and running is not None:
        event = _event(bad[0], bad[1:], layer, user_source(skip=2))
        if running.take(event, bad[0].array, len(bad) - 1):
            found = [finding for finding in found if finding.severity == "suspect"]
    if found and action != "record":
        # The stack is only of use here, where the caller is still at a known distance.
        try:
            _act(found, action, layer, user_source(skip=2))
        except AnomalyError as error:
            shorten(error)
            raise
    return x


def summarize(x: Any) -> Summary:
    """Describe one array by counts and finite statistics.

    Args:
        x: An array of any library or a Python number.

    Returns:
        Shape, dtype, device, counts of NaN, Inf, zeros and subnormals, the finite extremes,
        mean, rms, headroom in bits, and the index of the first NaN or Inf.

    Raises:
        TypeError: If ``x`` is no array.

    Example:
        >>> import anynan, numpy
        >>> anynan.summarize(numpy.array([1.0, numpy.inf, 0.0])).first_bad
        (1,)
    """
    if is_container(x):
        msg = (
            f"summarize() describes one array, not {_a(x)}; call it on each array inside, "
            "or call check() to search the whole container"
        )
        raise TypeError(msg)
    if not is_leaf(x) and not isinstance(x, int):
        _refuse(x, "summarize")
    try:
        return measure(x)
    except TypeError:
        raise
    except Exception as error:
        msg = f"anynan cannot read the elements of {_a(x)}: {reason(error)}"
        raise TypeError(msg) from error


def plain_leaves(x: Any, name: str, parts: Parts | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the arrays in ``x`` with their paths, structured ones field by field."""
    for path, leaf in leaves(x, name, parts=parts):
        names = _fields(leaf)
        if names:
            yield from plain_leaves({key: leaf[key] for key in names}, path)
            continue
        yield path, leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype == object:
            for place, item in np.ndenumerate(leaf):
                if is_container(item) or (is_leaf(item) and np.ndim(item)):
                    yield from plain_leaves(item, f"{path}{list(place)}")


def _fields(leaf: Any) -> tuple[str, ...]:
    try:
        names = getattr(getattr(leaf, "dtype", None), "names", None)
    except Exception:  # noqa: BLE001  a proxy, a remote handle
        return ()
    return names if type(names) is tuple else ()


def look_at_all(
    x: Any, name: str, policy: Policy, layer: str | None, phase: Phase = "value"
) -> tuple[list[Finding], TypeError | None]:
    """Judge every array in ``x``.

    Returns:
        What was found, and the error for the first array that its library does not let be read.
        An array whose own code fails is warned about.
    """
    found: list[Finding] = []
    unread: TypeError | None = None
    # Without limits of their own, finite numbers are all alike.
    for path, leaf in plain_leaves(x, name, left if policy.unlimited else None):
        try:
            finding = look(path, leaf, policy, layer, phase)
        except TypeError as error:
            unread = unread or error
        except Exception as error:  # noqa: BLE001  a proxy, a remote handle
            warn(f"anynan: {UNLOOKED(what=path, error=reason(error))}")
        else:
            found += [] if finding is None else [finding]
    return found, unread


def _read(path: str, leaf: Any) -> tuple[Summary | None, tuple[float, float] | None]:
    """Give an array's ends, and its summary where that is to be had at once."""
    try:
        if not (is_chunked(leaf) and holds_floats(leaf)):
            return None, probe(leaf)
        summary = measure(leaf)  # one graph answers both questions
        return summary, ends(summary)
    except TypeError as error:
        msg = f"{printed(path)}: {error}"
        raise TypeError(msg) from error


def look(
    path: str, leaf: Any, policy: Policy, layer: str | None, phase: Phase = "value"
) -> Finding | None:
    """Judge one array; None if there is nothing to say of it."""
    if policy.unlimited and is_clean(leaf):
        return None
    summary, span = _read(path, leaf)
    if span is None:
        return None
    lo, hi = span
    largest = dtype_max(leaf) if policy.headroom is not None or policy.overrides else None
    verdict = policy.judge(phase, lo, hi, layer=layer, dtype_max=largest)
    if reading_kind(lo, hi) is None:
        if verdict is None or policy.allowed(verdict[0], phase, layer):
            return None
        return Finding(path, leaf, *verdict, summary or measure(leaf))
    # Two ends show one kind; what is excused must not hide what is not.
    summary = summary or measure(leaf)
    worst = sorted(
        _verdicts(summary, policy, layer, phase, largest), key=lambda verdict: verdict[1] != "bad"
    )
    return Finding(path, leaf, *worst[0], summary) if worst else None


def _verdicts(
    summary: Summary, policy: Policy, layer: str | None, phase: Phase, largest: float | None
) -> Iterator[tuple[Kind, Severity]]:
    """Judge each kind that an array holds, and its finite numbers."""
    kinds = (kind for kind in NON_FINITE if getattr(summary, kind))
    unmeant = (k for k in kinds if not (context.expected(k) or policy.allowed(k, phase, layer)))
    yield from filter(None, (policy.weigh(kind, phase, layer) for kind in unmeant))
    if summary.min is not None and summary.max is not None:
        rest = policy.judge(phase, summary.min, summary.max, layer=layer, dtype_max=largest)
        if rest is not None and not policy.allowed(rest[0], phase, layer):
            yield rest


def _act(
    found: list[Finding], action: str | None, layer: str | None, source: Source | None
) -> None:
    bad = [finding for finding in found if finding.severity == "bad"]
    for finding in found:
        if finding.severity == "suspect":
            _warn(_event(finding, [], layer, source))
    if not bad:
        return
    event = _event(bad[0], bad[1:], layer, source)
    if action == "warn":
        _warn(event)
        return
    log(event)
    error = NonFiniteError if event.kind in NON_FINITE else AnomalyError
    raise error(render(event), event)


def _warn(event: Event) -> None:
    log(event)
    warn(render(event))


def _event(
    finding: Finding, others: list[Finding], layer: str | None, source: Source | None
) -> Event:
    notes = []
    if others:
        names = [f"{other.path} ({other.kind})" for other in others[:_SHOWN]]
        if len(others) > _SHOWN:
            names.append(f"{len(others) - _SHOWN} more")
        notes.append(f"also bad: {', '.join(names)}")
    return Event(
        backend=library_name(finding.array),
        layer=layer,
        phase="value",
        kind=finding.kind,
        severity=finding.severity,
        step=0,
        tensor=finding.path,
        summary=finding.summary,
        operation=Operation(
            name="check",
            raw="anynan.check",
            inputs=(),
            output=finding.summary,
            source=source,
            layer=layer,
            phase="value",
        ),
        notes=tuple(notes),
    )


def _refuse_options(name: object, policy: object) -> None:
    if not isinstance(policy, Policy):
        msg = f"check(policy=...) takes an anynan.Policy, not {_a(policy)}"
        raise TypeError(msg)
    if not isinstance(name, str):
        msg = f"check(name=...) takes a string, not {_a(name)}; to check several arrays pass a list"
        raise TypeError(msg)


def _refuse(x: Any, function: str) -> None:
    if isinstance(x, int):
        return
    if isinstance(x, Iterator):
        msg = f"{function}() would use up {_a(x)} by reading it; pass list(...) of it instead"
    elif x is None:
        msg = f"{function}() was given None; is a return statement missing where it was made?"
    else:
        msg = (
            f"{function}() cannot find an array in {_a(x)}: it is no array and no mapping, "
            "sequence or dataclass of arrays; pass the arrays that it holds"
        )
    raise TypeError(msg)


def _a(x: Any) -> str:
    name = type_name(x)
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
