"""The options of ``track``: what each is, by default and in words, checked once."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, Self, TypedDict, TypeVar

from anynan._base.folders import refuse_unwritable
from anynan._base.messages import known
from anynan._base.notices import warn
from anynan._readings.patterns import Patterns
from anynan._readings.policy import DEFAULT, Allow, Policy
from anynan._reports.messages import RENAMED
from anynan.events import Event

__all__ = ["Advanced", "Allow", "MonitorOptions", "Options", "Policy", "TrackOptions"]

ACTIONS = ("raise", "warn", "record", "skip")
STATS = ("absmax", "min", "max", "mean", "rms", "norm")
LEVELS = ("step", "layer", "operation")
ENVIRONMENT = ("off", "warn", "record", "raise")
KEEP_BYTES = 64 * 2**20

# The names of ``Advanced`` that mean something where weights are known, and where they are not.
FOR_ARRAYS = ("replay", "history", "stats", "read", "ignore")
FOR_TRAINING = (
    "replay", "history", "stats", "backward", "patience", "parameters", "updates", "ignore",
)  # fmt: skip

Track = TypeVar("Track", bound=Callable[..., Any])
Action = Literal["raise", "warn", "record", "skip"] | Callable[[Event], object]
Stats = str | Iterable[str]
Names = str | Iterable[str]
Level = Literal["step", "layer", "operation"]


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Hold the options of ``track`` that few programs need, for ``track(..., advanced=...)``.

    An option that has no meaning for a framework is refused there.

    Attributes:
        replay: Run a bad step again to name the operation.
        history: For how many steps readings are kept.
        stats: More numbers for ``metrics()``: absmax, min, max, mean, rms, norm. Array code has
            absmax, min and max.
        read: When steps are judged: ``"auto"``, ``"immediate"`` (each value as it is made),
            ``"end"`` (when the step ends) or a number n, for every n steps. TensorFlow judges
            each step.
        backward: Watch gradients. Not for array code.
        patience: How many bad steps in a row are skipped with a warning before ``action``
            applies. Not for array code.
        parameters: Read every weight after each update. Not for array code.
        updates: Measure in one step of n how far the update moves the weights. Not for array
            code.
        keep: Bytes of output gradients kept for a replay of the backward pass, or ``"all"``.
            PyTorch only.
        across_ranks: Stop all processes of a distributed run at the same step. PyTorch only.
        keep_inputs: Keep donated arguments, so that a bad step can always be run again. JAX only.
        lag: With 1, a step is judged after the next one has started; with 0, at once. By default
            1 where no action depends on the answer. JAX only.
        ignore: Names of messages that you do not want to see, such as ``"replay-parted"``: the
            word in brackets that a warning or a note ends in.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has an impossible value.

    Example:
        >>> import anynan
        >>> anynan.Advanced(history=100, read="end")
        Advanced(history=100, read='end')
    """

    replay: bool = True
    history: int = 1000
    stats: Stats = ()
    read: Literal["auto", "immediate", "end"] | int = "auto"
    backward: bool = True
    patience: int = 0
    parameters: bool = False
    updates: int | None = None
    keep: int | Literal["all"] = KEEP_BYTES
    across_ranks: bool = True
    keep_inputs: bool = False
    lag: Literal[0, 1] | None = None
    ignore: Names = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = CHECKS[each.name](each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, value)

    def given(self) -> dict[str, Any]:
        """Return the options that are not at their defaults, by name."""
        pairs = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in pairs.items() if value != default}

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"{type(self).__name__}({said})"


class TrackOptions(TypedDict, total=False):
    """Name the options that every ``track`` takes.

    Attributes:
        action: What a bad event does: ``"raise"`` (the default), ``"warn"``, ``"record"``,
            ``"skip"`` (warn, and drop the update) or your function of the Event.
        level: What of every step is watched. ``"layer"`` (the default): each layer's outputs and
            their gradients. ``"step"`` (the default where there are no layers, as in array code,
            and of ``anynan run``): what the step returns and the gradients of the weights.
            ``"operation"``: each operation, which is slow.
        layers: Globs or predicates on layer paths: watch these alone.
        exclude: Globs or predicates: leave these out, with all that is inside.
        policy: What counts as bad, and where: an ``anynan.Policy``.
        save: A folder for a bundle of the first bad event: its operation with whole operands, as
            a script. Where something is there already, a numbered folder beside it.
        advanced: The other options: an ``anynan.Advanced``.
    """

    action: Action
    level: Level
    layers: Patterns
    exclude: Patterns
    policy: Policy
    save: str | os.PathLike[str] | None
    advanced: Advanced


