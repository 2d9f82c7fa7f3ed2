"""Run a failing call again under the operation watcher, and leave no trace of it."""

import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from anynan.adapter import ReplayError
from anynan.context import replay_context
from anynan.lineage import External, Replay, Sink
from anynan.monitor import Reading
from anynan.torch import compiled
from anynan.torch.collectives import Sent
from anynan.torch.hooks import tensors
from anynan.torch.names import node_name
from anynan.torch.probes import local, nonfinite
from anynan.torch.randomstate import RandomState
from anynan.torch.recompute import Regions
from anynan.torch.rootcall import RootCall
from anynan.torch.session import Session
from anynan.torch.state import State, StepMarker, StopReplay
from anynan.torch.watcher import Watcher
from anynan.torch.weights import all_tensors

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
    with session.ranks.replaying(session), _no_trace(session, state, result):
        for root in roots:
            if root.changed():
                result.notes.append(
                    "an input of the call was changed in place since, so the replay starts from "
                    "other values"
                )
            watcher = _run(session, root, reading, is_step, result)
            if not result.sinks:
                result.records, result.sinks = watcher.records, watcher.sinks
            if watcher.sinks and not together:
                break
    return result


def _roots(state: State, reading: Reading, is_step: bool) -> list[RootCall]:
    if is_step:
        return [state.root] if state.root is not None else []
    if reading.phase == "backward":
        known = state.roots.get(reading.order)
        return [known] if known is not None else state.living_roots()
    root = state.root_of(reading.order)
    return [root] if root is not None else []


def _run(
    session: Session, root: RootCall, reading: Reading, is_step: bool, result: Replay
) -> Watcher:
    root = replace(root, args=_cut(root.args), kwargs=_cut(root.kwargs))
    watcher = Watcher(outside(session, root))
    watcher.originals = {}
    if not session.ranks.together:
        watcher.stop = functools.partial(_matches, reading, watcher)
    watcher.within, watcher.called = _run.__code__, root.source()
    root.random.restore()
    with ExitStack() as stack:
        stack.callback(watcher.restore)
        stack.enter_context(root.modes())
        stack.enter_context(compiled.eager())
        for prefix, ref in session.models:
            model = ref()
            if model is not None:
                stack.enter_context(layer_stack(session, prefix, model, watcher, root.calls))
        stack.enter_context(backward_seam(watcher))
        try:
            if session.ranks.together:
                stack.enter_context(Sent(watcher))
            with watcher:
                out = root.fn(*root.args, **root.kwargs)
                if is_step:
                    _results(watcher, out)
                elif reading.phase == "backward":
                    _backward(root, out, result, together=session.ranks.together)
        except StopReplay:
            pass
        except ReplayError as error:
            result.notes.append(str(error))
        except Exception as error:  # noqa: BLE001  the replay may fail as the step did
            result.notes.append(
                f"the replay stopped at {type(error).__name__}: {str(error).splitlines()[0][:120]}"
                if str(error)
                else f"the replay stopped at {type(error).__name__}"
            )
    if not any(sink.phase == reading.phase for sink in watcher.sinks):
        _gradients(session, watcher)
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
        if x.layout is torch.strided and not x.is_meta:
            kind: External = "parameter" if id(x) in weights else "buffer"
            found[int(local(x).untyped_storage()._cdata)] = (kind, name)
    for name, x in session._named_inputs(root.fn, root.args, root.kwargs):
        if x.layout is torch.strided and not x.is_meta:
            # What a part of the model gets from another was computed, nobody saw where.
            kind = "unknown" if session.parts and x.grad_fn is not None else "input"
            found.setdefault(int(local(x).untyped_storage()._cdata), (kind, name))
    return found


def _backward(root: RootCall, out: Any, result: Replay, *, together: bool) -> None:
    """Run the backward pass from the kept gradients of the outputs."""
    outputs, gradients = [], []
    for i, (_, x) in enumerate(tensors(out, "output")):
        if not x.requires_grad:
            continue
        grad = root.gradients.get(i)
        if i in root.gradients and grad is None:
            result.notes.append(
                "the gradient that came into the model was larger than keep= allows, so the "
                "backward pass was replayed from ones instead"
            )
            grad = torch.ones_like(x)
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


def _results(watcher: Watcher, out: Any) -> None:
    for name, x in tensors(out, "result"):
        watcher.check_sink("loss" if x.numel() == 1 else "forward", None, name, x)


