"""Run a failing call again under the operation watcher, and leave no trace of it."""

import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from anynan._diagnosis.lineage import External, Replay, Sink
from anynan._reach import Exhausted
from anynan._steps.adapter import ReplayError
from anynan._steps.context import replay_context
from anynan._steps.interrupts import Interrupts
from anynan._steps.monitor import Reading
from anynan._steps.threads import busy_threads
from anynan.torch.call.regions import Regions
from anynan.torch.call.rootcall import RootCall
from anynan.torch.call.state import State, StopReplay
from anynan.torch.graphs import graphs as compiled
from anynan.torch.read.probes import local, nonfinite
from anynan.torch.replay.collectives import Sent
from anynan.torch.replay.kept import Kept
from anynan.torch.replay.seams import Seam
from anynan.torch.replay.watcher import Watcher
from anynan.torch.session.session import Session
from anynan.torch.step.hooks import CallHook, tensors
from anynan.torch.step.weights import all_tensors

TAKEN = (
    "the second run stopped where it would have taken more from `{}` than the first run took, or "
    "from an iterator whose items cannot be kept: hand each batch to the step as an argument"
)
SHARED = (
    "another thread ({}) is at work, so counters and containers that the code changes were not "
    "put back: the second run began with what the first left in them, and may have changed them"
)
MISSED = "the second run did not begin with the first run's value of {}"
GONE = "the model was gone when this was read, so its last step cannot be run again"


def replay(session: Session, state: State, reading: Reading) -> Replay:
    """Run the call behind a reading again, operation by operation.

    Args:
        session: What is tracked.
        state: The thread's open step.
        reading: The bad reading.

    Raises:
        ReplayError: If the call is not known or its inputs were changed.
    """
    if state.rows is not None and state.rows.step != reading.step:
        msg = (
            f"step {reading.step} was over when it was read, so it cannot be run again: the "
            "report stays at layer level"
        )
        raise ReplayError(msg)
    is_step = session.in_step
    roots = _roots(state, reading, is_step)
    if not roots and compiled.ran(session):
        msg = (
            "the model's own call is part of the compiled code, so there is no call to run again: "
            "track what torch.compile returned, or the step function, and the operation is named"
        )
        raise ReplayError(msg)
    if not roots:
        msg = (
            "the layer was called past the model (not through the tracked model's own call), so "
            "there is no call to run again: the report stays at layer level"
        )
        raise ReplayError(msg)
    if any(root.fn is None for root in roots):
        raise ReplayError(GONE)
    return again(session, state, reading, roots)


def again(session: Session, state: State, reading: Reading, roots: list[RootCall]) -> Replay:
    """Run calls again, and leave no trace; where all ranks do so, none stops early.

    Args:
        session: What is tracked.
        state: The thread's open step.
        reading: The bad reading, or one of its phase where another rank has it.
        roots: The calls.

    Raises:
        ReplayError: If they cannot be run on this rank alone.
    """
    result = Replay(uncompiled=compiled.ran(session))
    together = session.ranks.together
    is_step = session.in_step
    _alone(session, roots)
    with (
        Interrupts() as interrupts,
        session.second_run,
        session.ranks.replaying(session),
        ExitStack() as stack,
    ):
        kept = Kept()
        try:
            kept.note(session, state, roots)
            stack.enter_context(replay_context())
            stack.enter_context(disabled_modes())
            for root in roots:
                if root.changed():
                    result.notes.append(
                        "an input of the call was changed in place since, so the replay starts "
                        "from other values"
                    )
                watcher = _run(session, root, reading, is_step, result, kept, interrupts)
                if not result.sinks:
                    result.records, result.sinks = watcher.records, watcher.sinks
                result.passed += watcher.passed
                if watcher.sinks and not together:
                    break
        finally:
            interrupts.end()
            kept.restore()
    result.notes += [f"the replay could not put back {what}" for what in kept.lost]
    if result.uncompiled:  # what compiled code calls several times has one reading
        result.passed = []
    elif state.updated and is_step:
        result.passed = [place.unmeasured() for place in result.passed]
        result.notes.append(
            "the step had updated the weights when this was read, so the second run, and the "
            "values it shows, are with the new ones"
        )
    elif result.substituted:
        result.passed = [place for place in result.passed if place.phase != "backward"]
    return result


