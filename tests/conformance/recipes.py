"""Faults and must-stay-silent cases, written once and run on every backend."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from anynan import Policy
from anynan._readings.policy import DEFAULT
from anynan.events import Kind, Severity
from tests.backends import Space

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Recipe:
    """Build a value and say what must be reported of it.

    Attributes:
        kind: What is wrong with it, None where nothing may be said.
        first_bad: Index of the first NaN or Inf.
        dtype: Dtype the backend must have.
        tensor: Path of the array at fault.
        severity: ``bad`` raises, ``suspect`` warns.
        count: Number of elements of that kind.
    """

    name: str
    build: Callable[[Space], Any]
    kind: Kind | None = None
    first_bad: tuple[int, ...] | None = None
    dtype: str = "float32"
    tensor: str = "x"
    severity: Severity = "bad"
    count: int = 1
    policy: Policy = field(default=DEFAULT)


class Pair(NamedTuple):
    image: Any
    mask: Any


@dataclass
class Output:
    logits: Any
    hidden: Any = None


def _spoiled(size: int, at: int, value: float) -> np.ndarray[Any, Any]:
    values = np.linspace(-1, 1, size, dtype=np.float32)
    values[at] = value
    return values


FAULTS = (
    Recipe("nan", lambda s: s.array([[1, 2], [NAN, 4]]), "nan", (1, 0)),
    Recipe("posinf", lambda s: s.array([1, INF, 3]), "posinf", (1,)),
    Recipe("neginf", lambda s: s.array([1, 2, -INF]), "neginf", (2,)),
    Recipe("nan_before_inf", lambda s: s.array([INF, NAN, -INF]), "nan", (0,)),
    Recipe("all_nan", lambda s: s.array([NAN] * 5), "nan", (0,), count=5),
    Recipe("scalar", lambda s: s.array(NAN), "nan", ()),
    Recipe("negative_nan", lambda s: s.array(np.array([1, -np.nan])), "nan", (1,)),
    Recipe(
        "last_of_many", lambda s: s.array(_spoiled(700_001, 700_000, NAN)), "nan", (700_000,)
    ),
    Recipe("first_of_many", lambda s: s.array(_spoiled(700_001, 0, -INF)), "neginf", (0,)),
    Recipe(
        "wide_rows", lambda s: s.array(_spoiled(600_000, 599_999, INF).reshape(2, 300_000)),
        "posinf", (1, 299_999),
    ),
    Recipe("double", lambda s: s.array([1e308, NAN], "float64"), "nan", (1,), "float64"),
    Recipe("half", lambda s: s.array([65504, INF], "float16"), "posinf", (1,), "float16"),
    Recipe("brain", lambda s: s.array([1, NAN], "bfloat16"), "nan", (1,), "bfloat16"),
    Recipe(
        "complex_real_part", lambda s: s.array([1j, complex(NAN, 1)], "complex64"),
        "nan", (1,), "complex64",
    ),
    Recipe(
        "complex_imaginary_infinity", lambda s: s.array([1j, complex(1, -INF)], "complex64"),
        "posinf", (1,), "complex64",
    ),
    Recipe(
        "in_mapping",
        lambda s: {"image": [s.array([1]), s.array([NAN])], "label": s.array([INF])},
        "nan", (0,), tensor="x['image'][1]",
    ),
    Recipe(
        "in_namedtuple", lambda s: (s.array([1]), Pair(s.array([1]), s.array([-INF]))),
        "neginf", (0,), tensor="x[1].mask",
    ),
    Recipe(
        "in_dataclass", lambda s: Output(s.array([1]), OrderedDict(last=s.array([INF]))),
        "posinf", (0,), tensor="x.hidden['last']",
    ),
    Recipe("python_float", lambda s: {"loss": NAN}, "nan", (), tensor="x['loss']"),
    Recipe(
        "large_is_suspect", lambda s: s.array([1, -2e4]),
        "large", severity="suspect", count=0, policy=Policy(large=1e4),
    ),
    Recipe(
        "headroom_of_half", lambda s: s.array([1, 60000], "float16"),
        "large", None, "float16", severity="suspect", count=0, policy=Policy(headroom=1),
    ),
)  # fmt: skip

SILENT = (
    Recipe("finite", lambda s: s.array([[1, -2], [3, 0]])),
    Recipe("negative_zero", lambda s: s.array([-0.0])),
    Recipe("largest_finite", lambda s: s.array([3.4028234e38, -3.4028234e38])),
    Recipe("subnormal", lambda s: s.array([1e-45])),
    Recipe("scalar", lambda s: s.array(1.5)),
    Recipe("integers", lambda s: s.array([-(2**31), 2**31 - 1], "int32"), dtype="int32"),
    Recipe("booleans", lambda s: s.array([True, False], "bool"), dtype="bool"),
    Recipe("empty_matrix", lambda s: s.array(np.zeros((0, 3)))),
    Recipe("complex", lambda s: s.array([1 + 2j], "complex64"), dtype="complex64"),
    Recipe("many", lambda s: s.array(_spoiled(700_001, 5, 7.0))),
    Recipe("no_arrays", lambda s: {"a": None, "b": "text", "c": [1, True, b""], "d": [{}, ()]}),
    Recipe("python_numbers", lambda s: [1.5, 2j, 10**400]),
)  # fmt: skip
