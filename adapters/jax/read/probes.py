"""Reduce an array to a number that says whether it is finite, and measure it on the host."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._arrays.measures import describe
from anynan._base.summary import Summary

# The name that a check inside a traced function gives its value.
CHECKED = "anynan_checked"
# The name that a loss gets whose step does not return it.
LOSS = "anynan_loss"
_finfo: Any = jnp.finfo
FINE, NEGINF, POSINF, NAN = range(4)
KINDS: tuple[Any, ...] = (None, "neginf", "posinf", "nan")
# Arrays of up to so many numbers are looked at on the host.
HOST = 1 << 18
# The two ends of a reading that says only that nothing is bad.
UNREAD = (math.inf, -math.inf)


def checkable(aval: Any) -> bool:
    """Tell whether an array of this type and shape could hold a NaN or an Inf."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    if dtype == jax.dtypes.float0 or not math.prod(aval.shape):
        return False
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def dtype(aval: Any) -> tuple[str, float]:
    """Give the short name of a float or complex dtype, and its largest finite value."""
    return str(np.dtype(aval.dtype).name), float(_finfo(aval.dtype).max)


def parts(x: Any) -> list[Any]:
    """Split a complex array; widen what has no comparisons of its own."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [jnp.real(x), jnp.imag(x)]
    if x.dtype.itemsize == 1:
        return [x.astype(jnp.float32)]
    return [x]


def code(x: Any) -> Any:
    """Reduce an array to 0 (finite), 1 (-Inf), 2 (+Inf) or 3 (NaN), the worst in it.

    The word itself is finite, so that it survives a maximum across devices: there the
    maximum of the values would lose a NaN.
    """
    found = []
    for part in parts(x):
        top = jnp.asarray(_finfo(part.dtype).max, part.dtype)
        high = jnp.where(part > top, 2.0, 3.0)
        low = jnp.where(part >= -top, 0.0, 1.0)
        found.append(jnp.where(part <= top, low, high).astype(jnp.float32))
    return jnp.max(functools.reduce(jnp.maximum, found))


# Weights are looked at one by one: what is not compiled as one is compiled operation by operation.
_code = jax.jit(code)


def worst(x: Any) -> int:
    """Give what ``code`` gives; for a small array without compiling anything."""
    if not getattr(x, "is_fully_addressable", True) or np.size(x) > HOST:
        return int(_code(jnp.asarray(x)))
    return row(np.asarray(x))[0]


def row(host: Any) -> tuple[int, float, float]:
    """Give the word of an array on the host, its smallest and its largest finite value."""
    both = np.stack([host.real, host.imag]) if host.dtype.kind == "c" else host.astype(np.float64)
    fine = np.isfinite(both)
    if not fine.all():
        word = NAN if (both != both).any() else POSINF if (both == math.inf).any() else NEGINF
        both = both[fine]
    else:
        word = FINE
    return (word, float(both.min()), float(both.max())) if both.size else (word, *UNREAD)


def scales(count: int) -> Any:
    """Give the factors for so many totals, to be handed to the program when it runs.

    They are no constants of it: the compiler joins a constant with one of the user's, so that
    an overflow in ``x * 1e30`` would be gone. It does so with factors it does not know too: the
    zero, which is added before, keeps the two multiplications apart. And there is one for each
    reading: a factor that several share is kept as an array of their size.

    Returns:
        (3, count): 0, the factor up to float32, the factor beyond.
    """
    return np.tile(np.array([0.0, 2.0**-48, 2.0**-944]).astype(wide())[:, None], count)


def handed(factors: Any, dtypes: list[Any], device: Any) -> list[Any]:
    """Give factors one by one, on a device: what is taken out of an array there costs a kernel.

    Args:
        factors: What ``scales`` made.
        dtypes: What each is for, None for none.
        device: Where.
    """
    with jax.default_device(device):
        return [
            None if dtype is None else tuple(jnp.asarray(x) for x in _pair(factors, i, dtype))
            for i, dtype in enumerate(dtypes)
        ]


def _pair(factors: Any, number: int, dtype: Any) -> Any:
    """Give a reading's zero and its factor."""
    if isinstance(factors, list):
        return factors[number]
    return factors[0, number], factors[1 + int(int(_finfo(dtype).maxexp) > 128), number]


def total(arrays: list[Any], factors: Any, number: int) -> Any:
    """Add up arrays of one shape, scaled so that what is finite stays finite.

    A NaN and an Inf come through, also through a sum across devices; both Infs together come
    out as NaN. XLA runs it as one pass without an array of its own, unlike comparisons, which
    it writes down before it reduces them; and unlike a maximum, which loses a NaN there.

    Args:
        arrays: What to read together. One number alone is given as it is.
        factors: What ``scales`` or ``handed`` made.
        number: Which of them is this reading's.
    """
    if len(arrays) == 1 and single(arrays[0]):
        return jnp.reshape(arrays[0], ()).astype(wide())
    terms = [_term(x, factors, number) for x in arrays]
    return jnp.sum(functools.reduce(jnp.add, terms)).astype(wide())


