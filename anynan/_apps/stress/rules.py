"""Inputs by rule: what programs meet one day, and gradients do not lead to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from anynan._apps.stress.inputs import Array, Input

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Trial:
    """Hold inputs to try.

    Attributes:
        words: What was done to the example.
        arrays: Every input.
        shaped: Whether shapes, labels or masks are others than before: no range speaks of that.
    """

    words: str
    arrays: tuple[Array, ...]
    shaped: bool = False

    @property
    def odd(self) -> set[str]:
        """Say what some operations do not check.

        It is ``shaped``, arrays that are ``empty``, and labels that are ``ignored``.
        """
        odd = {"shaped"} if self.shaped else set()
        odd |= {"empty"} if not all(x.size for x in self.arrays) else set()
        whole = (x for x in self.arrays if x.dtype.kind == "i")
        return odd | ({"ignored"} if any((x == IGNORED).any() for x in whole) else set())


def trials(inputs: Sequence[Input]) -> Iterator[Trial]:
    """Give every input that a rule makes of the example, those that change least first."""
    example = tuple(item.example for item in inputs)
    for i, item in enumerate(inputs):
        for words, x, shaped in _of_one(item):
            if x.shape != item.example.shape or not np.array_equal(x, item.example):
                yield Trial(f"{item.name}: {words}", (*example[:i], x, *example[i + 1 :]), shaped)
    yield from _of_pairs(inputs, example)
    yield from _of_all(example)
    for i, item in enumerate(inputs):
        for words, x in _beyond(item):
            yield Trial(f"{item.name}: {words}", (*example[:i], x, *example[i + 1 :]))


def _of_one(item: Input) -> Iterator[tuple[str, Array, bool]]:
    """Change one input alone, and keep its shape."""
    x = item.example
    if not x.size or not x.ndim:
        return
    if x.dtype == bool:
        yield "nothing is left of the first row of the mask", _row(x, False), True
        yield "the mask is False throughout", np.zeros_like(x), True
        yield "the mask is True throughout", np.ones_like(x), True
        return
    if not item.fractions:
        if x.dtype.kind == "i" and x.min() >= 0:  # signs are no labels
            yield "all labels are ignored", np.full_like(x, IGNORED), True
        for value in dict.fromkeys((int(x.min()), int(x.max()))):
            yield f"all are {value}", np.full_like(x, value), False
        return
    yield "a row of zeros", _row(x, 0), False
    yield "a row of ones", _row(x, 1), False
    yield "a row of equal numbers", _row(x, x.reshape(len(x), -1).mean(axis=-1)[0]), False
    if len(x) > 1:
        yield "two rows alike", _row(x, x[1]), False
        yield "all rows alike", np.broadcast_to(x[0], x.shape).copy(), False
    yield "zeros", np.zeros_like(x), False
    yield "ones", np.ones_like(x), False
    yield "all equal", np.full_like(x, x.mean()), False
    yield "a row at the low end of the range", _row(x, _shaped(item.low, x)), False
    yield "a row at the high end of the range", _row(x, _shaped(item.high, x)), False
    yield "at the low end of the range", np.broadcast_to(item.low, x.shape).astype(x.dtype), False
    yield "at the high end of the range", np.broadcast_to(item.high, x.shape).astype(x.dtype), False


def _of_pairs(inputs: Sequence[Input], example: tuple[Array, ...]) -> Iterator[Trial]:
    """Make two inputs of one shape equal."""
    for i, one in enumerate(inputs):
        for j, other in enumerate(inputs[:i]):
            x, y = one.example, other.example
            if one.fractions and other.fractions and x.shape == y.shape and x.size:
                arrays = (*example[:i], y.astype(x.dtype), *example[i + 1 :])
                yield Trial(f"{one.name}: the same as {inputs[j].name}", arrays)


def _of_all(example: tuple[Array, ...]) -> Iterator[Trial]:
    """Change what inputs have in common: the batch, and the length."""
    sizes = [x.shape[0] for x in example if x.ndim]
    if not sizes:
        return
    batch = max(set(sizes), key=sizes.count)

    def cut(axis: int, size: int, change: Callable[[Array], Array]) -> tuple[Array, ...]:
        return tuple(change(x) if x.ndim > axis and x.shape[axis] == size else x for x in example)

    if batch > 1:
        yield Trial("one row only", cut(0, batch, lambda x: x[:1]), shaped=True)
        yield Trial("two rows only", cut(0, batch, lambda x: x[:2]), shaped=True)
    yield Trial("an empty batch", cut(0, batch, lambda x: x[:0]), shaped=True)
    lengths = [x.shape[1] for x in example if x.ndim > 1]
    if lengths and max(lengths) > 1:
        length = max(set(lengths), key=lengths.count)
        yield Trial("length one", cut(1, length, lambda x: x[:, :1]), shaped=True)


def _beyond(item: Input) -> Iterator[tuple[str, Array]]:
    """Go far outside of the range."""
    if not item.fractions or item.given or not item.example.size:
        return
    x, top = item.example, float(np.finfo(item.example.dtype).max)
    middle = x.astype(np.float64).mean()
    for times in (1e2, 1e4, 1e8):
        far = middle + (x - middle) * times
        yield f"{times:g} times as far apart", np.clip(far, -top, top).astype(x.dtype)


def spoilt(x: Array) -> Iterator[tuple[str, Array]]:
    """Spoil a number of the first sample."""
    for words, value in (("a NaN", np.nan), ("an Inf", np.inf)):
        bad = x.copy()
        bad[:1].reshape(-1)[:1] = value
        yield f"{words} in the first row spoils other rows", bad


def _row(x: Array, value: object) -> Array:
    x = x.copy()
    x[0] = value
    return x


def _shaped(end: Array, x: Array) -> Array:
    return np.broadcast_to(end, x.shape[1:])
