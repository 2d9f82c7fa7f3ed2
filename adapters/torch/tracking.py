"""``track`` and ``untrack``: the public doors."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch

from anynan._steps.tracker import Tracker, make_way, refuse_target, tracker_of
from anynan.options import Options, Training
from anynan.torch.private import original
from anynan.torch.session.function import FunctionSession
from anynan.torch.session.model import ModelSession
from anynan.torch.session.session import session_of, tracked


class TorchOptions(Training, total=False):
    """Name the options of ``anynan.torch.track``.

    Attributes:
        read: When readings are judged: ``"auto"``, ``"immediate"``, ``"step"`` or every n steps.
        keep: Bytes of output gradient kept for a replay of the backward pass (64 MiB), or
            ``"step"`` for all of a step's.
        across_ranks: Whether all processes of a distributed run stop at the same step; True by
            default.
    """

    read: Literal["auto", "immediate", "step"] | int
    keep: int | Literal["step"]
    across_ranks: bool


@overload
def track(**options: Unpack[TorchOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(
    target: torch.nn.Module | Callable[..., Any], **options: Unpack[TorchOptions]
) -> Tracker: ...
@Options.shown(TorchOptions)
def track(target: Any = ..., **options: Unpack[TorchOptions]) -> Any:
    """Watch a model or a training step, forward and backward, until ``remove``.

    A module goes on being called as before; hooks read the root inputs, every layer's
    outputs, their gradients and the accumulated gradients of the weights. A function is
    replaced by the returned tracker: one call is one step, and its loss and its update are
    covered too. Without a target a decorator is returned.

    The forward part uses ``register_forward_hook``, the backward part a hook on the gradient of
    each output; reads come at ``register_optimizer_step_pre_hook``. The documentation's PyTorch
    page says what is watched when.

    Args:
        target: An ``nn.Module`` or a step function; leave it out to decorate.
        **options: ``policy``, ``action`` (``"raise"``, ``"warn"``, ``"record"``, ``"skip"`` or a
            function of the Event), ``save`` (a folder for a bundle of the
            first bad event), ``layers`` and ``exclude`` (globs or predicates),
            ``backward`` (True), ``replay`` (True), ``history`` (1000 steps), ``patience`` (0),
            ``stats`` (any of absmax, min, max, mean, rms, norm), ``parameters`` (False),
            ``read`` (``"auto"``, ``"immediate"``, ``"step"`` or every n steps), ``level``
            (``"step"``, ``"layer"`` or ``"operation"``), ``keep`` (bytes of output gradient kept
            for a replay of the backward pass, 64 MiB), ``across_ranks`` (True: all processes of a
            distributed run stop at the same step, for one all-reduce of a flag an update),
            ``updates`` (n: in one step of n, how far the update moves the weights).

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
    chosen = Options.checked(options, TorchOptions, "PyTorch")
    if target is ...:
        return functools.partial(start, options=chosen)
    return start(target, chosen)


def untrack(target: Any) -> None:
    """Stop watching a model or a function; the same as its tracker's ``remove``.

    Args:
        target: What was given to ``track``, or the tracker.

    Raises:
        ValueError: If it is not tracked.

    Example:
        >>> import torch, anynan
        >>> model = torch.nn.Linear(2, 2)
        >>> tracker = anynan.torch.track(model)
        >>> anynan.torch.untrack(model)
    """
    session = session_of(target) if isinstance(target, torch.nn.Module) else None
    (tracker_of(target) if session is None else session.tracker).remove()


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
    tracker = Tracker(target, options, getattr(target, "__name__", type(target).__name__))
    return tracker.start(FunctionSession(target, tracker))


def _session(model: torch.nn.Module, tracker: Tracker) -> ModelSession:
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
        make_way(first.tracker, name, "torch")
    meta = [key for key, p in model.named_parameters() if p.is_meta]
    if meta:
        msg = (
            f"{meta[0]} is on the meta device and holds no values: materialise the model "
            "(to_empty and load its weights) before tracking it"
        )
        raise ValueError(msg)
    tracker = Tracker(weakref.ref(model), options, name)
    session = _session(model, tracker)
    # Patterns that match nothing fail here, too.
    models = session.models
    if not models.paths("", model) and models.whole(models.named("", model)):
        msg = f"exclude={options.exclude!r} leaves no layer of this {name} to watch"
        raise ValueError(msg)
    for x in same:
        tracked[x] = weakref.ref(session)
    return tracker.start(session)
