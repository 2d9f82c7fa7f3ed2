"""How the script of a bundle calls PyTorch."""

import re

from anynan._calls.calls import Words, refuse
from anynan._calls.dialect import Dialect

_HEAD = """
from pathlib import Path

import torch
from safetensors.torch import load_file

device = DEVICE if hasattr(torch, DEVICE) and getattr(torch, DEVICE).is_available() else "cpu"
path = Path(__file__).with_name("tensors.safetensors")
loaded = {name: x.to(device) for name, x in load_file(path).items()}


def show(when, name, x):
    values = x.detach().cpu()
    if not values.is_complex():
        values = values.double()
    nan, inf = values.isnan(), values.isinf()
    below = values == -float("inf")
    counts = f"{nan.sum()} NaN, {(inf & ~below).sum()} Inf, {below.sum()} -Inf"
    bad = (nan if nan.any() else inf).nonzero()
    first = f", first at {bad[0].tolist()}" if len(bad) else ""
    print(f"{when:6} {name}: {tuple(x.shape)} {x.dtype}: {counts}{first}")
"""
_FUNCTION = re.compile(r"aten(\.[A-Za-z_][A-Za-z0-9_]*){2}")
# They read or write files.
_REFUSED = ("from_file", "save", "load")
_DTYPE = re.compile(r"(b?float|u?int|complex)\d+(_e\dm\d(fn)?(u?z)?u?)?|bool")
_NAMES = {
    **{
        f"torch.{name}": f"torch.{name}"
        for name in (
            "strided", "sparse_coo", "contiguous_format", "preserve_format", "channels_last",
            "channels_last_3d",
        )
    },
    "device": "device",
}  # fmt: skip


def _function(name: str) -> str:
    if not _FUNCTION.fullmatch(name) or any(word in name for word in _REFUSED):
        refuse(f"{name[:40]!r} is not run")
    return f"torch.ops.{name}"


def _ready(dtype: str) -> str | None:
    return "torch.view_as_complex(x)" if dtype.startswith("complex") else None


def _gradient(result: str, of: list[str], incoming: list[str | None]) -> list[str]:
    places = [i for i, name in enumerate(incoming) if name is not None]
    outs = ", ".join(f"made[{i}]" for i in places)
    grads = ", ".join(f"tensors[{incoming[i]!r}]" for i in places)
    inputs = ", ".join(f"tensors[{name!r}]" for name in of)
    return [
        f"made = {result} if isinstance({result}, (tuple, list)) else [{result}]",
        "found = torch.autograd.grad(",
        f"    [{outs}], [{inputs}], [{grads}], allow_unused=True",
        ")",
        f"for name, x in zip({of!r}, found):",
        "    if x is not None:",
        '        show("after", f"gradient-of-{name}", x)',
    ]


_WORDS = Words(_DTYPE, "torch.{}", _NAMES)
DIALECT = Dialect("torch", _HEAD, _WORDS, _function, _ready, bits=False, gradient=_gradient)
