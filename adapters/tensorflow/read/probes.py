"""Reduce a tensor to numbers that say whether it is finite, and measure it on the host."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._arrays.measures import describe
from anynan._base.summary import Summary

# What watching adds to a graph is in this name scope.
SCOPE = "anynan"
# Times this, no sum of finite numbers overflows, and NaN and Inf stay what they are.
SMALL = 2.0**-70
_WIDE = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")


def checkable(x: Any) -> bool:
    """Tell whether a value is a tensor that could hold a NaN or an Inf."""
    if not isinstance(x, tf.Tensor) or not isinstance(getattr(x, "dtype", None), tf.DType):
        return False
    return is_float(x)


def is_float(x: Any) -> bool:
    """Tell whether a graph's tensor, or a variable, could be bad."""
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def dtype(x: Any) -> tuple[str, float]:
    """Give the short name of a float or complex dtype, and its largest finite value."""
    return x.dtype.name, float((x.dtype.real_dtype if x.dtype.is_complex else x.dtype).max)


def wide(x: Any) -> Any:
    """Cast what is shorter than float32 to it: sums of it overflow, and few kernels take 8 bits."""
    return tf.cast(x, tf.float32) if x.dtype.name in _WIDE else x


def fine(x: Any) -> Any:
    """Tell, as a tensor, whether everything in a tensor is finite."""
    if x.dtype.is_complex:
        return tf.logical_and(fine(tf.math.real(x)), fine(tf.math.imag(x)))
    return tf.math.is_finite(tf.reduce_sum(wide(x) * SMALL))


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """Bring a tensor to the host."""
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x)


def device_name(x: Any) -> str:
    """Name the device: ``cpu``, ``gpu:0``."""
    device = getattr(x, "device", None)
    if not isinstance(device, str) or not device:
        return "cpu"
    kind, _, number = device.rpartition("device:")[2].lower().partition(":")
    return "cpu" if kind == "cpu" else f"{kind}:{number}"


def measure(x: Any) -> Summary:
    """Summarise a tensor on the host."""
    return dataclasses.replace(describe(on_host(x)), device=device_name(x))


def is_bad(x: Any) -> bool:
    """Tell whether a host array holds a NaN or an Inf."""
    return bool(x.size) and not bool(np.isfinite(_plain(x)).all())


def kind(x: Any) -> Any:
    """Name the worst that a host array holds, None if all of it is finite."""
    x = _plain(x)
    if np.isnan(x).any():
        return "nan"
    if np.iscomplexobj(x):
        return "posinf" if np.isinf(x).any() else None
    return "posinf" if (x == np.inf).any() else "neginf" if (x == -np.inf).any() else None


def _plain(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        x = np.asarray(x)
    # bfloat16 and smaller are no floats to NumPy.
    return x if np.issubdtype(x.dtype, np.inexact) else x.astype(np.float32)