def _alone(session: Session, roots: list[RootCall]) -> None:
    """Refuse a second run that another thread would notice.

    Raises:
        ReplayError: If another thread uses the model, or would draw the same random numbers.
    """
    busy = busy_threads()
    if not busy:
        return
    users = {state.thread.ident for state in session._states if state.used}
    ours = next((name for number, name in busy.items() if number in users), None)
    if ours is not None:
        msg = (
            f"another thread ({ours}) runs what is tracked, too, and would have met the second "
            "run in it: the step was not run again, and the report stays at layer level"
        )
        raise ReplayError(msg)
    if not all(root.random.is_now() for root in roots):
        name = next(iter(busy.values()))
        msg = (
            f"the step drew random numbers, and another thread ({name}) would have drawn the same "
            "ones during a second run: the step was not run again, and the report stays at layer "
            "level"
        )
        raise ReplayError(msg)


def _roots(state: State, reading: Reading, is_step: bool) -> list[RootCall]:
    if is_step:
        return [state.root] if state.root is not None else []
    if reading.phase == "backward":
        known = state.roots.get(reading.order)
        return [known] if known is not None else state.living_roots()
    root = state.root_of(reading.order)
    return [root] if root is not None else []


def _run(
    session: Session,
    root: RootCall,
    reading: Reading,
    is_step: bool,
    result: Replay,
    kept: Kept,
    interrupts: Interrupts,
) -> Watcher:
    root = replace(root, args=_cut(root.args), kwargs=_cut(root.kwargs))
    watcher = Watcher(outside(session, root))
    watcher.originals = {}
    if not session.ranks.together:
        watcher.stop = functools.partial(_matches, reading, watcher)
    watcher.within, watcher.called = _run.__code__, root.source()
    if not root.random.is_now():
        root.random.restore()
    if kept.apart is not None:
        result.notes.append(SHARED.format(kept.apart))
    elif root.began is not None:
        result.notes += [MISSED.format(what) for what in root.began.put_back()]
    with ExitStack() as stack:
        stack.callback(watcher.restore)
        if session.reached is not None:
            stack.enter_context(session.reached.reach.again())
        stack.enter_context(root.modes())
        stack.enter_context(compiled.eager())
        for prefix, ref in session.models:
            model = ref()
            if model is not None:
                stack.enter_context(layer_stack(session, prefix, model, watcher, root.calls))
        stack.enter_context(Seam(watcher, leaf=kept.gradient))
        try:
            if session.ranks.together:
                stack.enter_context(Sent(watcher))
            with watcher:
                interrupts.begin()
                out = root.fn(*root.args, **root.kwargs)
                if is_step:
                    _results(watcher, out)
                elif reading.phase == "backward":
                    _backward(root, out, result, together=session.ranks.together)
        except StopReplay:
            pass
        except ReplayError as error:
            result.notes.append(str(error))
        except Exhausted as error:
            result.notes.append(TAKEN.format(error))
        except Exception as error:  # noqa: BLE001  the replay may fail as the step did
            result.notes.append(
                f"the replay stopped at {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                if str(error)
                else f"the replay stopped at {type(error).__name__}"
            )
        finally:
            interrupts.end()
    if not any(sink.phase == reading.phase for sink in watcher.sinks):
        gradients(session, watcher)
    blind = watcher.outside.get(-1)
    if blind is not None:
        result.notes.append(f"one operation could not be looked at in the replay: {blind[1]}")
    return watcher


def _cut(value: Any) -> Any:
    """Cut the inputs off the graph they came from: a replay must not run it backward."""
    if isinstance(value, torch.Tensor):
        if not value.requires_grad or isinstance(value, torch.nn.Parameter):
            return value
        leaf = value.detach().requires_grad_()
        if value.is_leaf:
            return leaf
        with torch.enable_grad():  # a leaf could not be written to in place
            return leaf.clone()
    if type(value) in (list, tuple):
        return type(value)(_cut(item) for item in value)
    if type(value) is dict:
        return {key: _cut(item) for key, item in value.items()}
    return value


def _matches(reading: Reading, watcher: Watcher, sink: Sink) -> bool:
    """Stop the replay where the reading went bad, unless only a mask is there."""
    if sink.kind == "neginf" and sink.phase == "forward":
        return False
    if sink.phase != reading.phase or sink.layer != reading.layer:
        return False
    return reading.site.parameter is None


def outside(session: Session, root: RootCall) -> dict[int, tuple[External, str]]:
    """Name the storages that exist before the call: inputs, weights, buffers."""
    found: dict[int, tuple[External, str]] = {}
    weights = {id(x) for _, x in session.parameters()}
    for name, x in all_tensors(session):
        key = _storage(x)
        if key is not None:
            found[key] = ("parameter" if id(x) in weights else "buffer", name)
    for name, x in session._named_inputs(root.fn, root.args, root.kwargs):
        key = _storage(x)
        if key is not None:
            # What a part of the model gets from another was computed, nobody saw where.
            kind: External = "handed" if session.parts and x.grad_fn is not None else "input"
            found.setdefault(key, (kind, name))
    return found


