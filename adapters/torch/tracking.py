"""``track``: what it takes, and what it starts."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Unpack, overload

import torch

from anynan._steps.tracked import Tracked, make_way, refuse_target
from anynan.options import FOR_TRAINING, Options, TrackOptions
from anynan.torch.private import original
from anynan.torch.session.function import FunctionSession
from anynan.torch.session.model import ModelSession
from anynan.torch.session.session import session_of, tracked
from anynan.tracker import Tracker, begin

KNOWN = (*FOR_TRAINING, "read", "keep", "across_ranks")


@overload
def track(**options: Unpack[TrackOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(
    target: torch.nn.Module | Callable[..., Any], **options: Unpack[TrackOptions]
) -> Tracker: ...
@Options.shown
def track(target: Any = ..., **options: Unpack[TrackOptions]) -> Any:
    """Watch a model or a training step, forward and backward, until ``remove``.

    You go on calling a module as before; hooks read the root inputs, every layer's
    outputs, their gradients and the accumulated gradients of the weights. A function is
    replaced by the returned tracker: one call is one step, and its loss and its update are
    covered too. Without a target a decorator is returned.

    The forward part uses ``register_forward_hook``, the backward part a hook on the gradient of
    each output; reads come at ``register_optimizer_step_pre_hook``. The documentation's PyTorch
    page says what is watched when.

    Args:
        target: An ``nn.Module`` or a step function; leave it out to decorate.
        **options: See ``anynan.options.TrackOptions``.

    Returns:
        A Tracker, or a decorator that makes one.

    Raises:
        TypeError: If the target is neither a module nor a function, or an option is of the
            wrong type or unknown.
        ValueError: If the target is tracked already, is on the meta device, a pattern
            matches no layer, or an option has an impossible value.
        NonFiniteError: If a weight or buffer is bad already.

    Example:
        >>> import torch, anynan
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> with anynan.torch.track(model) as tracker:
        ...     _ = model(torch.ones(2, 4))
        >>> len(tracker.events)
        0
    """
    chosen = Options.checked(options, KNOWN, "PyTorch")
    if target is ...:
        return functools.partial(start, options=chosen)
    return start(target, chosen)


def start(target: Any, options: Options) -> Tracker:
    """Watch a target with options that were checked."""
    refuse_target(target, "model or function")
    if isinstance(target, torch.jit.ScriptModule):
        msg = (
            "track() cannot watch what torch.jit scripted or traced, which takes no hooks: track "
            "the module that it was made from, or the step function that calls it"
        )
        raise TypeError(msg)
    if isinstance(target, torch.nn.Module):
        return _track_model(target, options)
    if not callable(target):
        msg = f"track() takes an nn.Module or a step function, not {type(target).__name__}"
        raise TypeError(msg)
    tracker = Tracked(target, options, getattr(target, "__name__", type(target).__name__))
    return begin(tracker, FunctionSession(target, tracker))


def _session(model: torch.nn.Module, tracker: Tracked) -> ModelSession:
    """Make the session of a model; one of Keras names its layers and weights itself."""
    keras: Any = sys.modules.get("keras")
    if keras is not None and isinstance(model, getattr(keras, "Layer", ())):
        from anynan.keras.torch_backend import KerasSession

        return KerasSession(model, tracker)
    return ModelSession(model, tracker)


def _track_model(model: torch.nn.Module, options: Options) -> Tracker:
    inner = original(model)  # what a compiled module was compiled from
    same = [model] if inner is model else [model, inner]
    first = next((found for x in same if (found := session_of(x)) is not None), None)
    name = type(same[-1]).__name__
    if first is not None:
        make_way(first.tracker, name)
    tracker = Tracked(weakref.ref(model), options, name)
    session = _session(model, tracker)
    models = session.models
    # Of a model of Keras, PyTorch may know placeholders only, from before it was built.
    meta = [key for key, p in models.parameters() if p.is_meta]
    if meta:
        msg = (
            f"{meta[0]} is on the meta device and holds no values: materialise the model "
            "(to_empty and load its weights) before tracking it"
        )
        raise ValueError(msg)
    # Patterns that match nothing fail here, too.
    if not models.paths("", model) and models.whole(models.named("", model)):
        msg = f"exclude={options.exclude!r} leaves no layer of this {name} to watch"
        raise ValueError(msg)
    for x in same:
        tracked[x] = weakref.ref(session)
        tracker.aliases.append(weakref.ref(x))
    return begin(tracker, session)
