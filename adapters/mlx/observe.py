"""Run a model, a step or a function once, show each operation, and leave no trace."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from anynan._arrays.containers import leaves
from anynan._reach import Reach
from anynan._steps.tracked import untracked
from anynan._trace.op import Observed, Observer, Op
from anynan._trace.target import Target
from anynan.mlx.layers import Layers, code_of
from anynan.mlx.reading import READER
from anynan.mlx.seams import SEAMS
from anynan.mlx.second import Run
from anynan.mlx.state import Root
from anynan.options import Options


def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a target is MLX's: a model, or what is called with one or with arrays."""
    fn = untracked(target)
    if isinstance(fn, nn.Module):
        return True
    given = [*args, *kwargs.values()]
    found = any(isinstance(x, mx.array) for _, x in leaves(given, ""))
    return callable(fn) and (found or any(isinstance(x, nn.Module) for x in given))


class _Sight:
    """Tell a run of the layers, updates and writes that MLX tells of."""

    paused = False

    def __init__(self, layers: Layers, root: Root, run: Run) -> None:
        self.layers, self._run = layers, run
        self.about_to_write = root.keep

    def layer(self, run: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        path = self.layers.path(module)
        if path is None:
            return run(*args, **kwargs)
        return self._run.layer(run, module, path, args, kwargs)

    def update(self, run: Callable[..., Any], _: Any, gradients: Any, parameters: Any) -> Any:
        return self._run.update(run, gradients, parameters)

    def unread(self) -> list[Any]:
        return []

    def evaluated(self) -> None:
        """Nothing waits."""


def sight(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Layers, Root]:
    """Give the layers of a target, and what a call of it begins with."""
    fn: Any = untracked(target)
    layers = Layers(Options())
    reach = None if isinstance(fn, nn.Module) else Reach(code_of(fn), layers.kinds)
    if reach is None:
        layers.watch({"": fn})
    else:
        layers.search(reach, fn, {**{f"args[{i}]": x for i, x in enumerate(args)}, **kwargs})
    return layers, Root(fn, args, dict(kwargs), layers, reach)


def observe(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer
) -> Observed:
    """Run a target of MLX's once, and show each operation.

    Args:
        target: A model, a training step, or any function.
        args: What it is called with.
        kwargs: By name.
        observer: Sees each operation, right after it ran and was computed.

    Raises:
        ReplayError: If it takes from an iterator or a queue, which cannot be put back.

    Example:
        >>> import mlx.core as mx
        >>> from anynan.mlx.observe import observe
        >>> seen = []
        >>> found = observe(
        ...     lambda x: mx.log(x).sum(), (mx.ones(3),), {}, lambda op: seen.append(op.name)
        ... )
        >>> seen, found.value.item()
        (['log', 'sum'], 0.0)
    """
    observed, broken = Observed(), list[BaseException]()
    layers, root = sight(target, args, kwargs)

    def show(op: Op) -> Any:
        try:
            return observer(op)
        except BaseException as error:
            broken.append(error)
            raise

    run = Run(layers, root, show)
    with SEAMS.alone(_Sight(layers, root, run)), root.again(observed.notes.append):
        try:
            run.run()
        except Exception as error:
            if error in broken:
                raise
            observed.error = error
    observed.value = run.value
    observed.notes += dict.fromkeys(run.tape.notes)
    return observed


class MlxTarget(Target):
    """Reach the numbers of MLX's arrays."""

    takes, shows = staticmethod(takes), staticmethod(observe)

    def is_array(self, x: Any) -> bool:
        """Tell whether something is an array."""
        return isinstance(x, mx.array)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """Bring an array to the host; a bfloat16 in float32."""
        return READER.on_host(x)

    def like(self, numbers: np.ndarray[Any, Any], x: Any) -> Any:
        """Make an array of the same dtype."""
        return mx.array(np.ascontiguousarray(numbers)).astype(x.dtype)
