"""Put attributes of classes and modules in the place of others, and put back what was there."""

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Self

_ABSENT: Any = object()


class Patches:
    """Hold what was changed; a context that undoes it at its end.

    Example:
        >>> class Model:
        ...     def call(self):
        ...         return 1
        >>> from anynan._base.patches import Patches
        >>> with Patches() as patches:
        ...     patches.change(Model, "call", lambda real: lambda self: real(self) + 1)
        ...     Model().call()
        2
        >>> Model().call()
        1
    """

    def __init__(self) -> None:
        # Owner, name, what stood there itself, what stands there now.
        self._made: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> Self:
        """Begin with nothing changed."""
        return self

    def __exit__(self, *_: object) -> None:
        """Undo all of it."""
        self.undo()

    def put(self, owner: Any, name: str, new: Any) -> None:
        """Put something in an attribute's place.

        Args:
            owner: The class or module.
            name: Of the attribute; a class may have it from a base, and has it back then.
            new: What to put there.
        """
        self._made.append((owner, name, vars(owner).get(name, _ABSENT), new))
        _set(owner, name, new)

    def change(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put a function in another's place, once, under the name and signature of that.

        Args:
            owner: The class or module.
            name: Of the function.
            make: Gives the new function for the one that is called there now.
        """
        if self.holds(owner, name):
            return
        original = getattr(owner, name)
        self.put(owner, name, functools.update_wrapper(make(original), original))

    def holds(self, owner: Any, name: str) -> bool:
        """Tell whether an attribute was changed."""
        return any(held is owner and known == name for held, known, _, _ in self._made)

    def undo(self) -> None:
        """Put back what was there, last change first; safe to call twice.

        What somebody else put in our place since stays: it may call ours.
        """
        while self._made:
            owner, name, before, new = self._made[-1]
            if vars(owner).get(name, _ABSENT) is not new:
                pass
            elif before is not _ABSENT:
                _set(owner, name, before)
            elif isinstance(owner, type):
                type.__delattr__(owner, name)
            else:
                delattr(owner, name)
            self._made.pop()  # last: an interrupt may come at any line


def owner_of(cls: type, name: str) -> type:
    """Give the class that a class has a method from."""
    return next(owner for owner in cls.__mro__ if name in vars(owner))


def through(
    sessions: Callable[[], Iterable[Any]], link: str, *, paused: str = "paused"
) -> Callable[[Any], Any]:
    """Make what stands in a method's place, and runs it through sessions, the first innermost.

    Args:
        sessions: Gives those.
        link: Which method of each takes what runs the rest, the object, and the arguments.
        paused: What tells that one is to be left out.
    """
    of, idle = attrgetter(link), attrgetter(paused)  # no calls of Python's: updates are many

    def make(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, self)
            for session in sessions():
                if not idle(session):
                    run = functools.partial(of(session), run, self)
            return run(*args, **kwargs)

        return method

    return make


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; a metaclass has no say in it, unless it is an extension's (nanobind)."""
    if isinstance(owner, type) and type(owner).__module__ != "nanobind":
        type.__setattr__(owner, name, value)
    else:
        setattr(owner, name, value)
