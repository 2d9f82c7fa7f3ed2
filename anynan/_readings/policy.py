"""What counts as bad."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Self

from anynan.events import KINDS, NON_FINITE, PHASES, Kind, Phase, Severity

Level = Literal["bad", "suspect", "ignore"]
_LEVELS = ("bad", "suspect", "ignore")
_MASK_PHASES = ("input", "forward")


@dataclass(frozen=True, slots=True)
class Allow:
    """Whitelist a kind in some layers, with the reason that the report will list.

    Attributes:
        layers: Glob on the layer path (``*`` crosses dots); ``model`` is the model itself.
        kind: The kind that is legitimate there.
        reason: Why.
        phase: Only in this phase; None for every phase.

    Example:
        >>> import anynan
        >>> anynan.Allow("head.mask", "neginf", "an additive mask").kind
        'neginf'
    """

    layers: str
    kind: Kind
    reason: str
    phase: Phase | None = None

    def __post_init__(self) -> None:
        given, why = type(self.layers).__name__, type(self.reason).__name__
        text = f"Allow: layers is a glob, not {given}: {self.layers!r}"
        _require(isinstance(self.layers, str), text, TypeError)
        text = f"Allow: reason is a sentence, not {why}: {self.reason!r}"
        _require(not self.reason or isinstance(self.reason, str), text, TypeError)
        text = f"Allow: unknown kind {self.kind!r}; choose from {', '.join(KINDS)}"
        _require(self.kind in KINDS, text)
        text = f"Allow: unknown phase {self.phase!r}; choose from {', '.join(PHASES)}"
        _require(self.phase is None or self.phase in PHASES, text)
        text = f"Allow({self.layers!r}, {self.kind!r}) needs a reason: it is listed in reports"
        _require(bool(self.reason), text)


@dataclass(frozen=True)
class Policy:
    """Decide which readings are bad, suspect or nothing.

    The defaults never trip on a correct program: NaN and +Inf are bad, -Inf is suspect in
    inputs and forward values and bad in a loss, gradient or parameter.

    Attributes:
        nan: Level of NaN.
        posinf: Level of +Inf.
        neginf: Level of -Inf; None means suspect in forward values and bad elsewhere.
        large: Absolute limit on finite values, None for no limit.
        headroom: Bits to overflow below which a value is ``large``, None for no limit.
        spike: Ratio of the gradient norm over all weights to its running median that is a
            ``spike``; in an override, of the layer's own norm.
        vanishing: Gradient norm of a layer's own weights below which it is ``vanishing``.
        bad: Kinds among ``large``, ``spike`` and ``vanishing`` that act instead of warn.
        allow: The whitelist; every entry carries its reason.
        overrides: Globs on the layer path, each with a Policy for those layers. What that policy
            does not set stays as here. If several match, the last wins. ``model`` is the model
            itself.
        scale_streak: Skipped steps in a row after which a loss scaler's overflow is bad.
        scale_floor: Loss scale at or below which an overflow is bad.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a level is unknown or a limit makes no sense.

    Example:
        >>> import anynan
        >>> anynan.Policy(large=1e4).judge("forward", -2.0, 3e4)
        ('large', 'suspect')
    """

    nan: Level = "bad"
    posinf: Level = "bad"
    neginf: Level | None = None
    large: float | None = None
    headroom: float | None = None
    spike: float | None = None
    vanishing: float | None = None
    bad: tuple[Kind, ...] = ()
    allow: tuple[Allow, ...] = ()
    overrides: Mapping[str, "Policy"] = field(default_factory=dict)
    scale_streak: int = 25
    scale_floor: float = 1.0

    _given: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Note which values are set: as an override it leaves the others as they are."""
        made = super().__new__(cls)
        names = (*cls.__dataclass_fields__,)[: len(args)]
        object.__setattr__(made, "_given", frozenset((*names, *given)))
        return made

    def __post_init__(self) -> None:
        for name in ("nan", "posinf", "neginf"):
            level = getattr(self, name)
            fine = level in _LEVELS or (name == "neginf" and level is None)
            _require(fine, f"Policy({name}={level!r}): choose from {', '.join(_LEVELS)}")
        for name in ("large", "headroom", "spike", "vanishing"):
            value = getattr(self, name)
            if value is not None:
                _require_number(name, value, "a number or None")
                _require(value > 0, f"Policy({name}={value!r}): the limit must be positive")
        text = f"Policy(spike={self.spike!r}): the ratio to the running median must be above 1"
        _require(self.spike is None or self.spike > 1, text)
        if isinstance(self.bad, str):
            object.__setattr__(self, "bad", (self.bad,))
        text = f"Policy(bad=...) takes kinds, not {self.bad!r}"
        _require(isinstance(self.bad, Iterable), text, TypeError)
        object.__setattr__(self, "bad", tuple(self.bad))
        for kind in self.bad:
            text = f"Policy(bad=...): {kind!r} is not one of large, spike, vanishing"
            _require(kind in KINDS and kind not in NON_FINITE, text)
        lone = isinstance(self.allow, Allow) or not isinstance(self.allow, Iterable)
        object.__setattr__(self, "allow", (self.allow,) if lone else tuple(self.allow))
        for entry in self.allow:
            text = f"Policy(allow=...) takes anynan.Allow entries, not {entry!r}"
            _require(isinstance(entry, Allow), text, TypeError)
        maps = "Policy(overrides=...) maps globs to Policy objects, not"
        _require(isinstance(self.overrides, Mapping), f"{maps} {self.overrides!r}", TypeError)
        for glob, other in self.overrides.items():
            fine = isinstance(glob, str) and isinstance(other, Policy)
            _require(fine, f"{maps} {glob!r}: {other!r}", TypeError)
        _require_number("scale_streak", self.scale_streak, "a whole number", int)
        _require_number("scale_floor", self.scale_floor, "a number")
        text = f"Policy(scale_floor={self.scale_floor!r}): a loss scale is never below 0"
        _require(self.scale_floor >= 0, text)
        text = f"Policy(scale_streak={self.scale_streak!r}): a streak is at least 1 step"
        _require(self.scale_streak >= 1, text)

    def at(self, layer: str | None) -> "Policy":
        """Return the policy that holds in this layer, overrides applied."""
        named = self.named(layer)
        return replace(self, overrides={}, **named) if named else self

    def named(self, layer: str | None) -> dict[str, Any]:
        """Return what the overrides set for this layer."""
        found: dict[str, Any] = {}
        for glob, other in self.overrides.items():
            if matches(layer, glob):
                found |= {name: getattr(other, name) for name in other._given - {"overrides"}}  # noqa: SLF001
        return found

    def refuse_idle(self) -> None:
        """Refuse kinds that act though no limit of theirs is set anywhere.

        Raises:
            ValueError: If there is one.
        """
        everywhere = (self, *self.overrides.values())
        for kind in {kind: None for each in everywhere for kind in each.bad}:
            limits = ("large", "headroom") if kind == "large" else (kind,)
            if not any(getattr(each, limit) for each in everywhere for limit in limits):
                wanted = " or ".join(f"{limit}=" for limit in limits)
                msg = f"Policy(bad={kind!r}) does nothing without {wanted}: set that limit, too"
                raise ValueError(msg)

    @property
    def unlimited(self) -> bool:
        """Tell whether every finite value is as good as any other, in every layer."""
        return self.large is None and self.headroom is None and not self.overrides

    def limit(self, layer: str | None, dtype_max: float | None) -> float:
        """Return the magnitude above which a finite value is ``large`` in this layer."""
        mine = self.at(layer)
        limits = [math.nextafter(math.inf, 0)]
        if mine.large is not None:
            limits.append(mine.large)
        if mine.headroom is not None and dtype_max is not None:
            limits.append(dtype_max * 2.0**-mine.headroom)
        return min(limits)

    def judge(
        self, phase: Phase, lo: float, hi: float, *, layer: str | None = None,
        dtype_max: float | None = None,
    ) -> tuple[Kind, Severity] | None:  # fmt: skip
        """Judge a reading: its smallest and largest value, NaN in both if any is NaN.

        Returns:
            The kind and its severity, or None when there is nothing to say.
        """
        kind = reading_kind(lo, hi)
        if kind is None:
            limit = self.limit(layer, dtype_max)
            if -limit <= lo and hi <= limit:
                return None
            kind = "large"
        return self.weigh(kind, phase, layer)

    def weigh(self, kind: Kind, phase: Phase, layer: str | None) -> tuple[Kind, Severity] | None:
        """Give the severity of a kind in this phase and layer, None where it is ignored."""
        mine = self.at(layer)
        if kind in NON_FINITE:
            level: Level | None = getattr(mine, kind)
            if level is None:
                level = "suspect" if may_mask(kind, phase) else "bad"
        else:
            level = "bad" if kind in mine.bad else "suspect"
        return None if level == "ignore" else (kind, level)

    def spoils(self, kind: Kind | None, layer: str | None, *, buffer: bool = False) -> bool:
        """Tell whether a weight that holds a value of this kind is bad, or a buffer may be.

        One of -Inf is a mask.
        """
        if kind is None:
            return False
        found = self.weigh(kind, "forward" if buffer else "parameter", layer)
        return found is not None and found[1] == "bad"

    def allowed(self, kind: Kind, phase: Phase, layer: str | None) -> str | None:
        """Return the reason of the whitelist entry that covers this, None if none does."""
        for entry in (*self.allow, *self.at(layer).allow):
            if entry.kind == kind and entry.phase in (None, phase) and matches(layer, entry.layers):
                return entry.reason
        return None


def matches(layer: str | None, glob: str) -> bool:
    """Match a layer path; the model itself is called ``model``, as in ``metrics()``."""
    return fnmatchcase(layer or "", glob) or (not layer and glob == "model")


def may_mask(kind: str | None, phase: str) -> bool:
    """Tell whether values may be a mask, which is made of -Inf.

    Where values only pass through, it proves nothing by itself.
    """
    return kind == "neginf" and phase in _MASK_PHASES


def reading_kind(lo: float, hi: float) -> Kind | None:
    """Name the non-finite kind that a reading's two ends show, None if both are finite."""
    if lo != lo or hi != hi:
        return "nan"
    if math.inf in (lo, hi):
        return "posinf"
    return "neginf" if -math.inf in (lo, hi) else None


def _require(fine: bool, text: str, error: type[Exception] = ValueError) -> None:
    if not fine:
        raise error(text)


def _require_number(name: str, value: Any, what: str, kinds: Any = int | float) -> None:
    text = f"Policy({name}={value!r}): expected {what}, not {type(value).__name__}"
    _require(isinstance(value, kinds) and not isinstance(value, bool), text, TypeError)


DEFAULT = Policy()
