"""How far two arrays are apart, as a share of the first one's size."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_MOST = 5  # dimensions whose orders are tried


def relative(a: Array, b: Array) -> float:
    """Return the L2 norm of the difference over the L2 norm of ``a``.

    NaN and Inf at the same places and of the same kind agree; anywhere else they are infinitely
    far apart.

    Args:
        a: The reference.
        b: The other, of the same shape.

    Example:
        >>> import numpy as np
        >>> relative(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
        0.1
    """
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    fine = np.isfinite(x) & np.isfinite(y)
    if not fine.all():
        if not np.array_equal(x[~fine], y[~fine], equal_nan=True):
            return math.inf
        x, y = x[fine], y[fine]
    apart, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(x))
    if apart == 0:
        return 0.0
    return apart / size if size else math.inf


def nearest(a: Array, b: Array) -> float | None:
    """Return the relative distance under the order of ``b``'s dimensions that fits best.

    Frameworks lay out images and kernels differently; an array of the same numbers in another
    order of its dimensions, or with dimensions of size 1 more or less, is the same.

    Returns:
        None where the shapes do not fit in any order.
    """
    if a.shape == b.shape:
        best = relative(a, b)
        if best < 1e-2 or a.ndim < 2:
            return best
    else:
        best = math.inf
    a, b = np.squeeze(a), np.squeeze(b)
    if sorted(a.shape) != sorted(b.shape):
        return relative(a.ravel(), b.ravel()) if a.size == b.size else None
    for order in itertools.permutations(range(b.ndim)) if b.ndim <= _MOST else ():
        if tuple(b.shape[i] for i in order) == a.shape:
            best = min(best, relative(a, b.transpose(order)))
    return best


def holds(whole: Array, part: Array, within: float) -> bool:
    """Tell whether an array holds another, turned or as one block of several along a dimension.

    Args:
        whole: A weight, which may be fused of several: queries, keys and values in one.
        part: What is looked for.
        within: Relative distance that counts as equal.
    """
    part = np.squeeze(part)
    whole = np.squeeze(whole)
    if whole.ndim != part.ndim or whole.ndim > _MOST or part.size == 0:
        return whole.size == part.size and relative(whole.ravel(), part.ravel()) <= within
    for order in itertools.permutations(range(whole.ndim)):
        turned = whole.transpose(order)
        wide = [i for i in range(part.ndim) if turned.shape[i] != part.shape[i]]
        if not wide:
            if relative(part, turned) <= within:
                return True
        elif len(wide) == 1 and turned.shape[wide[0]] % part.shape[wide[0]] == 0:
            count = turned.shape[wide[0]] // part.shape[wide[0]]
            for block in np.split(turned, count, axis=wide[0]):
                if relative(part, block) <= within:
                    return True
    return False


def apart(
    a: Sequence[Array], b: Sequence[Array], *, layouts: bool, joint: bool = False
) -> float | None:
    """Return how far the arrays of two calls are apart, pair by pair.

    Args:
        a: Of the reference.
        b: Of the other; where the numbers of arrays differ, those of equal size are paired.
        layouts: Whether the order of dimensions may differ.
        joint: Measure all differences by the size of all of ``a``, as if they were one array.
            Gradients need it: that of a bias before a softmax is 0 but for rounding.

    Returns:
        The largest relative distance; None where nothing could be compared.
    """
    rest = list(b)
    found: list[tuple[float, float]] = []
    for x in a:
        at = next((i for i, y in enumerate(rest) if y.shape == x.shape), None)
        if at is None and layouts:
            at = next((i for i, y in enumerate(rest) if y.size == x.size), None)
        if at is None:
            continue
        y = rest.pop(at)
        far = nearest(x, y) if layouts else relative(x, y)
        if far is not None:
            found.append((far, _size(x)))
    if not found:
        return None
    worst = max(far for far, _ in found)
    if not joint or not math.isfinite(worst):
        return worst
    whole = math.hypot(*(size for _, size in found))
    return math.hypot(*(far * size for far, size in found)) / whole if whole else worst


def _size(x: Array) -> float:
    x = x.astype(np.float64).ravel()
    return float(np.linalg.norm(x[np.isfinite(x)]))


def summed(arrays: Sequence[Array]) -> list[Array]:
    """Add up the arrays of each shape."""
    found: dict[tuple[int, ...], Array] = {}
    for x in arrays:
        found[x.shape] = found[x.shape] + x if x.shape in found else x
    return list(found.values())