class MonitorOptions(TypedDict, total=False):
    """Name the options of every Monitor beside its action; they mean what ``track``'s do."""

    level: Level
    layers: Patterns
    exclude: Patterns
    policy: Policy
    advanced: Advanced


@dataclass(frozen=True, kw_only=True, repr=False)
class Options(Advanced):
    """Hold all options of one tracker.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has an unknown or impossible value.
    """

    action: Action = "raise"
    level: Level = "layer"
    layers: Patterns = None
    exclude: Patterns = None
    policy: Policy = DEFAULT
    save: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy.refuse_idle()

    @classmethod
    def checked(cls, given: Mapping[str, Any], known: Iterable[str], where: str) -> Self:
        """Check the options that somebody gave by name.

        Args:
            given: The options of ``track``.
            known: The names of ``Advanced`` that have a meaning there.
            where: For whom they are: an adapter's name.

        Raises:
            TypeError: If one is unknown, cannot be honoured there, or is of the wrong type.
            ValueError: If one has an impossible value.
        """
        each = flat(given)
        for name in each:
            if name in ADVANCED and name not in known:
                msg = f"{name}= has no meaning for {where}; Advanced has {', '.join(known)} there"
                raise TypeError(msg)
            if name == "skip":
                msg = (
                    "track() has no option 'skip': patterns of layers to leave out are "
                    "exclude=, and a bad step's update is dropped by action='skip'"
                )
                raise TypeError(msg)
            if name not in ADVANCED and name not in EVERYDAY:
                msg = f"track() has no option {name!r}; the options are {', '.join(EVERYDAY)}"
                raise TypeError(msg)
        said = ", ".join(f"{name}=..." for name in given if name in ADVANCED)
        if said:
            new = f"track(advanced=anynan.Advanced({said}))"
            warn(RENAMED(old=f"track({said})", new=new), DEPRECATED)
        return cls(**each)

    @classmethod
    def shown(cls, track: Track) -> Track:
        """Have a function's signature name the options of ``track``, with their defaults."""
        written, defaults = inspect.signature(track), inspect.signature(cls).parameters
        given = [x for x in written.parameters.values() if x.kind is not x.VAR_KEYWORD]
        for name in EVERYDAY:
            default = defaults[name].default if name in defaults else None
            if name in ("policy", "level"):  # long, and another for array code
                default = ...
            given.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
        vars(track)["__signature__"] = written.replace(parameters=given)
        return track

    @property
    def only_watches(self) -> bool:
        """Tell whether a bad reading changes nothing: no update is stopped, no step run again."""
        return not self.replay and self.action in ("warn", "record") and not self.patience

    @property
    def sizes(self) -> bool:
        """Tell whether it is asked for how large finite values are."""
        policies = self.policy, *self.policy.overrides.values()
        return bool(self.stats) or any(p.large or p.headroom for p in policies)

    @property
    def extra(self) -> tuple[str, ...]:
        """Name the statistics that smallest and largest value do not give for free."""
        return tuple(stat for stat in self.stats if stat in ("mean", "rms", "norm"))


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Give the options of ``track`` in one dict, those of ``advanced=`` beside the others.

    Raises:
        TypeError: If ``advanced`` is something else.
    """
    rest = dict(given)
    advanced = rest.pop("advanced", None)
    if advanced is None:
        return rest
    if not isinstance(advanced, Advanced):
        msg = f"advanced= takes an anynan.Advanced, not {type(advanced).__name__}: {advanced!r}"
        raise TypeError(msg)
    return {**advanced.given(), **rest}


DEPRECATED = DeprecationWarning
EVERYDAY = tuple(TrackOptions.__annotations__)
ADVANCED = tuple(each.name for each in fields(Advanced))


def _whole(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name}= takes a whole number, not {type(value).__name__}: {value!r}"
        raise TypeError(msg)
    if value < least:
        msg = f"{name}={value} is too small: it must be at least {least}"
        raise ValueError(msg)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        msg = f"{name}= takes True or False, not {value!r}"
        raise TypeError(msg)
    return value


def _stats(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        msg = f"{name}= takes names of statistics, not {type(value).__name__}: {value!r}"
        raise TypeError(msg)
    stats = (value,) if isinstance(value, str) else tuple(value)
    for stat in stats:
        if stat not in STATS:
            msg = f"{name}: {stat!r} is unknown; choose from {', '.join(STATS)}"
            raise ValueError(msg)
    return stats


def _ignore(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        msg = f"{name}= takes names of messages, not {type(value).__name__}: {value!r}"
        raise TypeError(msg)
    slugs = (value,) if isinstance(value, str) else tuple(value)
    names = known() if slugs else {}
    for slug in slugs:
        if slug not in names:
            near = get_close_matches(str(slug), names, n=1, cutoff=0)
            msg = f"{name}: no message is named {slug!r}; the nearest is {near[0]!r}"
            raise ValueError(msg)
    return slugs


def _renamed(name: str, value: Any, old: str, new: str) -> Any:
    if isinstance(value, str) and value == old:
        warn(RENAMED(old=f"{name}={old!r}", new=f"{name}={new!r}"), DEPRECATED)
        return new
    return value


def _read(name: str, value: Any) -> str | int:
    value = _renamed(name, value, "step", "end")
    if not isinstance(value, str):
        return _whole(name, value, 1)
    if value not in ("auto", "immediate", "end"):
        msg = (
            f"{name}={value!r} is unknown; choose auto, immediate or end, or a number n to read "
            "every n steps"
        )
        raise ValueError(msg)
    return value


def _keep(name: str, value: Any) -> str | int:
    value = _renamed(name, value, "step", "all")
    if isinstance(value, str) and value != "all":
        msg = f"{name}= takes a number of bytes or 'all', not str: {value!r}"
        raise TypeError(msg)
    return value if isinstance(value, str) else _whole(name, value, 0)


def _lag(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or value not in (0, 1)):
        msg = (
            f"{name}= takes 0 (judge each step at once) or 1 (judge it after the next one has "
            f"started), not {value!r}"
        )
        raise ValueError(msg)
    return None if value is None else int(value)


def _policy(name: str, value: Any) -> Policy:
    if not isinstance(value, Policy):
        seen = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        msg = f"{name}= takes an anynan.Policy, not {seen}"
        raise TypeError(msg)
    return value


def _action(name: str, value: Any) -> Any:
    if not callable(value) and value not in ACTIONS:
        msg = (
            f"{name}={value!r} is unknown; choose from {', '.join(ACTIONS)}, or give a function "
            "that takes the Event"
        )
        raise ValueError(msg)
    return value


def _level(name: str, value: Any) -> Any:
    if value not in LEVELS:
        msg = f"{name}={value!r} is unknown; choose from {', '.join(LEVELS)}"
        raise ValueError(msg)
    return value


def _patterns(_: str, value: Any) -> Any:
    # A generator would be walked twice.
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(value) if several else value


def _save(name: str, value: Any) -> Any:
    if value is None:
        return None
    if not (isinstance(value, str | os.PathLike) and value):
        msg = f"{name}= takes the path of a folder, not {type(value).__name__}: {value!r}"
        raise TypeError(msg)
    refuse_unwritable(os.fspath(value))
    return value


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "action": _action,
    "level": _level,
    "layers": _patterns,
    "exclude": _patterns,
    "policy": _policy,
    "save": _save,
    "replay": _flag,
    "history": _whole,
    "stats": _stats,
    "read": _read,
    "backward": _flag,
    "patience": _whole,
    "parameters": _flag,
    "updates": lambda name, value: None if value is None else _whole(name, value, 1),
    "keep": _keep,
    "across_ranks": _flag,
    "keep_inputs": _flag,
    "lag": _lag,
    "ignore": _ignore,
}


def environment() -> str | None:
    """Return the override in the ANYNAN environment variable, None if it is not set.

    Raises:
        ValueError: If it is set to an unknown word.
    """
    word = os.environ.get("ANYNAN", "").strip().lower()
    if not word:
        return None
    if word not in ENVIRONMENT:
        msg = f"ANYNAN={word!r} in the environment is unknown; use {', '.join(ENVIRONMENT)}"
        msg += " ('skip' is given in the code, as action=)" if word == "skip" else ""
        raise ValueError(msg)
    return word
