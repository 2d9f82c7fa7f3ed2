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
        if not isinstance(self.layers, str):
            msg = f"Allow: layers is a glob, not {type(self.layers).__name__}: {self.layers!r}"
            raise TypeError(msg)
        if self.reason and not isinstance(self.reason, str):
            msg = f"Allow: reason is a sentence, not {type(self.reason).__name__}: {self.reason!r}"
            raise TypeError(msg)
        if self.kind not in KINDS:
            msg = f"Allow: unknown kind {self.kind!r}; choose from {', '.join(KINDS)}"
            raise ValueError(msg)
        if self.phase is not None and self.phase not in PHASES:
            msg = f"Allow: unknown phase {self.phase!r}; choose from {', '.join(PHASES)}"
            raise ValueError(msg)
        if not self.reason:
            msg = f"Allow({self.layers!r}, {self.kind!r}) needs a reason: it is listed in reports"
            raise ValueError(msg)


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
        overrides: Glob on the layer path -> what is another for those layers: what that policy
            does not set is as here. Where several match, the last wins. ``model`` is the model
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
            if level not in _LEVELS and not (name == "neginf" and level is None):
                msg = f"Policy({name}={level!r}): choose from {', '.join(_LEVELS)}"
                raise ValueError(msg)
        for name in ("large", "headroom", "spike", "vanishing"):
            _limit(name, getattr(self, name))
        if self.spike is not None and self.spike <= 1:
            msg = f"Policy(spike={self.spike!r}): the ratio to the running median must be above 1"
            raise ValueError(msg)
        if isinstance(self.bad, str):
            object.__setattr__(self, "bad", (self.bad,))
        if not isinstance(self.bad, Iterable):
            msg = f"Policy(bad=...) takes kinds, not {self.bad!r}"
            raise TypeError(msg)
        object.__setattr__(self, "bad", tuple(self.bad))
        for kind in self.bad:
            if kind not in set(KINDS) - set(NON_FINITE):
                msg = f"Policy(bad=...): {kind!r} is not one of large, spike, vanishing"
                raise ValueError(msg)
        if isinstance(self.allow, Allow):
            object.__setattr__(self, "allow", (self.allow,))
        allow = tuple(self.allow) if isinstance(self.allow, Iterable) else (self.allow,)
        object.__setattr__(self, "allow", allow)
        for entry in allow:
            if not isinstance(entry, Allow):
                msg = f"Policy(allow=...) takes anynan.Allow entries, not {entry!r}"
                raise TypeError(msg)
        if not isinstance(self.overrides, Mapping):
            msg = f"Policy(overrides=...) maps globs to Policy objects, not {self.overrides!r}"
            raise TypeError(msg)
        for glob, other in self.overrides.items():
            if not isinstance(glob, str) or not isinstance(other, Policy):
                msg = f"Policy(overrides=...) maps globs to Policy objects, not {glob!r}: {other!r}"
                raise TypeError(msg)
        self._refuse_scales()

    def _refuse_scales(self) -> None:
        for name, kinds, word in (
            ("scale_streak", (int,), "a whole number"), ("scale_floor", (int, float), "a number"),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                msg = f"Policy({name}={value!r}): expected {word}, not {type(value).__name__}"
                raise TypeError(msg)
        if not self.scale_floor >= 0:
            msg = f"Policy(scale_floor={self.scale_floor!r}): a loss scale is never below 0"
            raise ValueError(msg)
        if self.scale_streak < 1:
            msg = f"Policy(scale_streak={self.scale_streak!r}): a streak is at least 1 step"
            raise ValueError(msg)

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
        self,
        phase: Phase,
        lo: float,
        hi: float,
        *,
        layer: str | None = None,
        dtype_max: float | None = None,
    ) -> tuple[Kind, Severity] | None:
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


def _limit(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"Policy({name}={value!r}): expected a number or None, not {type(value).__name__}"
        raise TypeError(msg)
    if not value > 0:
        msg = f"Policy({name}={value!r}): the limit must be positive"
        raise ValueError(msg)


DEFAULT = Policy()