def totals(rows: Any, factors: Any, number: int) -> Any:
    """Add up each row of a matrix, as ``total`` does."""
    return jnp.sum(_term(rows, factors, number), axis=1).astype(wide())


def _term(x: Any, factors: Any, number: int) -> Any:
    """Scale an array so that a sum of as many values as there can be stays finite."""
    zero, factor = _pair(factors, number, x.dtype)
    found = [part.astype(jnp.promote_types(part.dtype, jnp.float32)) for part in parts(x)]
    scaled = [(part + zero.astype(part.dtype)) * factor.astype(part.dtype) for part in found]
    return functools.reduce(jnp.add, scaled)


def single(aval: Any) -> bool:
    """Tell whether an array is one real number."""
    return aval.size == 1 and not jnp.issubdtype(aval.dtype, jnp.complexfloating)


def words(found: Any, xp: Any = jnp) -> Any:
    """Turn totals into words; Infs of both signs read as NaN."""
    inf = xp.where(found == math.inf, POSINF, xp.where(found == -math.inf, NEGINF, FINE))
    return xp.where(found != found, NAN, inf).astype(found.dtype)


def wide() -> Any:
    """Give the dtype that magnitudes are kept in."""
    return jnp.result_type(float)


def span(x: Any, extra: tuple[str, ...], factors: Any, number: int) -> Any:
    """Give the total, the smallest and the largest value, and further statistics.

    What is not finite may be missing from the two ends: the total tells.
    """
    low = functools.reduce(jnp.minimum, [jnp.min(part).astype(wide()) for part in parts(x)])
    high = functools.reduce(jnp.maximum, [jnp.max(part).astype(wide()) for part in parts(x)])
    return jnp.stack([total([x], factors, number), low, high, *_more(x, extra)])


def ends(x: Any, extra: tuple[str, ...] = ()) -> Any:
    """Give the word, the smallest and largest finite value, and further statistics."""
    lows, highs = [], []
    for part in parts(x):
        fine = jnp.isfinite(part)
        top = jnp.asarray(_finfo(part.dtype).max, part.dtype)
        lows.append(jnp.min(jnp.where(fine, part, top)).astype(wide()))
        highs.append(jnp.max(jnp.where(fine, part, -top)).astype(wide()))
    low, high = functools.reduce(jnp.minimum, lows), functools.reduce(jnp.maximum, highs)
    return jnp.stack([code(x).astype(wide()), low, high, *_more(x, extra)])


def _more(x: Any, extra: tuple[str, ...]) -> list[Any]:
    found = [EXTRA[name](x.astype(jnp.promote_types(x.dtype, jnp.float32))) for name in extra]
    return [jnp.real(item).astype(wide()) for item in found]


EXTRA: dict[str, Callable[[Any], Any]] = {
    "mean": jnp.mean,
    "norm": lambda x: jnp.sqrt(jnp.sum(jnp.abs(x) ** 2)),
    "rms": lambda x: jnp.sqrt(jnp.mean(jnp.abs(x) ** 2)),
}


def read(row: Any) -> tuple[float, float]:
    """Turn a word with two ends into the two ends of a reading.

    Where they are not known the first is the larger one, as the core has it.
    """
    word, low, high = round(float(row[0])), float(row[1]), float(row[2])
    known = low <= high
    if word == NAN:
        return math.nan, math.nan
    if word == NEGINF:
        return -math.inf, high if known else -math.inf
    if word == POSINF:
        return low if known else math.inf, math.inf
    return (low, high) if known else UNREAD


def on_host(x: Any) -> Any:
    """Bring an array to the host; what is spread over processes gives its own part."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(x.addressable_data(0))
    return np.asarray(x)


def device_name(x: Any) -> str:
    """Name the device, or how many an array is spread over."""
    devices = sorted(x.devices(), key=lambda d: d.id) if isinstance(x, jax.Array) else []
    if len(devices) > 1:
        return f"{len(devices)} x {devices[0].platform}"
    if not devices or devices[0].platform == "cpu":
        return "cpu"
    return f"{devices[0].platform}:{devices[0].id}"


def free_memory(x: Any) -> int:
    """Give the free bytes of an array's device, 0 where nobody knows."""
    device = min(x.devices(), key=lambda d: d.id)
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def measure(x: Any) -> Summary:
    """Summarise an array on the host."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        return Summary(tuple(x.shape), str(dtype), device_name(x), math.prod(x.shape))
    return dataclasses.replace(describe(on_host(x)), device=device_name(x))


def holds_nan(x: Any) -> bool:
    """Tell whether an array holds a NaN."""
    host = on_host(x)
    return bool((host != host).any())
