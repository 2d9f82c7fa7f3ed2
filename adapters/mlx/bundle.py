"""How the script of a bundle calls MLX: functions of arrays, and their gradients by ``mx.vjp``."""

import re
from typing import Any

import mlx.core as mx

from anynan._arrays.arguments import bound
from anynan._arrays.containers import leaves
from anynan._calls.calls import Call, Line, UnwritableError, Words, refuse
from anynan._calls.collector import Collector, Operands
from anynan._calls.dialect import Dialect
from anynan._calls.generators import take as take_generators
from anynan._calls.tensors import HostTensor
from anynan.arrays.bundle import SHOW
from anynan.mlx.functions import functions
from anynan.mlx.names import canonical
from anynan.mlx.reading import READER
from anynan.mlx.state import Root
from anynan.mlx.tape import Operation

_PLAIN = "np.asarray(x)"
_HEAD = f"""
import functools
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

loaded = load_file(Path(__file__).with_name("tensors.safetensors"))

{SHOW.replace(_PLAIN, "np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)")}

def slope(function, *given, incoming, of, **options):
    at = [i for i, x in enumerate(given) if isinstance(x, mx.array)]

    def run(*new):
        known = dict(zip(at, new))
        return function(*(known.get(i, x) for i, x in enumerate(given)), **options)

    return mx.vjp(run, [given[i] for i in at], [incoming])[1][of]
"""
_FUNCTIONS = {raw for _, _, raw in functions()}
_DTYPE = re.compile(r"b?float(16|32|64)|u?int(8|16|32|64)|complex64|bool_?")


def _function(name: str) -> str:
    plain = name.removesuffix(".vjp")
    if plain not in _FUNCTIONS:
        refuse(f"{name[:40]!r} is not run")
    return f"mx.{plain}" if plain == name else f"functools.partial(slope, mx.{plain})"


def _ready(dtype: str) -> str:
    if dtype == "bfloat16":
        return "mx.array(x).view(mx.bfloat16)"
    return f"mx.array(x{'.view(np.complex64)[..., 0]' if dtype == 'complex64' else ''}, mx.{dtype})"


DIALECT = Dialect("mlx", _HEAD, Words(_DTYPE, "mx.{}"), _function, _ready)


def host(x: Any) -> Any:
    """Bring an array to the host; what NumPy has not as its bits."""
    if x.dtype == mx.bfloat16:
        return HostTensor.of("bfloat16", READER.on_host(x.view(mx.uint16)))
    return READER.on_host(x)


def call_of(op: Operation, operands: Operands) -> Call:
    """Describe an operation.

    Raises:
        UnwritableError: If it is no function of MLX's of arrays and plain arguments.
    """
    forward: Any = op.of or op
    raw, (args, kwargs) = forward.function, forward.arguments
    function = raw if raw in _FUNCTIONS else canonical(raw)
    if function not in _FUNCTIONS:
        msg = f"{raw} is no function of mlx.core"
        raise UnwritableError(msg)
    named = {key: x for key, x in kwargs.items() if key != "stream"}
    arguments, keywords = operands.values(args, named, _is_array, _other)
    if op.of is None:
        return Call([Line("result", function, arguments, keywords)], "result")
    incoming = [x for label, x in op.given if label.startswith("grad")]
    whole = [id(x) for x in args if isinstance(x, mx.array)]
    at = next(i for i, x in enumerate(op.outputs) if not READER.is_finite(x))
    if len(incoming) != 1 or at >= len(whole) or len(whole) != len(op.outputs):
        msg = f"a gradient of {raw} with several results, or of some of its operands"
        raise UnwritableError(msg)
    grad = operands.value("grad", incoming[0], _is_array, _other)
    keywords |= {"incoming": grad, "of": at}
    return Call([Line("result", f"{function}.vjp", arguments, keywords)], "result")


def take_call(into: Collector, root: Root, names: tuple[str, ...]) -> None:
    """Take what a call was given, its weights, and the random states that it found."""
    take_generators(into, *root.drawn)
    into.add("random", "mlx", root.key, host)
    for name, value in bound(names, root.args, root.kwargs):
        for label, x in leaves(value, name):
            if isinstance(x, mx.array):
                into.add("call", label, x, host)
    for weight in root.weights:
        into.add("weights", weight.name, weight.array, host)


def _is_array(x: Any) -> bool:
    return isinstance(x, mx.array)


def _other(x: Any) -> Any:
    return {"dtype": str(x).rpartition(".")[2]} if isinstance(x, mx.Dtype) else None
