"""What a function of PyTorch's is to the notes: it computes, writes, draws, reads, or nothing."""

from typing import Any

from anynan.torch.private import sets_data

SKIP, PLAIN, PICKS, WRITES, DRAWN, PASS, READ, GRAD, ASKED = range(9)
_GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
# Drawn anew they are others; the rest gives what is no operation's.
_DRAWS = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "random",
        "normal", "log_normal", "bernoulli", "binomial", "multinomial", "poisson", "uniform",
        "exponential", "cauchy", "geometric", "gumbel_softmax", "rrelu",
    }
)  # fmt: skip
# What these are made from may be another by then.
_TAKEN = frozenset({"as_tensor", "asarray"})
_NEVER = frozenset(
    {
        "requires_grad_", "detach_", "set_", "resize_", "share_memory_", "pin_memory", "apply_",
        "map_", "__deepcopy__", "as_subclass", "retain_grad", "register_hook", "__setstate__",
        "empty", "empty_like", "new_empty", "empty_strided",
    }
)  # fmt: skip
_WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__",
                      "__itruediv__", "__ipow__", "__imod__", "__ifloordiv__"})  # fmt: skip

_READS = frozenset(
    {"item", "__float__", "__bool__", "__repr__", "__format__", "tolist", "numpy", "__array__"}
)

# NaN ends in these: what they give is a place, or an order.
_PICKS = frozenset({"argmax", "argmin", "argsort", "max", "min", "sort", "topk"})

# What was asked for before; of so many functions.
KINDS: dict[Any, int] = {}
_MOST = 4096


def kind_of(func: Any) -> int:
    """Tell what a function is to the notes."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        own = getattr(getattr(func, "__self__", None), "__name__", "")
        found = ASKED if own == "grad" else PLAIN if own in _GETTERS else SKIP
    elif name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad":
        found = GRAD
    elif func == sets_data:
        found = WRITES
    elif name in ("backward", "grad") and getattr(func, "__module__", "").startswith("torch"):
        found = PASS
    elif name in _READS:
        found = READ
    elif name in _TAKEN or name.rstrip("_") in _DRAWS:
        found = DRAWN
    elif name in _NEVER or name == "__set__":
        found = SKIP
    elif name in _WRITERS or (name.endswith("_") and not name.endswith("__")):
        found = WRITES
    else:
        found = PICKS if name in _PICKS else PLAIN
    if len(KINDS) < _MOST:
        KINDS[func] = found
    return found
