"""Which layer of one model is which of another: by path, by pattern, by order and shape."""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from anynan._apps.compare.captures import Taken

_INDEX = re.compile(r"[_\[]?(\d+)\]?$")


def spelled(path: str) -> str:
    """Spell a layer path the way that most frameworks agree on.

    Example:
        >>> spelled("Model/layers_0/Attn")
        'model.layers.0.attn'
    """
    parts = []
    for part in re.split(r"[./]", path.lower()):
        found = _INDEX.search(part)
        name = part[: found.start()] if found else part
        parts += [name] if name else []
        parts += [found[1]] if found else []
    return ".".join(parts)


def renamed(path: str, names: Mapping[str, str]) -> str | None:
    """Apply the first pattern that fits a path; each ``*`` stands for the same text in both.

    Example:
        >>> renamed("layers.3.norm", {"layers.*.norm": "blocks_*/ln"})
        'blocks_3/ln'
    """
    for pattern, target in names.items():
        found = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), path)
        if found:
            made = target
            for text in found.groups():
                made = made.replace("*", text, 1)
            return made.replace("*", "")
    return None


def refuse_unused(names: Mapping[str, str], a: Sequence[Taken], b: Sequence[Taken]) -> None:
    """Refuse a pattern that fits nothing.

    Raises:
        ValueError: If one names no layer of the first model, or leads to none of the second.
    """
    mine, theirs = {x.layer for x in a}, {x.layer for x in b}
    for pattern, target in names.items():
        found = {renamed(path, {pattern: target}) for path in mine} - {None}
        if not found:
            msg = f"names: {pattern!r} fits no layer of the first model: {_some(mine)}"
            raise ValueError(msg)
        if not found & theirs:
            msg = f"names: {target!r} leads to no layer of the second model: {_some(theirs)}"
            raise ValueError(msg)


def _some(paths: set[str]) -> str:
    shown = ", ".join(sorted(path for path in paths if path)[:6])
    return f"it has {shown}{', ...' if len(paths) > 7 else ''}"


def pairs(
    a: Sequence[Taken], b: Sequence[Taken], names: Mapping[str, str],
    forward: Sequence[tuple[Taken, Taken | None]] = (),
) -> list[tuple[Taken, Taken | None]]:  # fmt: skip
    """Find the partner of each call of the first run.

    Args:
        a: Calls of the reference, in order; of one way.
        b: Calls of the other.
        names: Patterns from the first model's paths to the second's.
        forward: For the backward pass: what was found for the forward pass, which holds there.

    Returns:
        All of ``a``, in order, each with its partner or None.
    """
    by_path = {(x.layer, x.call): x for x in b}
    by_spelling = {(spelled(x.layer), x.call): x for x in b}
    found: dict[int, Taken | None] = {}
    used: set[int] = set()
    settled = {(x.layer, x.call): y for x, y in forward}
    for i, x in enumerate(a):
        there = settled.get((x.layer, x.call))
        if there is not None:
            found[i] = by_path.get((there.layer, there.call))
            used.add(id(found[i]))
    for wanted in ("pattern", "path", "spelling"):
        for i, x in enumerate(a):
            if i in found:
                continue
            other = _named(x, wanted, names, by_path, by_spelling)
            if other is not None and id(other) not in used:
                found[i] = other
                used.add(id(other))
    mine = [i for i in range(len(a)) if i not in found]
    theirs = [x for x in b if id(x) not in used]
    matcher = SequenceMatcher(
        None, [_form(a[i]) for i in mine], [_form(x) for x in theirs], autojunk=False
    )
    for block in matcher.get_matching_blocks():
        for step in range(block.size):
            found[mine[block.a + step]] = theirs[block.b + step]
    return [(x, found.get(i)) for i, x in enumerate(a)]


def _named(
    x: Taken, wanted: str, names: Mapping[str, str], by_path: Mapping[Any, Taken],
    by_spelling: Mapping[Any, Taken],
) -> Taken | None:  # fmt: skip
    if wanted == "pattern":
        target = renamed(x.layer, names)
        return None if target is None else by_path.get((target, x.call))
    if wanted == "path":
        return by_path.get((x.layer, x.call))
    return by_spelling.get((spelled(x.layer), x.call))


def _form(x: Taken) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(size for size in array.shape if size > 1)) for array in x.made)
