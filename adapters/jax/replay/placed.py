"""NaN that the code itself wrote and that is handed on as it is: no operation made it.

A history begins so, or the best solution of a search. Such arrays are known by identity, from the
call that wrote them to the one that takes them. Whether a call made more of them shows where it
runs with numbers in their place: what is handed on is one of these numbers then.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from anynan.jax.program.evaluator import Evaluator, jit_once
from anynan.jax.read import probes
from anynan.jax.read.donated import alive, strong
from anynan.jax.read.readings import Plan

# Every float dtype has these. No operation gives all of them back by chance, or NaN of all.
NUMBERS = (0.75, -12.0, 96.0)
# Where a NaN in a result is from: it was only handed on, something was computed of it, or it is
# another.
Fate = Literal["placed", "used", "made"]
_known: dict[int, weakref.ref[Any]] = {}


def is_placed(x: Any) -> bool:
    """Tell whether an array is known to hold NaN as the code wrote it."""
    ref = _known.get(id(x := strong(x)))
    return ref is not None and ref() is x


def place(x: Any) -> None:
    """Know an array from now on."""

    def forget(ref: Any, key: int = id(x)) -> None:
        if _known.get(key) is ref:
            del _known[key]

    _known[id(x)] = weakref.ref(x, forget)


def is_nan(x: Any, word: int = probes.NAN) -> bool:
    """Tell whether something is an array with a NaN, given away or not."""
    x = alive(x)
    known = isinstance(x, jax.Array | np.ndarray) and probes.checkable(x)
    return known and not isinstance(x, jax.core.Tracer) and probes.worst(x) == word


def _is_kept(old: Any, new: Any) -> bool:
    """Tell whether all NaN in an array stood in its place already."""
    before, now = alive(old), alive(new)
    if before is None or np.shape(before) != np.shape(now):
        return False
    return not bool((jnp.isnan(now) & ~jnp.isnan(before)).any())


def writes(closed: Any) -> bool:
    """Tell whether a program's code writes a NaN."""
    return _rewritten(closed, 0.0) is not closed


def fates(
    closed: Any, arrays: list[Any], outs: list[Any], runs: dict[Any, Any], *,
    back: Mapping[int, int] | None = None, literals: bool = True,
    given: tuple[bool, ...] | None = None,
) -> dict[int, Fate]:  # fmt: skip
    """Tell of each result with a NaN where that is from; of none where it cannot be told.

    Args:
        closed: The program.
        arrays: What it was given.
        outs: What it gave.
        runs: Keeps what was compiled for it.
        back: The argument that a result takes the place of.
        literals: Whether the NaN that its code writes counts as placed.
        given: Whether that of each array does; None: where it is known to be.
    """
    bad = tuple(i for i, x in enumerate(outs) if is_nan(x))
    given, back = given or tuple(map(is_placed, arrays)), back or {}
    if all(i in back and given[back[i]] and _is_kept(arrays[back[i]], outs[i]) for i in bad):
        return dict.fromkeys(bad, "placed")
    if not bad or closed.effects or not (any(given) or (literals and writes(closed))):
        return {}
    given_now, outs = list(map(alive, arrays)), [alive(outs[i]) for i in bad]
    if any(x is None for x in given_now):
        return {}
    key = bad, given, literals
    rows: list[Any] = []
    for number in NUMBERS:
        if (*key, number) not in runs:
            runs[*key, number] = _run(closed, *key, number)
        rows.append(runs[*key, number](given_now, outs))
        if not any(given) and rows[0][0].all():
            break  # each is compiled, and what the code writes has no part in it
    found: Any = np.stack(rows)
    stays, differs = found[:, 0].all(axis=0), found[:, 1].any(axis=0)
    kinds = [
        "made" if stay else "used" if other else "placed"
        for stay, other in zip(stays, differs, strict=True)
    ]
    return dict(zip(bad, kinds, strict=True))  # type: ignore[arg-type]


def _run(
    closed: Any, bad: tuple[int, ...], given: tuple[bool, ...], literals: bool, number: float
) -> Callable[..., Any]:  # fmt: skip
    """Compile a program with a number in the place of what was placed."""
    program = _rewritten(closed, number) if literals else closed

    @jit_once
    def look(arrays: list[Any], outs: list[Any]) -> Any:
        ins = [
            jnp.where(jnp.isnan(x), jnp.asarray(number, jnp.result_type(x)), x) if here else x
            for x, here in zip(arrays, given, strict=True)
        ]
        made = Evaluator(Plan(replaying=True)).run(program.jaxpr, program.consts, ins)[0]
        pairs = [(made[i], jnp.isnan(x)) for i, x in zip(bad, outs, strict=True)]
        stays = [jnp.any(nan & jnp.isnan(x)) for x, nan in pairs]
        return jnp.stack([*stays, *(jnp.any(nan & (x != number)) for x, nan in pairs)])

    return lambda arrays, outs: look(arrays, outs).reshape(2, len(bad))


def _rewritten(part: Any, number: float) -> Any:
    """Put a number in the place of each NaN that code writes; what writes none stays itself."""
    if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
        found = [_rewritten(x, number) for x in part]
        same = all(a is b for a, b in zip(found, part, strict=True))
        return part if same else type(part)(found)
    if isinstance(part, jc.Literal):
        nan = probes.checkable(part.aval) and np.size(part.val) == 1 and part.val != part.val
        aval: Any = part.aval
        return jc.Literal(np.asarray(number, aval.dtype), aval) if nan else part
    if isinstance(part, jc.Jaxpr):  # from JAX 0.12 on a closed one is one of these
        return _changed(part, number, "eqns", "outvars")
    if isinstance(part, jc.ClosedJaxpr):
        return _changed(part, number, "jaxpr")
    if isinstance(part, jc.JaxprEqn):
        values = list(part.params.values())
        inner = _rewritten(values, number)
        if inner is not values:
            part = part.replace(params=dict(zip(part.params, inner, strict=True)))
        return _changed(part, number, "invars")
    return part


def _changed(part: Any, number: float, *names: str) -> Any:
    held = {name: getattr(part, name) for name in names}
    found = {name: _rewritten(x, number) for name, x in held.items()}
    same = all(found[name] is held[name] for name in names)
    return part if same else part.replace(**found)
