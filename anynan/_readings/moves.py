"""How far an update moves the weights: which steps are looked at, and a sample of each weight."""

import math
from collections.abc import Iterable, Sequence

from anynan._readings.step import Step

# Elements of a weight that are kept, evenly spread; of a larger one a norm is what these suggest.
SAMPLE = 1 << 16


def due(every: int | None, step: int) -> bool:
    """Tell whether a step's update is looked at: one in so many, none without a number."""
    return every is not None and step % every == 0


def stride(shape: Sequence[int]) -> int:
    """Give the distance of the elements of a sample, in the order in which they lie."""
    found = -(-math.prod(shape) // SAMPLE) or 1
    # Along a row and across them: columns differ.
    while found > 1 and math.gcd(found, shape[-1]) > 1:
        found += 1
    return found


def moved(
    rows: Step, weights: Iterable[tuple[str, Sequence[int]]], norms: Iterable[Sequence[float]]
) -> None:
    """Write how far weights have moved, if all of it is finite.

    Args:
        rows: Of the step.
        weights: The path of the layer of each, and its shape.
        norms: Of the sample's update and of the sample before it, for each.
    """
    found = []
    for (layer, shape), (update, size) in zip(weights, norms, strict=True):
        whole = math.prod(shape)
        share = math.sqrt(whole / max(-(-whole // stride(shape)), 1))
        found.append((layer, update * share, size * share))
    if all(math.isfinite(update) and math.isfinite(size) for _, update, size in found):
        for layer, update, size in found:
            rows.moved(layer, update, size)
