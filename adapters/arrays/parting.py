"""Whether a second run of a call went the way of the first: only then is it believed."""

from anynan._base.summary import Summary
from anynan._diagnosis.lineage import OpRecord, Replay


def divergence(first: Replay, second: Replay) -> str | None:
    """Say where a second run parts from what the first one's flags tell, None if it does not.

    Operations, lines and kinds are to be the same, finite ends within a factor of two: sums may
    be added up in another order.

    Args:
        first: What the failing run itself left behind.
        second: What was seen when it was run again.
    """
    if not second.sinks:
        return "the second run was clean: the function keeps state or is random"
    arrived = [{(s.phase, s.layer, s.label, s.kind) for s in run.sinks} for run in (first, second)]
    ours, theirs = ([r for r in run.records if _kind(r)] for run in (first, second))
    for one, other in zip(ours, theirs, strict=False):
        if (one.name, one.layer, _place(one), _kind(one)) != (
            other.name, other.layer, _place(other), _kind(other),
        ):  # fmt: skip
            return f"the second run took another path, {_word(other)} in place of {_word(one)}"
        if not _alike(one, other):
            return f"the second run had other values, at {_word(one)}"
    if len(ours) != len(theirs) or arrived[0] != arrived[1]:
        return "the second run took another path: the function keeps state or is random"
    return None


def _kind(record: OpRecord) -> str | None:
    return None if record.output is None else record.output.kind


def _place(record: OpRecord) -> tuple[str, int] | None:
    return None if record.source is None else (record.source.file, record.source.line)


def _word(record: OpRecord) -> str:
    place = _place(record)
    return record.name if place is None else f"{record.name} (line {place[1]})"


def _alike(one: OpRecord, other: OpRecord) -> bool:
    pairs = zip(one.operands, other.operands, strict=False)
    return all(_near(a.summary, b.summary) for a, b in pairs)


def _near(one: Summary | None, other: Summary | None) -> bool:
    if one is None or other is None or one.kind != other.kind:
        return one is None or other is None
    ends = ((one.min, other.min), (one.max, other.max))
    return all(a is None or b is None or abs(a - b) <= max(abs(a), abs(b)) / 2 for a, b in ends)
