"""One tracked target: its hooks, its step boundaries, its reads."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anynan._arrays.summary import Summary
from anynan._diagnosis.lineage import Replay
from anynan._judging.patterns import choose
from anynan._steps.adapter import BadParameter, ReplayError
from anynan._steps.monitor import Reading, Rows, Site
from anynan._steps.tracker import Tracker
from anynan.errors import AnomalyError
from anynan.options import Options
from anynan.torch.call.reached import Reached
from anynan.torch.call.rootcall import RootCall, argument_names
from anynan.torch.call.state import State
from anynan.torch.distributed.ranks import Ranks
from anynan.torch.graphs import graphs as compiled
from anynan.torch.graphs.fixed import Board
from anynan.torch.read.paths import clean_path, inner, join, remark_slow_paths
from anynan.torch.read.probes import DTYPE_MAX, DTYPE_NAME, bad_rows, measure
from anynan.torch.read.slots import DeferredSlots, ImmediateSlots, Slots
from anynan.torch.read.transforms import say_unseen
from anynan.torch.session import entrances
from anynan.torch.session.growth import registered
from anynan.torch.step import endings
from anynan.torch.step import scalers as scaling
from anynan.torch.step.hooks import (
    ForwardHook,
    RootEnter,
    RootExit,
    tensors,
)
from anynan.torch.step.weights import bad_parameters, check_parameters, write_parameters
from anynan.torch.update import updates
from anynan.torch.update.gradients import Held, gradient_site

# Seconds to wait for another thread's second run, which may itself wait for this thread.
_PATIENCE = 10.0


class Own(threading.local):
    """Hold the state of each thread."""

    state: State | None = None


class _Rest:
    """Stand in for it while hooks have to stay, but not to look."""

    def __init__(self) -> None:
        self.state: State | None = State(ImmediateSlots(()))
        self.state.idle = True


class Session:
    """Watch modules for one tracker; the base of a tracked model and a tracked step."""

    backend = "torch"
    roots_are_models = False
    # Whether the open step is one call of a function, which a replay runs as a whole.
    in_step = False

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tracker: Tracker
        self.models: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        self.wanted: set[str] | None = None
        self.handles: list[Any] = []
        self.own: Own | _Rest = Own()
        # Held strongly: what an ended thread left unread is still read at the end.
        self._states: set[State] = set()
        self.masks: set[str] = set()
        self._gone = False
        self._looked = False
        self.scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        # Optimizers that a tracked step stepped itself.
        # Held while a failing step is run again.
        self.second_run = threading.Lock()
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._optimizer_known: bool | None = None
        self.ran_before = False  # layers were read in a step that ended before its update
        self.boards: list[Board] = []
        self.renewed = False
        self.parts = False
        self._awake: Own | _Rest | None = None
        self.ranks = Ranks(options.across_ranks)
        self.hooked: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.grown = registered.count
        self.reached: Reached | None = None

    # Attaching.

    def attach(self) -> None:
        """Install the hooks; look at weights and buffers once."""
        self._install()
        updates.watch(self)
        check_parameters(self)

    def detach(self) -> None:
        """Undo everything; safe to call twice."""
        self.ranks.leave()
        self._end_operations()
        updates.unwatch(self)
        self._uninstall()
        for state in list(self._states):
            state.reset()

    def __del__(self) -> None:
        # The model is gone, and the hooks with it: what was left unread is said at least.
        self._gone = True
        try:
            with self.tracker.softly(), self.ranks.alone(self):
                for state in list(self._states):
                    endings.read_rest(self, state)
            updates.unwatch(self)
        except Exception:  # noqa: BLE001, S110  nothing may be raised here
            pass

    def set_paused(self, paused: bool) -> None:
        """Take the hooks away while paused: nothing is left to cost anything."""
        if paused:
            self.read()
            self._end_operations()
            updates.unwatch(self)
            if compiled.ran(self):
                # Graphs compiled without the hooks would not take them up again.
                self._awake, self.own = self.own, _Rest()
            else:
                self._uninstall()
        else:
            if self._awake is None:
                self._install()
            else:
                self.own, self._awake = self._awake, None
            for board in self.boards:
                board.take()
            updates.watch(self)

    def _end_operations(self) -> None:
        """Judge what the watchers of operations saw, and end them.

        They stand before what else is put in front of PyTorch's functions, so they go first.
        """
        for state in list(self._states):
            operations, state.operations = state.operations, None
            if operations is not None:
                seen = operations.finish()
                if state.rows is not None and self.tracker.adapter is self:
                    state.slots.read()
                    self.tracker.operations(state.rows, seen)

    def _install(self) -> None:
        for prefix, ref in self.models:
            model = ref()
            if model is not None:
                self._hook_model(prefix, model)

    def _uninstall(self) -> None:
        self.hooked.clear()
        while self.handles:
            self.handles.pop().remove()
        self.boards.clear()

    def _hook_model(self, prefix: str, model: torch.nn.Module) -> None:
        chosen = self.paths(prefix, model)
        root = inner(model)
        enter, leave = RootEnter(self, prefix), RootExit(self)
        self.handles.append(
            enter.on(root.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        )
        first: dict[torch.nn.Module, str] = {}
        for path, module in chosen.items():
            first.setdefault(module, path)
        for module, path in first.items():
            self.hooked.setdefault(module, path)
        registered.know(model)
        self.grown = registered.count
        fixed = compiled.boards(first, model)
        self.boards += {id(layer.board): layer.board for layer in fixed.values()}.values()
        for module, path in first.items():
            hook = ForwardHook(self, path, fixed.get(path))
            self.handles.append(hook.on(module.register_forward_hook(hook)))
        self.handles.append(leave.on(root.register_forward_hook(leave, always_call=True)))
        self.parts = self.parts or (self.roots_are_models and entrances.has_own_loop(root))
        if self.parts:
            entrances.hook_parts(self, prefix, root)
        remark_slow_paths(self.tracker, model)
        compiled.renew(self, model)

    def past(self) -> None:
        """Note that a layer was called past the model."""
        entrances.called_past(self)

    def paths(self, prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Give the watched layers of a model by path, patterns applied."""
        named = self.named(prefix, model)
        if self.options.layers is None and self.options.exclude is None:
            return named
        # A pattern need not match in every model of a step.
        every = dict(named)
        for other, ref in self.models:
            found = ref()
            if found is not None and found is not model:
                every.update(self.named(other, found))
        chosen = choose(every, self.options.layers, self.options.exclude)
        return {path: module for path, module in named.items() if path in chosen}

    def named(self, prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Give the layers of a model by path."""
        return named_layers(prefix, model)

    def watched(self) -> list[str]:
        """List the layers that have a forward pass of their own."""
        found = []
        for prefix, ref in self.models:
            model = ref()
            if model is not None:
                found += [
                    path
                    for path, module in self.paths(prefix, model).items()
                    if "forward" not in vars(module)
                    and type(module).forward is not torch.nn.Module.forward
                ]
        return found

    # One thread's step.

    def state(self) -> State:
        """Return this thread's state."""
        state = self.own.state
        if state is None:
            slots: Slots = (
                ImmediateSlots(self.options.extra)
                if self._immediate()
                else DeferredSlots(self.options.extra)
            )
            state = self.own.state = State(slots)
            self._states -= {other for other in self._states if other.spent}
            self._states.add(state)
        return state

    def _own(self) -> State | None:
        """Return this thread's state, None if nothing ran in it."""
        if compiled.ran(self):  # graphs do not say in which thread they ran
            return self.state()
        return self.own.state

    def _immediate(self) -> bool:
        read = self.options.read
        if read != "auto":
            return read == "immediate"
        return all(p.device.type == "cpu" for _, p in self.parameters())

    def open_step(self, state: State) -> Rows:
        """Open this thread's step."""
        rows = state.rows = self.tracker.rows()
        state.used = True
        if torch.is_grad_enabled():
            if state.slots.deferred and not self._looked:
                self._looked = True
                scaling.find_scalers()
            state.scales = scaling.scales()
        self.ranks.begin(self, state, rows)
        if self.options.parameters:
            write_parameters(self, state, rows)
        return rows

    def end_step(self, state: State) -> None:
        """Close the step: read it now, or every n steps."""
        rows = self.tracker.close_step()
        was_idle, state.idle = state.idle, True
        operations, state.operations = state.operations, None
        try:
            if operations is not None:
                seen = operations.finish()
                if rows is not None:
                    state.slots.read()
                    self.tracker.operations(rows, seen)
            if rows is not None:
                state.ended.append(rows)
                every = self.options.read
                if isinstance(every, int) and (rows.step + 1) % every and not rows.failed:
                    return
                endings.settle(self, state)
                self.ranks.end(self, state, rows)
        finally:
            state.idle = was_idle
            state.reset()

    def read(self) -> None:
        """Read and judge this thread's unread rows now."""
        state = self._own()
        if state is None or state.idle:
            return
        compiled.take(self, state)
        state.idle = True
        try:
            with self.ranks.alone(self, state):
                endings.read_open(self, state)
        finally:
            state.idle = False

    def finish(self) -> None:
        """End the open steps and read what is left."""
        state = self._own()
        with self.ranks.alone(self):
            for other in list(self._states):
                if other is not state:
                    endings.read_rest(self, other)
            if state is None or state.idle:
                return
            compiled.take(self, state)
            if state.rows is not None:
                self.end_step(state)
        self.read()

    def flag(self, state: State, rows: Rows, order: int, value: Any) -> None:
        """Have one reading judged while its layer is still on the stack."""
        order = compiled.take_first(self, state, rows, order)
        with self.aside(state):
            try:
                self.tracker.flag(rows, order, value)
            except AnomalyError as error:
                # The user's stack is what matters, not the way through the core.
                raise error.with_traceback(None) from None

    @contextmanager
    def aside(self, state: State) -> Iterator[None]:
        """Do work of our own, unseen by the hooks and by the operation watcher."""
        watcher = None if state.operations is None else state.operations.watcher
        was_idle, state.idle = state.idle, True
        if watcher is not None:
            watcher.busy = True
        try:
            yield
        except BaseException:
            state.broken = True
            raise
        finally:
            state.idle = was_idle
            if watcher is not None:
                watcher.busy = False

    def write(self, state: State, rows: Rows, site: Site, call: int, value: torch.Tensor) -> None:
        """Write one reading and have it judged if it needs to be."""
        if state.slots.write(rows, site, call, value):
            self.flag(state, rows, len(rows.lo) - 1, value)

    def unseen(self, path: str, x: torch.Tensor) -> None:
        """Say that a float tensor could not be looked at."""
        if x.dtype in DTYPE_NAME:
            say_unseen(self, path, x)

    # Root calls.

    def start_root(
        self, state: State, fn: Callable[..., Any], layer: str | None, args: Any, kwargs: Any
    ) -> RootCall:
        """Remember a root call for a replay, and read its inputs."""
        rows = state.rows
        if rows is None:
            rows = self.open_step(state)
        elif not rows.holding:  # what opened it may have been an evaluation
            self.ranks.begin(self, state, rows)
        named = list(self._named_inputs(fn, args, kwargs))
        root = RootCall.now(fn, tuple(args), dict(kwargs), [x for _, x in named], state.calls)
        if self.reached is not None:
            root.began = self.reached.begin(self, _given(fn, args, kwargs))
        state.root = root
        if self.options.level == "operation" and state.operations is None:
            from anynan.torch.replay.operations import Operations

            with self.aside(state):
                state.operations = Operations(self, root, layer)
        state.step_roots.append((len(rows.sites), weakref.ref(root)))
        for name, x in named:
            # What a part of the model gets from another is no input.
            if x.dtype in DTYPE_NAME and not (self.parts and x.grad_fn is not None):
                site = self.tracker.monitor.site(
                    layer, "input", name, DTYPE_NAME[x.dtype], DTYPE_MAX[x.dtype]
                )
                if state.slots.deferred:
                    rows.live[len(rows.sites)] = weakref.ref(x)
                self.write(state, rows, site, 0, x)
        return root

    def _named_inputs(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for name, item in _given(fn, args, kwargs):
            yield from tensors(item, name)

    def let_pass(self, state: State) -> None:
        """Wait while another thread runs a step again: both would write the same buffers."""
        if state.idle or torch._C._current_graph_task_id() != -1:
            return
        if self.second_run.acquire(timeout=_PATIENCE):
            self.second_run.release()

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
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for prefix, ref in self.models:
            model = ref()
            if model is not None:
                for name, p in model.named_parameters():
                    found.setdefault(id(p), (join(prefix, clean_path(name, model)), p))
        return list(found.values())

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """List the buffers by their full clean names."""
        return [
            (join(prefix, clean_path(name, model)), x)
            for prefix, ref in self.models
            if (model := ref()) is not None
            for name, x in model.named_buffers()
        ]

    def held(self, optimizer: torch.optim.Optimizer) -> "Held":
        """List the watched parameters that an optimizer holds, with their gradient slots."""
        groups = optimizer.param_groups
        size = sum([len(group["params"]) for group in groups])
        entry = self._held.get(optimizer)
        if entry is None or entry.size != size:
            names = {id(p): name for name, p in self.parameters()}
            mine = [p for group in groups for p in group["params"] if id(p) in names]
            sites = [gradient_site(self, names[id(p)], p) for p in mine]
            entry = self._held[optimizer] = Held.of(size, mine, sites)
        return entry

    def owner(self, state: State) -> State:
        """Return the state of the step whose backward pass runs, maybe in a thread of its own."""
        if state.rows is None and torch._C._current_graph_task_id() != -1:
            open_ = [other for other in self._states if other.rows is not None]
            for other in open_:
                if other.saw_backward or len(open_) == 1:
                    return other
        return state

    def finish_update(self, state: State) -> None:
        """Do what follows an update; nothing for a tracked step, whose call is the step."""

    # What the core asks for.

    def bad_parameters(self) -> list[BadParameter]:
        """List weights with a NaN or an Inf and buffers with a NaN or +Inf."""
        return bad_parameters(self, read=True)

    def measure(self, value: Any) -> Summary:
        """Summarise a tensor."""
        return measure(value)

    def describe_input(self, reading: Reading, value: Any) -> tuple[int, ...]:
        """List the rows of a batch that hold bad values."""
        return bad_rows(value)

    def loss_scale(self) -> float | None:
        """Give the scale of a gradient scaler that is in use."""
        scaler = None if self.scaler is None else self.scaler()
        if scaler is None:
            scaler = scaling.scaler_of(self)
        return None if scaler is None else float(scaler.get_scale())

    def rank(self) -> int | None:
        """Give the rank, when a process group is up."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return None

    def replay(self, reading: Reading) -> Replay:
        """Run the failing call again under the operation watcher."""
        from anynan.torch.replay.replay import GONE, replay

        if self._gone:
            raise ReplayError(GONE)
        self.ranks.replayed()
        return replay(self, self.owner(self.state()), reading)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one tracked step."""
        return fn(*args, **kwargs)


def named_layers(prefix: str, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Map paths to modules; of a wrapper and what it wraps, which share one, the inner."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        path = join(prefix, clean_path(name, model))
        # A compiled module and what it was compiled from have one path: hooks on the first run
        # outside the graph.
        if not name.endswith("_orig_mod") or path not in found:
            found[path] = module
    return found


def _given(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Name what a model or a function is called with."""
    fn = getattr(fn, "_orig_mod", fn)  # a compiled module's own forward names nothing
    names = argument_names(getattr(fn, "forward", fn))
    named = [(names[i] if i < len(names) else f"args[{i}]", item) for i, item in enumerate(args)]
    return [*named, *kwargs.items()]