def _storage(x: torch.Tensor) -> int | None:
    """Give the number of a tensor's storage; None where it has none that can be seen."""
    if x.layout is not torch.strided or x.is_meta:
        return None
    try:
        return int(local(x).untyped_storage()._cdata)
    except (RuntimeError, ValueError):  # inside a function transform, or not made yet
        return None


def _backward(root: RootCall, out: Any, result: Replay, *, together: bool) -> None:
    """Run the backward pass from the kept gradients of the outputs."""
    outputs, gradients = [], []
    found = list(tensors(out, "output", objects=True))
    inside = _used_inside([x for _, x in found])
    for i, (_, x) in enumerate(found):
        if not x.requires_grad:
            continue
        grad = root.gradients.get(i)
        if x.grad_fn in inside:
            # What arrived at it came from the model's own use of it as well, which runs again:
            # the sum is put in the place of what that use alone gives.
            if grad is not None and not nonfinite(grad):
                x.register_hook(functools.partial(_instead, grad))
                hooks: Any = x._backward_hooks
                *others, last = list(hooks.items())
                hooks.clear()  # PyTorch runs them in the order they were put in
                hooks.update([last, *others])
                outputs.append(x)
                gradients.append(torch.zeros_like(x))
            continue
        if i in root.gradients and grad is None:
            result.notes.append(
                "the gradient that came into the model was larger than keep= allows, so the "
                "backward pass was replayed from ones instead"
            )
            grad = torch.ones_like(x)
            result.substituted = True
        if grad is None:
            continue
        if nonfinite(grad):
            result.incoming = True
            if not together:
                return
        outputs.append(x)
        gradients.append(grad)
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _instead(known: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """Give the gradient that arrived in the first run."""
    return known


def _used_inside(outputs: list[torch.Tensor]) -> set[Any]:
    """Give the graph's nodes behind the last ones: an output among them is used for another."""
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    inside: set[Any] = set()
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in inside:
                inside.add(node)
                todo.append(node)
    return inside


def _results(watcher: Watcher, out: Any) -> None:
    for name, x in tensors(out, "result", objects=True):
        one = x.numel() == 1
        label = "loss" if one and name == "result" else name
        watcher.check_sink("loss" if one else "forward", None, label, x, call=0)


def gradients(session: Session, watcher: Watcher) -> None:
    """Note the bad gradients that landed on weights."""
    try:
        for name, p in session.parameters():
            if p.grad is not None:
                watcher.check_sink("backward", name.rpartition(".")[0], name, p.grad)
    except StopReplay:
        pass


@contextmanager
def layer_stack(
    session: Session,
    prefix: str,
    model: torch.nn.Module,
    watcher: Watcher,
    before: dict[str, int],
) -> Iterator[None]:
    """Tell the watcher which layer runs, and show it what leaves each layer."""
    handles = []
    calls, regions = dict(before), Regions()
    watched = set(session.paths(prefix, model))
    weak = weakref.ref(watcher)

    def enter(path: str, module: Any, args: Any) -> None:
        if not watcher.mine():
            return
        again = watcher.in_backward()  # recomputed under activation checkpointing
        if again or not torch.is_grad_enabled():
            call = regions.number(calls, path, again=again)[0]
        else:
            call = calls.get(path, 0)
            calls[path] = call + 1
        watcher.layers.append((path, call))

    def leave(path: str, module: Any, args: Any, output: Any) -> None:
        if not watcher.mine():
            return
        call = next((n for known, n in reversed(watcher.layers) if known == path), 0)
        if output is not None and path in watched:
            # What checkpointing runs again was passed before.
            first = None if watcher.in_backward() else call
            for name, x in tensors(output, "output", objects=True):
                watcher.check_sink("forward", path, name, x, call=first)
                if x.requires_grad:
                    handle = x.register_hook(functools.partial(_arrived, weak, path, name, call))
                    if x.grad_fn is None:  # a leaf outlives the run
                        handles.append(handle)
        while watcher.layers and watcher.layers.pop()[0] != path:
            pass

    def _arrived(ref: Any, path: str, name: str, call: int, grad: torch.Tensor | None) -> None:
        found = ref()
        if found is not None and grad is not None:
            label = "grad" if name == "output" else f"grad of {name}"
            found.check_sink("backward", path, label, grad, call=call)

    try:
        for path, module in session.named(prefix, model).items():
            before_it = CallHook(functools.partial(enter, path))
            handles.append(before_it.on(module.register_forward_pre_hook(before_it, prepend=True)))
            after_it = CallHook(functools.partial(leave, path))
            handles.append(after_it.on(module.register_forward_hook(after_it, always_call=True)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def disabled_modes() -> Iterator[None]:
    """Leave the program's own dispatch modes: what counts operations must not count these."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield
