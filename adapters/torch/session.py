"""One tracked target: its hooks, its step boundaries, its reads."""

import inspect
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from anynan.adapter import BadParameter
from anynan.lineage import Replay
from anynan.monitor import Reading, Rows, Site
from anynan.options import Options
from anynan.patterns import choose
from anynan.summary import Summary
from anynan.torch import updates
from anynan.torch.hooks import (
    ForwardHook,
    KeepGradHook,
    RootEnter,
    RootExit,
    clean_path,
    join,
    tensors,
)
from anynan.torch.probes import DTYPE_MAX, DTYPE_NAME, measure, plain, read_ends
from anynan.torch.rootcall import RootCall
from anynan.torch.slots import DeferredSlots, ImmediateSlots, Slots
from anynan.tracker import Tracker

# Without an optimizer to end the step, this many readings do.
MAX_ROWS = 50_000


class StopReplay(BaseException):
    """Leave user code during a replay; a BaseException, so that it is not swallowed."""


class State:
    """Hold one thread's open step."""

    __slots__ = (
        "__weakref__", "calls", "depth", "ended", "hooked", "idle", "in_optimizer", "replaying",
        "root", "roots", "rows", "saw_backward", "slots", "step_roots",
    )  # fmt: skip

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.rows: Rows | None = None
        self.idle = False
        self.replaying = False
        self.in_optimizer = False
        self.depth = 0
        self.ended: list[Rows] = []
        self.hooked: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.rows = None
        self.calls: dict[str, int] = {}
        self.root: RootCall | None = None
        self.roots: dict[int, RootCall] = {}
        self.step_roots: list[RootCall] = []
        self.saw_backward = False
        self.hooked.clear()

    def hook_recomputed(self, path: str) -> bool:
        """Tell whether a recomputed output still needs its gradient hook."""
        return self.root is None or not self.root.grad or path not in self.hooked


