"""``track`` and ``untrack``: the public doors."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, overload

from anynan._steps.tracker import Tracker, refuse_target, tracker_of
from anynan.jax.session.session import Session
from anynan.options import Options, Training


class JaxOptions(Training, total=False):
    """Name the options of ``anynan.jax.track``.

    Attributes:
        read: When steps are judged: ``"auto"``, ``"step"`` or every n steps.
        keep_inputs: Whether donated arguments are kept, so that a bad step can always be run
            again; False by default.
        lag: With 1 a step is read after the next one has been started; 0 by default, or 1 where
            nothing depends on the answer.
    """

    read: Literal["auto", "step"] | int
    keep_inputs: bool
    lag: Literal[0, 1] | None


@overload
def track(**options: Unpack[JaxOptions]) -> Callable[[Any], Tracker]: ...
@overload
def track(target: Callable[..., Any], **options: Unpack[JaxOptions]) -> Tracker: ...
@Options.shown(JaxOptions)
def track(target: Any = ..., **options: Unpack[JaxOptions]) -> Any:
    """Watch a function of arrays: a model, a loss, or best a whole training step.

    The function is traced to a jaxpr, once for each kind of arguments, and run again with a
    few more results: one number for each layer's output and each result. So it runs compiled,
    whether it was jitted or not; a jitted function keeps its static and donated arguments.
    Only a step that goes bad is run a second time, operation by operation.

    Built on ``jax.make_jaxpr`` and ``jax.extend``; the documentation's JAX page says what is
    watched, and how.

    Args:
        target: A function of pytrees, jitted or not; leave it out to decorate.
        **options: ``policy``, ``action`` (``"raise"``, ``"warn"``, ``"record"``, ``"skip"`` or a
            function of the Event), ``save`` (a folder for a bundle of the
            first bad event), ``layers`` and ``exclude`` (globs or predicates),
            ``backward`` (True), ``replay`` (True), ``history`` (1000 steps), ``patience`` (0),
            ``stats`` (any of absmax, min, max, mean, rms, norm), ``parameters`` (False),
            ``updates`` (n: in one step of n, how far the update moves the weights),
            ``read`` (``"auto"``, ``"step"``, or every n steps), ``level`` (``"step"``,
            ``"layer"`` or ``"operation"``); and, here only, ``keep_inputs`` (False): keep
            donated arguments, so that a bad step can always be run again, and ``lag`` (0, or 1
            where nothing depends on the answer): with 1 a step is read after the next one has
            been started.

    Returns:
        A Tracker, to be called in the function's place, or a decorator that makes one.

    Raises:
        TypeError: If the target is no function, or an option is of the wrong type or unknown.
        ValueError: If an option has an impossible value.

    Example:
        >>> import jax, anynan
        >>> step = anynan.jax.track(lambda x: jax.numpy.log(x).sum())
        >>> float(step(jax.numpy.ones(3)))
        0.0
    """
    chosen = checked(options, JaxOptions)
    lag = options.get("lag")
    if lag is not None and (isinstance(lag, bool) or lag not in (0, 1)):
        msg = f"lag= takes 0 (read each step) or 1 (read it after the next one began), not {lag!r}"
        raise ValueError(msg)
    keep = options.get("keep_inputs", False)
    if target is ...:
        return functools.partial(start, options=chosen, keep_inputs=keep, lag=lag)
    return start(target, chosen, keep_inputs=keep, lag=lag)


def checked(options: Mapping[str, Any], known: type) -> Options:
    """Check the options, also those that a compiled program cannot serve.

    Raises:
        TypeError: If one is unknown or of the wrong type.
        ValueError: If one has an impossible value.
    """
    keep = options.get("keep_inputs", False)
    if not isinstance(keep, bool):
        msg = f"keep_inputs= takes True or False, not {keep!r}"
        raise TypeError(msg)
    if options.get("read") == "immediate":
        msg = (
            "read='immediate' is not there for JAX: a compiled step is read when it has ended; "
            "choose auto or step, or a number n to read every n steps"
        )
        raise ValueError(msg)
    return Options.checked(options, known, "JAX")


def untrack(target: Any) -> Any:
    """Stop watching, and give the function back as it was given to ``track``.

    Args:
        target: What was given to ``track``, or what it returned.

    Returns:
        The function.

    Raises:
        ValueError: If it is not tracked.

    Example:
        >>> import jax, anynan
        >>> step = anynan.jax.track(jax.numpy.sin)
        >>> anynan.jax.untrack(step) is jax.numpy.sin
        True
    """
    tracker = tracker_of(target)
    tracker.remove()
    return tracker.fn


def start(
    target: Any, options: Options, *, keep_inputs: bool = False, lag: int | None = None
) -> Tracker:
    """Watch a function with options that were checked."""
    refuse_target(target, "function of arrays", "jax")
    if not callable(target):
        msg = f"track() takes a function of arrays, not {type(target).__name__}"
        raise TypeError(msg)
    tracker = Tracker(target, options, getattr(target, "__name__", type(target).__name__))
    return tracker.start(Session(target, tracker, keep_inputs=keep_inputs, lag=lag))
