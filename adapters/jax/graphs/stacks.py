"""Read JAX's name stacks: layer path, and whether it is a gradient's operation."""

import re
from dataclasses import dataclass
from functools import lru_cache

_WRAP = re.compile(r"^(?P<name>[A-Za-z_]+)\((?P<inner>.*)\)$")
_TRANSFORMS = frozenset(
    {"jvp", "transpose", "vmap", "pmap", "jit", "pjit", "shard_map", "linearize", "custom_jvp",
     "custom_vjp", "cond", "while", "scan", "xmap"}
)  # fmt: skip
# What a scope is called that stands for an expectation.
MARK = "anynan_expected_"
# What a scope is called that holds a repaired operation: no expectation has its number.
FIXED = f"{MARK}{2**31}"
# What a scope's name begins with that gives a whole layer path: inside a model that has such
# scopes no other scope is a layer.
LAYER = "anynan_layer:"
_OURS = "rematted_computation"
_NO_LAYER = frozenset({_OURS, "checkpoint", "remat", "remat2", "~", "outer-loop", "inner-loop"})
# What equinox calls the loops it is made of.
_SCAFFOLD = "checkpointed-"


@dataclass(frozen=True, slots=True)
class Place:
    """Say where an operation stands.

    Attributes:
        names: The scopes around it, outermost first.
        backward: True under a transposition.
        differentiated: True inside any differentiation.
        marks: Numbers of the expectations it is made under.
        nested: How it was differentiated, where a gradient was differentiated again.
    """

    names: tuple[str, ...]
    backward: bool
    differentiated: bool
    marks: tuple[int, ...] = ()
    nested: str = ""


@lru_cache(maxsize=16384)
def place(stack: str) -> Place:
    """Parse a name stack such as ``transpose(jvp(Net))/block_1/up``."""
    names: list[str] = []
    backward = differentiated = False
    nested = ""
    for part in split(stack):
        inner, around = part, ""
        while (found := _WRAP.match(inner)) and found["name"] in _TRANSFORMS:
            backward = backward or found["name"] == "transpose"
            around += found["name"][0] if found["name"] in ("jvp", "transpose") else ""
            inner = found["inner"]
        differentiated = differentiated or bool(around)
        # What a gradient keeps for itself on the way is under no transposition.
        nested += around if "t" in around and around.count("j") > 1 else ""
        if inner == _OURS:  # run a second time, in the order of the forward pass
            backward = False
        names += [name for name in split(inner) if name not in _NO_LAYER and _is_name(name)]
    # Inside a layer that has a path the class name that equinox writes says nothing more.
    names = [name for i, name in enumerate(names) if not i or not name.startswith("eqx.nn.")]
    marks = tuple(int(name.removeprefix(MARK)) for name in names if name.startswith(MARK))
    names = [name for name in names if not name.startswith(MARK)]
    given = [name for name in names if name.startswith(LAYER)]
    if given:
        path = given[-1].removeprefix(LAYER)
        names = [LAYER, *(path.split(".") if path else ())]
    return Place(tuple(names), backward, differentiated, marks, nested)


def _is_name(part: str) -> bool:
    """Tell a layer's name from the formula that einsum leaves."""
    return bool(part) and "->" not in part and "," not in part and not part.startswith(_SCAFFOLD)


def split(stack: str) -> list[str]:
    """Split at the slashes outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(stack):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth == 0:
            parts.append(stack[start:i])
            start = i + 1
    parts.append(stack[start:])
    return parts