class Session:
    """Watch modules for one tracker; the base of a tracked model and a tracked step."""

    backend = "torch"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tracker: Tracker
        self.models: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        self.wanted: set[str] | None = None
        self.handles: list[Any] = []
        self._local = threading.local()
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._held: weakref.WeakKeyDictionary[Any, tuple[int, list[tuple[Any, Site]]]]
        self._held = weakref.WeakKeyDictionary()
        self._optimizer_known: bool | None = None
        self._names: dict[int, list[str]] = {}

    # Attaching.

    def attach(self) -> None:
        """Install the hooks; look at weights and buffers once."""
        self._install()
        updates.watch(self)
        self.check_parameters()

    def detach(self) -> None:
        """Undo everything; safe to call twice."""
        updates.unwatch(self)
        self._uninstall()
        for state in list(self._states):
            state.reset()

    def set_paused(self, paused: bool) -> None:
        """Take the hooks away while paused: nothing is left to cost anything."""
        if paused:
            self.read()
            updates.unwatch(self)
            self._uninstall()
        else:
            self._install()
            updates.watch(self)

    def _install(self) -> None:
        for prefix, ref in self.models:
            model = ref()
            if model is not None:
                self._hook_model(prefix, model)

    def _uninstall(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _hook_model(self, prefix: str, model: torch.nn.Module) -> None:
        chosen = self.paths(prefix, model)
        self.handles.append(
            model.register_forward_pre_hook(
                RootEnter(self, prefix), with_kwargs=True, prepend=True
            )
        )
        seen: set[int] = set()
        for path, module in chosen.items():
            if id(module) not in seen:
                seen.add(id(module))
                self.handles.append(module.register_forward_hook(ForwardHook(self, path)))
        self.handles.append(model.register_forward_hook(RootExit(self), always_call=True))

    def paths(self, prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Give the watched layers of a model by path, patterns applied."""
        named = {
            join(prefix, clean_path(name)): module for name, module in model.named_modules()
        }
        return choose(named, self.options.layers, self.options.skip)

    # One thread's step.

    def state(self) -> State:
        """Return this thread's state."""
        state: State | None = getattr(self._local, "state", None)
        if state is None:
            slots: Slots = (
                ImmediateSlots(self.options.extra)
                if self._immediate()
                else DeferredSlots(self.options.extra)
            )
            state = self._local.state = State(slots)
            self._states.add(state)
        return state

    def _immediate(self) -> bool:
        read = self.options.read
        if read != "auto":
            return read == "immediate"
        return all(p.device.type == "cpu" for _, p in self.parameters())

    def open_step(self, state: State) -> Rows:
        """Open this thread's step."""
        rows = state.rows = self.tracker.rows()
        if self.options.parameters:
            self.write_parameters(state, rows)
        return rows

    def end_step(self, state: State) -> None:
        """Close the step: read it now, or every n steps."""
        rows = self.tracker.close_step()
        was_idle, state.idle = state.idle, True
        try:
            if rows is not None:
                state.ended.append(rows)
                every = self.options.read
                if isinstance(every, int) and (rows.step + 1) % every and not rows.failed:
                    return
                self._settle(state)
        finally:
            state.idle = was_idle
            state.reset()

    def _settle(self, state: State) -> None:
        state.slots.read()
        ended, state.ended = state.ended, []
        while ended:
            rows = ended.pop(0)
            if not state.slots.deferred:
                rows.judged = len(rows.lo)
            self.tracker.settle(rows)

    def read(self) -> None:
        """Read and judge this thread's unread rows now."""
        state: State | None = getattr(self._local, "state", None)
        if state is None or state.idle:
            return
        state.idle = True
        try:
            self._settle(state)
            if state.rows is not None:
                state.slots.read()
                self.tracker.judge(state.rows)
                if state.depth == 0 and state.rows.pending is not None:
                    rows = self.tracker.close_step()
                    if rows is not None:
                        state.reset()
                        self.tracker.settle(rows)
        finally:
            state.idle = False

    def flag(self, state: State, rows: Rows, order: int, value: Any) -> None:
        """Have one reading judged while its layer is still on the stack."""
        state.idle = True
        try:
            self.tracker.flag(rows, order, value)
        finally:
            state.idle = False

    def write(self, state: State, rows: Rows, site: Site, call: int, value: torch.Tensor) -> None:
        """Write one reading and have it judged if it needs to be."""
        values = plain(value)
        if values is not None and state.slots.write(rows, site, call, values):
            self.flag(state, rows, len(rows.lo) - 1, value)

    def unseen(self, path: str, x: torch.Tensor) -> None:
        """Say that a float tensor could not be looked at."""
        if x.dtype in DTYPE_NAME:
            self.tracker.say(
                f"the output of {path or 'the model'} is not watched: {type(x).__name__} inside a "
                "function transform, or of a layout without values"
            )

    # Root calls.

    def start_root(
        self, state: State, fn: Callable[..., Any], layer: str | None, args: Any, kwargs: Any
    ) -> RootCall:
        """Remember a root call for a replay, and read its inputs."""
        rows = state.rows or self.open_step(state)
        named = list(self._named_inputs(fn, args, kwargs))
        root = RootCall.now(fn, tuple(args), dict(kwargs), [x for _, x in named])
        state.root = root
        if len(state.step_roots) < 64:
            state.step_roots.append(root)
        for name, x in named:
            if x.dtype in DTYPE_NAME:
                site = self.tracker.monitor.site(
                    layer, "input", name, DTYPE_NAME[x.dtype], DTYPE_MAX[x.dtype]
                )
                self.write(state, rows, site, 0, x)
        return root

    def _named_inputs(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = getattr(fn, "forward", fn)
        names = self._names.get(id(getattr(call, "__func__", call)))
        if names is None:
            try:
                names = [
                    p.name
                    for p in inspect.signature(call).parameters.values()
                    if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                ]
            except (TypeError, ValueError):
                names = []
            self._names[id(getattr(call, "__func__", call))] = names
        for i, item in enumerate(args):
            yield from tensors(item, names[i] if i < len(names) else f"args[{i}]")
        for key, item in kwargs.items():
            yield from tensors(item, key)

    def enter_root(self, module: Any, path: str, args: Any, kwargs: Any) -> None:
        """Begin a root call of a tracked model."""
        raise NotImplementedError

    def exit_root(self, module: Any, output: Any) -> None:
        """End a root call of a tracked model."""
        raise NotImplementedError

    def keep_gradient(self, root: RootCall, index: int, grad: torch.Tensor) -> None:
        """Keep a gradient that came into the model, within the memory allowed."""
        keep = self.options.keep
        small = keep == "step" or grad.numel() * grad.element_size() <= keep
        root.gradients[index] = grad.detach() if small else None

    # Updates.

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """List the parameters by their full clean names."""
        found = {}
        for prefix, ref in self.models:
            model = ref()
            if model is not None:
                for name, p in model.named_parameters():
                    found.setdefault(id(p), (join(prefix, clean_path(name)), p))
        return list(found.values())

    def held(self, optimizer: torch.optim.Optimizer) -> list[tuple[Any, Site]]:
        """List the watched parameters that an optimizer holds, with their gradient slots."""
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        entry = self._held.get(optimizer)
        if entry is None or entry[0] != len(mine):
            names = {id(p): name for name, p in self.parameters()}
            pairs = [
                (p, self.gradient_site(names[id(p)], p)) for p in mine if id(p) in names
            ]
            entry = (len(mine), pairs)
            self._held[optimizer] = entry
        return entry[1]

    def gradient_site(self, name: str, p: torch.Tensor, *, bound: bool = True) -> Site:
        """Return the slot of a parameter's gradient."""
        return self.tracker.monitor.site(
            name.rpartition(".")[0],
            "backward",
            f"grad of {name.rpartition('.')[2]}",
            str(p.dtype).removeprefix("torch."),
            DTYPE_MAX.get(p.dtype),
            parameter=name,
            bound=bound,
        )

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Read gradients and the step so far: weights never take a bad step."""
        state = self.state()
        if state.idle and not state.replaying:
            return
        pairs = self.held(optimizer)
        if state.replaying:
            if pairs or isinstance(self, StepMarker):
                raise StopReplay
            return
        if not pairs:
            return
        state.in_optimizer = True
        self._optimizer_known = True
        pairs = [(p, site) for p, site in pairs if p.grad is not None]
        if not pairs:
            return
        rows = state.rows
        if rows is None:
            if not self.ran_somewhere(state):
                self.tracker.say(
                    "weights got gradients, but none of the watched layers was seen running: "
                    "layers inside a compiled graph, or called past the model, are not watched"
                )
            rows = self.open_step(state)
        # A scaler that hands its own check to a fused optimizer skips the update on the device.
        if self.options.backward and getattr(optimizer, "found_inf", None) is None:
            self.write_gradients(state, rows, pairs)
        every = self.options.read
        if not isinstance(every, int) or not (rows.step + 1) % every:
            state.idle = True
            try:
                state.slots.read()
                if state.slots.deferred:
                    self.tracker.judge(rows)
            finally:
                state.idle = False
        if rows.skip:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def ran_somewhere(self, state: State) -> bool:
        """Tell whether another thread or step saw the layers run."""
        return any(other.rows is not None for other in self._states if other is not state)

    def write_gradients(
        self, state: State, rows: Rows, pairs: list[tuple[Any, Site]]
    ) -> None:
        """Read each gradient's norm: finite norms clear a gradient, others are looked at."""
        grads = []
        for p, _ in pairs:
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            grads.append(grad._values() if grad.layout is not torch.strided else grad)
        with torch.no_grad():
            full = [g if g.numel() else g.new_zeros(1) for g in grads]
            norms = torch._foreach_norm(full)
            sites = [site for _, site in pairs]
            if isinstance(state.slots, DeferredSlots):
                for (p, site), grad, norm in zip(pairs, grads, norms, strict=True):
                    del norm
                    values = plain(grad)
                    if values is not None:
                        exact = self.gradient_site(site.parameter or "", p, bound=False)
                        state.slots.write(rows, exact, 0, values)
                return
            if len({n.dtype for n in norms}) == 1:
                sizes = torch.stack(norms).tolist()
            else:
                sizes = [n.item() for n in norms]
        start = len(rows.lo)
        rows.sites.extend(sites)
        rows.calls.extend([0] * len(sites))
        rows.lo.extend([-size for size in sizes])
        rows.hi.extend(sizes)
        for i, size in enumerate(sizes):
            if not size <= sites[i].limit or size == math.inf:
                values = plain(grads[i])
                if values is None:
                    continue
                # The norm only bounds the gradient: look at it before saying anything.
                p = pairs[i][0]
                rows.sites[start + i] = self.gradient_site(
                    sites[i].parameter or "", p, bound=False
                )
                rows.lo[start + i], rows.hi[start + i] = read_ends(values)
                limit = sites[i].limit
                if not (-limit <= rows.lo[start + i] and rows.hi[start + i] <= limit):
                    self.flag(state, rows, start + i, grads[i])

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the update; a tracked model's step ends here."""
        state = self.state()
        if state.idle or not self.held(optimizer):
            return
        state.in_optimizer = False
        self.tracker.updated(self.tracker.step)
        rows = state.rows
        if self.options.parameters and rows is not None and not state.slots.deferred:
            self.write_parameters(state, rows)
        self.finish_update(state)

    def finish_update(self, state: State) -> None:
        """Do what follows an update; nothing for a tracked step, whose call is the step."""

    # Weights and buffers.

    def write_parameters(self, state: State, rows: Rows) -> None:
        """Read every weight and buffer."""
        for name, x in self._all_tensors():
            if x.dtype in DTYPE_NAME:
                site = self.tracker.monitor.site(
                    name.rpartition(".")[0],
                    "parameter",
                    name.rpartition(".")[2],
                    DTYPE_NAME[x.dtype],
                    DTYPE_MAX[x.dtype],
                    parameter=name,
                )
                self.write(state, rows, site, 0, x)
        if not state.slots.deferred and rows.failed is None:
            self.tracker.known_clean(rows.step)

    def _all_tensors(self) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = list(self.parameters())
        for prefix, ref in self.models:
            model = ref()
            if model is not None:
                found += [
                    (join(prefix, clean_path(name)), x) for name, x in model.named_buffers()
                ]
        return found

    def check_parameters(self) -> None:
        """Look at every weight and buffer once, as at attach."""
        bad = self.bad_parameters()
        if not bad:
            self.tracker.known_clean(self.tracker.step)
            return
        state = self.state()
        rows = self.tracker.rows()
        first = bad[0]
        site = self.tracker.monitor.site(
            first.layer, "parameter", first.name.rpartition(".")[2], first.summary.dtype, None,
            parameter=first.name,
        )  # fmt: skip
        rows.sites.append(site)
        rows.calls.append(0)
        rows.lo.append(math.nan if first.summary.nan else first.summary.low or 0.0)
        rows.hi.append(math.nan if first.summary.nan else first.summary.high or 0.0)
        try:
            self.flag(state, rows, len(rows.lo) - 1, dict(self._all_tensors())[first.name])
        finally:
            if rows.failed is not None:
                rows.failed = None

    def bad_parameters(self) -> list[BadParameter]:
        """List weights with a NaN or an Inf and buffers with a NaN or +Inf."""
        found = []
        weights = {name for name, _ in self.parameters()}
        judge = self.options.policy.judge
        for name, x in self._all_tensors():
            values = plain(x)
            if values is None:
                continue
            lo, hi = read_ends(values)
            if -math.inf < lo and hi < math.inf:
                continue
            layer = name.rpartition(".")[0]
            # A buffer of -Inf is a mask until something bad follows.
            phase: Any = "parameter" if name in weights else "forward"
            judged = judge(phase, lo, hi, layer=layer)
            if judged is None or judged[1] != "bad":
                continue
            gradient = getattr(x, "grad", None)
            state = {}
            for optimizer in list(self._held):
                for key, value in optimizer.state.get(x, {}).items():
                    if isinstance(value, torch.Tensor) and value.numel():
                        state[str(key)] = measure(value)
            found.append(
                BadParameter(
                    name, layer, measure(x), name not in weights,
                    None if gradient is None else measure(gradient), state,
                )
            )  # fmt: skip
        return found

    # What the core asks for.

    def measure(self, value: Any) -> Summary:
        """Summarise a tensor."""
        return measure(value)

    def describe_input(self, reading: Reading, value: Any) -> tuple[int, ...]:
        """List the rows of a batch that hold bad values."""
        values = None if value is None else plain(value)
        if values is None or values.dim() == 0:
            return ()
        bad = ~torch.isfinite(values.float() if values.element_size() == 1 else values)
        return tuple(bad.reshape(values.shape[0], -1).any(1).nonzero()[:, 0].tolist())

    def loss_scale(self) -> float | None:
        """Give the scale of a gradient scaler that is in use."""
        scalers = updates.find_scalers()
        return float(scalers[0].get_scale()) if scalers else None

    def rank(self) -> int | None:
        """Give the rank, when a process group is up."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return None

    def replay(self, reading: Reading) -> Replay:
        """Run the failing call again under the operation watcher."""
        from anynan.torch.replay import replay

        return replay(self, self.state(), reading)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one tracked step."""
        return fn(*args, **kwargs)


class StepMarker:
    """Mark sessions whose replay stops at any optimizer."""


class ModelSession(Session):
    """Watch one module; its step ends at its optimizer's step."""

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        super().__init__(options)
        self.models = [("", weakref.ref(model))]

    def enter_root(self, module: Any, path: str, args: Any, kwargs: Any) -> None:
        """Begin a root call: end the step before it if that is over, read the inputs."""
        state = self.state()
        if state.idle:
            return
        state.depth += 1
        if state.depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        if state.rows is not None and self._over(state):
            self.end_step(state)
        self.start_root(state, module, path, args, kwargs)

    def _over(self, state: State) -> bool:
        rows = state.rows
        if rows is None or state.in_optimizer:
            return False
        if rows.failed is not None or rows.pending is not None or len(rows.sites) > MAX_ROWS:
            return True
        if not state.saw_backward and self.options.backward:
            return False
        if self._optimizer_known is None:
            known = {id(p) for _, p in self.parameters()}
            self._optimizer_known = bool(updates.find_optimizers(known))
        return not self._optimizer_known

    def exit_root(self, module: Any, output: Any) -> None:
        """End a root call; without gradients it is a whole step."""
        state = self.state()
        if state.idle:
            return
        state.depth = max(state.depth - 1, 0)
        root = state.root
        if state.depth or root is None or torch._C._current_graph_task_id() != -1:
            return
        graph = False
        if root.grad and self.options.backward:
            weak = weakref.ref(self)
            for i, (_, x) in enumerate(tensors(output, "output")):
                if x.requires_grad:
                    graph = True
                    x.register_hook(KeepGradHook(weak, root, i))
        if not graph and not any(other.grad for other in state.step_roots):
            self.end_step(state)

    def finish_update(self, state: State) -> None:
        """End the step at the update."""
        if state.rows is not None:
            self.end_step(state)
