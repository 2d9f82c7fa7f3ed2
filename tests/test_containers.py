"""Every array in a nested container is found once and named so that one can find it again."""

from collections import ChainMap, OrderedDict, deque
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from anynan._arrays.containers import leaves

X, Y = np.zeros(1), np.ones(2)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Plain:
    image: Any
    skipped: Any = None
    limit: ClassVar[float] = 1.5
    seed: InitVar[float] = 2.5
    unset: Any = field(init=False)


@dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = field(init=False)


@dataclass
class Output(OrderedDict[str, Any]):
    """A mapping and a dataclass at once, as model outputs are."""

    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (X, ["batch"]),
        (1.5, ["batch"]),
        ([X, [Y, [X]]], ["batch[0]", "batch[1][0]", "batch[1][1][0]"]),
        ({"image": (X, Y), 3: X}, ["batch['image'][0]", "batch['image'][1]", "batch[3]"]),
        (Point(X, {"k": Y}), ["batch.x", "batch.y['k']"]),
        (Plain([X]), ["batch.image[0]"]),
        (Slotted(X), ["batch.a"]),
        (Output(X), ["batch['logits']"]),
        (MappingProxyType({"a": X}), ["batch['a']"]),
        (ChainMap({"a": X}, {"b": Y}), ["batch['b']", "batch['a']"]),
        (deque([X, Y]), ["batch[0]", "batch[1]"]),
        ([1, True, None, "nan", b"nan", range(10**12), int, object(), 0.5], ["batch[8]"]),
        ([1j], ["batch[0]"]),
        (None, []),
    ],
)
def test_paths(value: Any, paths: list[str]) -> None:
    assert [path for path, _ in leaves(value, "batch")] == paths


LOOP: list[Any] = [X]
LOOP.append(LOOP)


def test_what_is_shared_or_holds_itself_is_opened_once() -> None:
    mapping: dict[str, Any] = {"a": [LOOP]}
    mapping["self"] = mapping
    for _ in range(100):
        mapping = {"one": mapping, "two": mapping}
    ((path, _),) = leaves(mapping, "x")
    assert path.endswith("['a'][0][0]")


def test_what_is_walked_flat_is_in_the_order_of_a_frameworks_inputs() -> None:
    inner = {"z": X, "a": Y}
    value = {"second": [inner, inner], "first": Plain(X), "loop": LOOP}
    shared = [f"x['second'][{i}]['{key}']" for i in (0, 1) for key in ("a", "z")]
    assert [path for path, _ in leaves(value, "x", flat=True)] == ["x['loop'][0]", *shared]


def test_a_framework_opens_what_only_it_can() -> None:
    def parts(x: Any) -> Any:
        return [(".values", X), (".rows", [Y])] if isinstance(x, Point) else None

    paths = [path for path, _ in leaves([Point(X, Y), X], "x", parts=parts)]
    assert paths == ["x[0].values", "x[0].rows[0]", "x[1]"]


def test_depth_has_no_limit() -> None:
    nested: Any = X
    for _ in range(3_000):
        nested = [nested]
    ((path, leaf),) = leaves(nested[0], "x")
    assert leaf is X
    assert path.count("[0]") == 2_999
    while isinstance(nested, list):  # Freeing it at once would recurse.
        nested = nested.pop()
