"""Which layers a pattern chooses."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from anynan._readings.policy import matches

Pattern = str | Callable[[str, Any], bool]
Patterns = Pattern | Iterable[Pattern] | None


def choose(
    layers: dict[str, Any], keep: Patterns = None, exclude: Patterns = None,
    overrides: Iterable[str] = (), *, whole: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the layers that ``keep`` chooses and ``exclude`` does not cover.

    A string is matched with fnmatch on the whole path (``*`` crosses dots); a predicate is
    called with the path and the layer. ``exclude`` wins, and covers what is inside the layer.

    Args:
        layers: Layer path -> layer.
        keep: Patterns to keep; None keeps everything.
        exclude: Patterns to leave out.
        overrides: The globs of a policy's overrides, which must match, too.
        whole: False where layers may come later, so that a pattern need not match yet.

    Raises:
        TypeError: If a pattern is neither a string nor a predicate.
        ValueError: If a pattern matches no layer.
    """
    for glob in overrides if whole else ():
        if glob != "model" and not any(matches(path, glob) for path in layers):
            msg = f"Policy(overrides=...): {glob!r} matches no layer{_nearest(glob, layers)}"
            raise ValueError(msg)
    kept = set(layers) if keep is None else _matching("layers", keep, layers, whole=whole)
    left_out = set() if exclude is None else _matching("exclude", exclude, layers, whole=whole)
    return {
        path: layer
        for path, layer in layers.items()
        if path in kept and not any(within(path, outer) for outer in left_out)
    }


def within(path: str, outer: str) -> bool:
    """Tell whether a layer is another one, or is inside of it."""
    return path == outer or not outer or path.startswith(outer + ".")


def _matching(option: str, patterns: Patterns, layers: dict[str, Any], *, whole: bool) -> set[str]:
    found: set[str] = set()
    items = [patterns] if isinstance(patterns, str) or callable(patterns) else patterns
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        msg = f"{option}= takes globs or predicates, not {type(patterns).__name__}: {patterns!r}"
        raise TypeError(msg)
    items = tuple(items)
    if not items and option == "layers":
        msg = "layers= is empty, so nothing would be watched; leave it out to watch every layer"
        raise ValueError(msg)
    for pattern in items:
        if isinstance(pattern, type):
            kind = pattern.__name__
            msg = (
                f"{option}= takes globs or predicates, not the class {kind}: choose its layers "
                f"with lambda path, layer: isinstance(layer, {kind})"
            )
            raise TypeError(msg)
        if isinstance(pattern, str):
            hits = {path for path in layers if fnmatchcase(path, pattern)}
        elif callable(pattern):
            hits = {path for path, layer in layers.items() if pattern(path, layer)}
        else:
            msg = f"{option}= takes globs or predicates, not {type(pattern).__name__}: {pattern!r}"
            raise TypeError(msg)
        if not hits and whole:
            msg = f"{option}={pattern!r} matches no layer{_nearest(pattern, layers)}"
            raise ValueError(msg)
        found |= hits
    return found


def _nearest(pattern: Any, layers: dict[str, Any]) -> str:
    names = [path for path in layers if path]
    if not names:
        return ": the model has no layers inside"
    if isinstance(pattern, str):
        import difflib

        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
        if close:
            return f"; did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"; the layers are {shown}"
