"""The demo of array code, on a GPU: ``anynan demo --framework cupy``."""

import cupy

from anynan._cli.demo import BUGS, train
from anynan.cupy.tracking import track

__all__ = ["BUGS", "main"]

if not cupy.cuda.is_available():
    msg = "CuPy finds no CUDA device: anynan demo --framework numpy runs the same without one"
    raise ImportError(msg)


def main(
    bug: str = "softmax", *, fixed: bool = False, steps: int | None = None, seed: int = 0
) -> int:
    """Run the demo with CuPy."""
    return train(cupy, track, bug, fixed=fixed, steps=steps, seed=seed)
