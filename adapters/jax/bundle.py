"""How the script of a bundle calls JAX: a primitive's ``bind``, with the equation's arguments."""

import re

import jax

from anynan._calls.calls import Words, refuse
from anynan._calls.dialect import Dialect, of_numpy
from anynan.arrays.bundle import SHOW
from anynan.jax.replay.saving import PLACES

_HEAD = f"""
from pathlib import Path

import jax
import jax.extend.core.primitives
import numpy as np
from safetensors.numpy import load_file

loaded = load_file(Path(__file__).with_name("tensors.safetensors"))
wide = [x.dtype.name in ("float64", "int64", "uint64") for name, x in loaded.items()
        if name.startswith("operation.")]
jax.config.update("jax_enable_x64", any(wide))

{SHOW}
"""
_FUNCTION = re.compile(r"(lax|linalg|primitives)\.[a-z0-9_]+_p")
_DTYPE = re.compile(r"(b?float|u?int|complex)\d+(_e\dm\d(fn|b11fnuz|fnuz)?)?|bool")
# They call Python or other code, or talk to a device.
_REFUSED = ("callback", "feed", "ffi", "custom", "call", "jit", "while", "cond", "scan")
_ENUMS = ("GatherScatterMode", "Precision", "RandomAlgorithm", "RoundingMethod")
_OBJECTS = ("GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers")
_NAMES = {
    f"{name}.{item.name}": f"jax.lax.{name}.{item.name}"
    for name in _ENUMS
    for item in getattr(jax.lax, name, ())
}


def _function(name: str) -> str:
    if not _FUNCTION.fullmatch(name) or any(word in name for word in _REFUSED):
        refuse(f"{name[:40]!r} is not run")
    place, _, primitive = name.partition(".")
    return f"{PLACES[place][1]}.{primitive}.bind"


DIALECT = Dialect(
    "jax",
    _HEAD,
    Words(_DTYPE, "jax.numpy.dtype({!r})", _NAMES, {name: f"jax.lax.{name}" for name in _OBJECTS}),
    _function,
    of_numpy("jax.numpy.dtype({})"),
)
