"""``track``: what it takes, and what it starts."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Unpack, overload

from mlx import nn

from anynan._steps.tracked import Tracked, make_way, refuse_target
from anynan.mlx.seams import SEAMS
from anynan.mlx.session import Session
from anynan.options import FOR_TRAINING, Options, TrackOptions
from anynan.tracker import Tracker, begin


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: nn.Module | Callable[..., Any], **options: Unpack[TrackOptions]) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a model or a training step, forward and backward, until ``remove``.

    You go on calling a module as before. A function is replaced by the returned tracker: one
    call is one step, and its loss, its gradients and its update are covered too. Without a target
    a decorator is returned.

    The layers' ``__call__``, ``Optimizer.apply_gradients`` and ``mx.eval`` are changed while
    anything is tracked. What is read stays as lazy as the program: two numbers for each value,
    computed with what the program evaluates next.

    Args:
        target: An ``nn.Module`` or a function, compiled with ``mx.compile`` or not; leave it out
            to decorate.
        **options: See ``anynan.options.TrackOptions``; of ``stats`` there are ``"absmax"``,
            ``"min"`` and ``"max"``, and ``level="operation"`` runs every step a second time.

    Returns:
        A Tracker, or a decorator that makes one.

    Raises:
        TypeError: If the target is neither a module nor a function, or an option is of the wrong
            type or unknown.
        ValueError: If the target is tracked already, a pattern matches no layer, or an option has
            an impossible value, or is not there for MLX yet.
        NonFiniteError: If a weight is bad already.

    Example:
        >>> import mlx.core as mx, anynan
        >>> from mlx import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> with anynan.mlx.track(model) as tracker:
        ...     mx.eval(model(mx.ones((2, 4))))
        >>> len(tracker.events)
        0
    """
    chosen = Options.checked(options, FOR_TRAINING, "MLX")
    if chosen.extra:
        msg = f"Advanced(stats={chosen.stats!r}): for MLX there are only absmax, min and max so far"
        raise ValueError(msg)
    if target is ...:
        return functools.partial(start, options=chosen)
    return start(target, chosen)


def start(target: Any, options: Options) -> Tracker:
    """Watch a target with options that were checked."""
    refuse_target(target, "model or function", "mlx")
    if isinstance(target, nn.Module):
        return _track_model(target, options)
    if not callable(target):
        msg = f"track() takes an nn.Module or a step function, not {type(target).__name__}"
        raise TypeError(msg)
    tracker = Tracked(target, options, getattr(target, "__name__", type(target).__name__))
    return begin(tracker, Session(tracker))


def _track_model(model: Any, options: Options) -> Tracker:
    first = next((s for s in SEAMS.sessions if s.tracker.fn is model), None)
    name = type(model).__name__
    if first is not None:
        make_way(first.tracker, name)
    if not callable(model):
        msg = f"this {name} has no __call__, so it never runs as a whole: track the step function"
        raise TypeError(msg)
    tracker = Tracked(weakref.ref(model), options, name)
    return begin(tracker, Session(tracker, model))
