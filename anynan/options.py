"""The options that every adapter shares, checked once."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, TypeVar

from anynan._bundle.folders import refuse_unwritable
from anynan._readings.patterns import Patterns
from anynan._readings.policy import DEFAULT, Policy
from anynan.events import Event

ACTIONS = ("raise", "warn", "record", "skip")
STATS = ("absmax", "min", "max", "mean", "rms", "norm")
LEVELS = ("step", "layer", "operation")
ENVIRONMENT = ("off", "warn", "record", "raise")
KEEP_BYTES = 64 * 2**20

Track = TypeVar("Track", bound=Callable[..., Any])
Action = Literal["raise", "warn", "record", "skip"] | Callable[[Event], object]
Stats = str | Iterable[str]


class Watching(TypedDict, total=False):
    """Name the options that say what is watched, and how.

    Attributes:
        policy: What counts as bad, and where; an ``anynan.Policy``.
        layers: Globs or predicates on layer paths: what is watched; everything by default.
        exclude: Globs or predicates: what is not, with all that is inside; it wins.
        replay: Whether a bad step is run again to name the operation; True by default.
        history: For how many steps the readings are kept; 1000 by default.
        stats: Further numbers for ``metrics()``: absmax, min, max, mean, rms, norm.
        level: What of every step is watched. ``"step"``: what it returns, what the model
            returns, the gradients of the weights; the default of array code. ``"layer"`` (the
            default of models): every layer, too.
            ``"operation"``: every operation, too, which is slow.
    """

    policy: Policy
    layers: Patterns
    exclude: Patterns
    replay: bool
    history: int
    stats: Stats
    level: Literal["step", "layer", "operation"]


class Shared(Watching, total=False):
    """Name the options that every ``track`` has.

    Attributes:
        action: What happens where something is bad: ``"raise"`` (the default), ``"warn"``,
            ``"record"``, ``"skip"`` (a warning, and no update) or a function of the Event.
        save: A folder for a bundle of the first event that is bad: its operation with whole
            operands, as a script. Where it is not empty, a numbered one beside it.
    """

    action: Action
    save: str | os.PathLike[str] | None


class Arrays(Shared, total=False):
    """Name the options of ``track`` for array code.

    Attributes:
        read: When readings are judged: ``"auto"``, ``"immediate"``, ``"step"`` or every n calls.
    """

    read: Literal["auto", "immediate", "step"] | int


class Weights(TypedDict, total=False):
    """Name the options where weights and gradients are known.

    Attributes:
        backward: Whether gradients are watched; True by default.
        patience: How many bad steps in a row are skipped with a warning before ``action``
            applies; 0 by default.
        parameters: Whether every weight is read after each update; False by default.
        updates: In one step of so many it is told how far the update moves the weights.
    """

    backward: bool
    patience: int
    parameters: bool
    updates: int | None


class Training(Shared, Weights, total=False):
    """Name the options of every ``track`` that knows weights and gradients."""


@dataclass(frozen=True)
class Options:
    """Hold the common options of ``track``; see each adapter's docstring for the words.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has an unknown or impossible value.
    """

    policy: Policy = DEFAULT
    action: Action = "raise"
    layers: Patterns = None
    exclude: Patterns = None
    backward: bool = True
    replay: bool = True
    history: int = 1000
    patience: int = 0
    stats: tuple[str, ...] = ()
    parameters: bool = False
    read: Literal["auto", "immediate", "step"] | int = "auto"
    level: Literal["step", "layer", "operation"] = "layer"
    keep: int | Literal["step"] = KEEP_BYTES
    across_ranks: bool = True
    save: str | os.PathLike[str] | None = None
    updates: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            seen = f"the class {self.policy.__name__}" if isinstance(self.policy, type) else ""
            msg = f"policy= takes an anynan.Policy, not {seen or type(self.policy).__name__}"
            raise TypeError(msg)
        if not callable(self.action) and self.action not in ACTIONS:
            msg = (
                f"action={self.action!r} is unknown; choose from {', '.join(ACTIONS)}, "
                "or give a function that takes the Event"
            )
            raise ValueError(msg)
        for name in ("layers", "exclude"):
            chosen = getattr(self, name)
            if isinstance(chosen, Iterable) and not isinstance(chosen, str):
                object.__setattr__(self, name, tuple(chosen))  # a generator is walked twice
        for name in ("backward", "replay", "parameters", "across_ranks"):
            if not isinstance(getattr(self, name), bool):
                msg = f"{name}= takes True or False, not {getattr(self, name)!r}"
                raise TypeError(msg)
        for name in ("history", "patience"):
            _whole(name, getattr(self, name), 0)
        if isinstance(self.stats, str):
            object.__setattr__(self, "stats", (self.stats,))
        if not isinstance(self.stats, Iterable):
            seen = type(self.stats).__name__
            msg = f"stats= takes names of statistics, not {seen}: {self.stats!r}"
            raise TypeError(msg)
        object.__setattr__(self, "stats", tuple(self.stats))
        for stat in self.stats:
            if stat not in STATS:
                msg = f"stats: {stat!r} is unknown; choose from {', '.join(STATS)}"
                raise ValueError(msg)
        if isinstance(self.read, str):
            if self.read not in ("auto", "immediate", "step"):
                msg = (
                    f"read={self.read!r} is unknown; choose auto, immediate or step, or a number "
                    "n to read every n steps"
                )
                raise ValueError(msg)
        else:
            _whole("read", self.read, 1)
        if self.updates is not None:
            _whole("updates", self.updates, 1)
        if self.level not in LEVELS:
            msg = f"level={self.level!r} is unknown; choose from {', '.join(LEVELS)}"
            raise ValueError(msg)
        if isinstance(self.keep, str) and self.keep != "step":
            msg = f"keep= takes a number of bytes or 'step', not str: {self.keep!r}"
            raise TypeError(msg)
        if self.keep != "step":
            _whole("keep", self.keep, 0)
        if self.save is not None and not (isinstance(self.save, str | os.PathLike) and self.save):
            msg = f"save= takes the path of a folder, not {type(self.save).__name__}: {self.save!r}"
            raise TypeError(msg)
        if self.save is not None:
            refuse_unwritable(os.fspath(self.save))
        self.policy.refuse_idle()

    @classmethod
    def checked(cls, given: Mapping[str, Any], known: type, where: str) -> Self:
        """Check the options that somebody gave by name.

        Args:
            given: The options.
            known: The TypedDict that names those there are.
            where: For whom they are: an adapter's name.

        Raises:
            TypeError: If one is unknown, cannot be honoured there, or is of the wrong type.
            ValueError: If one has an impossible value.
        """
        names = list(known.__annotations__)
        common = inspect.signature(cls).parameters
        for name in given:
            if name == "skip":
                msg = (
                    "track() has no option 'skip': patterns of layers to leave out are "
                    "exclude=, and a bad step's update is dropped by action='skip'"
                )
                raise TypeError(msg)
            if name not in names:
                what = f"{name}= has no meaning for {where}"
                if name not in common:
                    what = f"track() has no option {name!r}"
                msg = f"{what}; the options are {', '.join(names)}"
                raise TypeError(msg)
        return cls(**{name: value for name, value in given.items() if name in common})

    @classmethod
    def shown(cls, known: type) -> Callable[[Track], Track]:
        """Have a function's signature name its options, with the defaults of those that are shared.

        Args:
            known: The TypedDict that names those there are.
        """
        shared = inspect.signature(cls).parameters

        def put(track: Track) -> Track:
            written = inspect.signature(track)
            given = [x for x in written.parameters.values() if x.kind is not x.VAR_KEYWORD]
            for name in known.__annotations__:
                default = shared[name].default if name in shared else None
                if name in ("policy", "level"):  # long, and another for array code
                    default = ...
                given.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                )
            vars(track)["__signature__"] = written.replace(parameters=given)
            return track

        return put

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


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name}= takes a whole number, not {type(value).__name__}: {value!r}"
        raise TypeError(msg)
    if value < least:
        msg = f"{name}={value} is too small: it must be at least {least}"
        raise ValueError(msg)


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
