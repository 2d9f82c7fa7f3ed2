"""Run one operation again in a wider dtype, to see whether its result would fit."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from anynan.jax.graphs.versions import rebind, wide_numbers
from anynan.jax.read.probes import checkable, on_host


def widened(eqn: Any, operands: list[Any]) -> float | None:
    """Give the largest magnitude in the wider dtype, None if it is not finite there either."""
    floats = [x for x in operands if checkable(np.asarray(x) if not hasattr(x, "dtype") else x)]
    out = eqn.outvars[0].aval.dtype
    narrow = out in (jnp.float16, jnp.bfloat16) or jnp.dtype(out).itemsize == 1
    target = jnp.float32 if narrow else jnp.float64
    if not floats or jnp.issubdtype(out, jnp.complexfloating):
        return None
    changed: dict[str, Any] = {}
    for name in ("preferred_element_type", "new_dtype"):
        given = eqn.params.get(name)
        if given is not None and jnp.issubdtype(given, jnp.floating):
            changed[name] = np.dtype(target)
    try:
        with wide_numbers():
            wide = [
                jnp.asarray(on_host(x)).astype(target) if _is_float(x) else jnp.asarray(x)
                for x in operands
            ]
            found = on_host(rebind(eqn, wide, **changed)[0])
    except Exception:  # noqa: BLE001  no wider form: nothing is said
        return None
    if not found.size or not np.isfinite(found).all():
        return None
    largest = float(np.abs(found).max())
    return largest if largest and math.isfinite(largest) else None


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))