def _gradients(session: Session, watcher: Watcher) -> None:
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
        again = watcher.in_backward()  # recomputed under activation checkpointing
        if again or not torch.is_grad_enabled():
            call = regions.number(calls, path, again=again)[0]
        else:
            call = calls.get(path, 0)
            calls[path] = call + 1
        watcher.layers.append((path, call))

    def leave(path: str, module: Any, args: Any, output: Any) -> None:
        if output is not None and path in watched:
            for name, x in tensors(output, "output"):
                watcher.check_sink("forward", path, name, x)
                if x.requires_grad:
                    x.register_hook(functools.partial(_arrived, weak, path, name))
        while watcher.layers and watcher.layers.pop()[0] != path:
            pass

    def _arrived(ref: Any, path: str, name: str, grad: torch.Tensor) -> None:
        found = ref()
        if found is not None:
            found.check_sink("backward", path, name, grad)

    try:
        for path, module in session.named(prefix, model).items():
            handles.append(
                module.register_forward_pre_hook(functools.partial(enter, path), prepend=True)
            )
            handles.append(
                module.register_forward_hook(functools.partial(leave, path), always_call=True)
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def backward_seam(watcher: Watcher, *, replaying: bool = True) -> Iterator[None]:
    """Show the watcher each backward pass: the loss, the graph, the gradients into nodes."""
    real_backward, real_grad = torch.autograd.backward, torch.autograd.grad
    real_step = torch.amp.GradScaler.step
    handles: list[Any] = []

    def look(roots: Any) -> None:
        items = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        items = [getattr(item, "node", item) for item in items]
        for x in items:
            if isinstance(x, torch.Tensor) and not watcher.layers and x.numel() == 1:
                watcher.check_sink("loss", None, "loss", x)
        todo = [x.grad_fn if isinstance(x, torch.Tensor) else x for x in items]
        seen: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            handles.append(node.register_prehook(functools.partial(_incoming, watcher)))
            for following, _ in node.next_functions:
                if following is not None:
                    names = watcher.consumers.setdefault(following._sequence_nr(), [])
                    names.append(node_name(node.name()))
                    todo.append(following)

    @functools.wraps(real_backward)
    def backward(tensors_: Any, *args: Any, **kwargs: Any) -> Any:
        look(tensors_)
        return real_backward(tensors_, *args, **kwargs)

    @functools.wraps(real_grad)
    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        look(outputs)
        return real_grad(outputs, *args, **kwargs)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StopReplay

    torch.autograd.backward = backward  # type: ignore[assignment]
    torch.autograd.grad = grad
    if replaying:
        torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.backward = real_backward
        torch.autograd.grad = real_grad
        torch.amp.GradScaler.step = real_step  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def _incoming(watcher: Watcher, gradients: Any) -> None:
    watcher.incoming = tuple(local(x) if isinstance(x, torch.Tensor) else x for x in gradients)


@contextmanager
def _no_trace(session: Session, state: State, result: Replay) -> Iterator[None]:
    """Put everything back that a second run would change."""
    random = RandomState.now()
    modules: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
    contents: list[Callable[[], None]] = []
    gradients = [(p, p.grad, p.data) for p in _every_parameter(session)]
    for _, ref in session.models:
        model = ref()
        for module in model.modules() if model is not None else ():
            modules.append((module, dict(module.__dict__), dict(module._buffers)))
            contents += _contents(module)
    # A model's own call runs no scaler; a whole step does.
    scalers = _scaler_states(session, state) if isinstance(session, StepMarker) else []
    # A gradient hook may have begun this, and in a thread that is not the step's.
    before = [(s, s.idle, s.replaying, s.base) for s in {session.state(), state}]
    for one, *_ in before:
        one.idle = one.replaying = True
        one.base = torch._C._current_graph_task_id()
    try:
        for module, _, buffers in modules:
            for name, x in buffers.items():
                # Swapped, not written back: the user's graph may have saved the original.
                module._buffers[name] = None if x is None else x.detach().clone()
            for name, x in list(module.__dict__.items()):
                if isinstance(x, torch.Tensor) and not x.requires_grad:
                    module.__dict__[name] = x.clone()
        for p, _, _ in gradients:
            p.grad = None
        with replay_context():
            yield
    finally:
        for module, attributes, buffers in modules:
            module._buffers.clear()
            module._buffers.update(buffers)
            for name in set(module.__dict__) - set(attributes):
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for restore in contents:
            restore()
        for p, grad, data in gradients:
            if p.data.untyped_storage()._cdata != data.untyped_storage()._cdata:
                p.data = data
            p.grad = grad
        for restore in scalers:
            restore()
        random.restore()
        for one, idle, replaying, base in before:
            one.idle, one.replaying, one.base = idle, replaying, base


_MODULE_OWN = frozenset(vars(torch.nn.Module()))


def _contents(module: torch.nn.Module) -> list[Callable[[], None]]:
    """Note what the lists, dicts and sets among a module's attributes hold."""
    restores: list[Callable[[], None]] = []
    for name, value in vars(module).items():
        if name in _MODULE_OWN or not isinstance(value, list | dict | set | deque):
            continue
        held = copy.copy(value)

        def restore(value: Any = value, held: Any = held) -> None:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(held)

        restores.append(restore)
    return restores


def _every_parameter(session: Session) -> list[torch.Tensor]:
    """List the parameters of the models and of the optimizers that hold one of them.

    A tracked step may use any optimizer. What trains another model, maybe in another thread at
    this moment, is left alone otherwise.
    """
    found = {id(p): p for _, p in session.parameters()}
    for optimizer, held in list(session._held.items()):
        if not held.parameters and not isinstance(session, StepMarker):
            continue
        for group in optimizer.param_groups:
            found.update((id(p), p) for p in group["params"])
    return list(found.values())


def _scaler_states(session: Session, state: State) -> list[Callable[[], None]]:
    """Note what scalers hold, and give the step's own one the scale that the step ran under."""
    from anynan.torch import scaling

    restores: list[Callable[[], None]] = []
    for scaler in scaling.find_scalers():
        states = {k: dict(v) for k, v in scaler._per_optimizer_states.items()}

        def restore(scaler: Any = scaler, states: Any = states, scale: Any = scaler._scale) -> None:
            scaler._per_optimizer_states.clear()
            scaler._per_optimizer_states.update(states)
            scaler._scale = scale

        restores.append(restore)
    used = None if session.scaler is None else session.scaler()
    if used is not None and state.rows is not None and state.rows.scale is not None:
        used._scale = state.rows.scale.clone()
    return restores
