"""One tracked target: what the core asks of its adapter, and its root calls."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anynan._arrays.containers import leaves
from anynan._base.identity import ByIdentity
from anynan._base.interrupts import whole
from anynan._calls.collector import Collector
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import Reading
from anynan._steps.adapter import BaseAdapter
from anynan._steps.framework import EVERY_OPERATION, Escalation
from anynan._steps.messages import INPUT_COMPUTED, INPUT_TRAINED, MODEL_GONE
from anynan._steps.tracked import Tracked
from anynan.errors import AnomalyError
from anynan.torch.call import noted
from anynan.torch.call.models import Models, given
from anynan.torch.call.reached import Reached
from anynan.torch.call.rootcall import RootCall
from anynan.torch.call.state import State
from anynan.torch.call.threads import Threads
from anynan.torch.distributed.ranks import Ranks
from anynan.torch.graphs.graphs import Graphs
from anynan.torch.read import probes
from anynan.torch.read.probes import DTYPE_NAME, FLOAT8, local, same_memory
from anynan.torch.read.slots import site_of
from anynan.torch.read.tensors import tensors
from anynan.torch.replay.collectives import world
from anynan.torch.replay.names import node_name
from anynan.torch.replay.operations import Operations
from anynan.torch.replay.replay import Replays
from anynan.torch.replay.saving import host
from anynan.torch.session.layers import Layers
from anynan.torch.step.hooks import read_before
from anynan.torch.step.steps import Steps
from anynan.torch.update.updates import Updates
from anynan.torch.weights.optimizers import Optimizers
from anynan.torch.weights.scalers import Scalers
from anynan.torch.weights.weights import Weights


class Session(BaseAdapter):
    """Watch modules for one tracker; the base of a tracked model and a tracked step.

    Args:
        tracker: What judges.
        models: What is watched.
    """

    backend = "torch"
    probes = probes
    in_order = True
    updates_type: type[Updates] = Updates

    def __init__(self, tracker: Tracked, models: Models) -> None:
        super().__init__(tracker)
        self.models = models
        self.threads = Threads(models)
        self.graphs = Graphs(tracker, models)
        self.scalers = Scalers(models)
        self.optimizers = Optimizers(tracker.judge.monitor, models)
        self.weights = Weights(tracker.judge.monitor, models, self.optimizers)
        self.replays = Replays(models, self.threads, self.graphs, self.scalers)
        self.reaching: Reached | None = None  # what a function that is about to run reaches
        self.writes = False  # whether the model was seen to write into what it is given
        self.ranks = Ranks(tracker, models, self.replays)
        self.steps = Steps(
            tracker, self.threads, self.graphs, self.ranks, self.weights, self.scalers
        )
        self.updates = self.updates_type(self.steps, models, self.optimizers)
        self.layers = Layers(models, self.steps, self.enter_root, self.exit_root)
        self.updates.called_past = self.layers.called_past
        self._gone = False

    # Attaching.

    def attach(self) -> None:
        """Install the hooks; look at weights and buffers once."""
        self.layers.install()
        self.updates.watch()
        self.check_weights()

    def detach(self) -> None:
        """Undo everything; safe to call twice."""
        self.ranks.leave()
        self._leave_notes()
        self._end_operations()
        self.updates.unwatch()
        self.layers.remove()
        self.steps.reset()

    def __del__(self) -> None:
        # The model is gone, and the hooks with it: what was left unread is said at least.
        self._gone = True
        try:
            self.steps.read_rest()
            self.updates.unwatch()
            self._leave_notes()
        except Exception:  # noqa: BLE001, S110  nothing may be raised here
            pass

    def _leave_notes(self) -> None:
        """Let go of what was noted behind models, unless another one is still watched."""
        others = (session_of(model) for model in list(tracked))
        if all(other is None or other is self for other in others):
            noted.leave()

    def set_paused(self, paused: bool) -> None:
        """Take the hooks away while paused: nothing is left to cost anything."""
        if paused:
            self.steps.read()
            self._end_operations()
            self.updates.unwatch()
            if self.graphs.ran():
                # Graphs compiled without the hooks would not take them up again.
                self.threads.sleep()
            else:
                self.layers.remove()
        else:
            if not self.threads.wake():
                self.layers.install()
            self.graphs.clear()
            self.updates.watch()

    def _end_operations(self) -> None:
        self.steps.end_operations(judge=self.tracker.judge.adapter is self)

    def watched(self) -> list[str]:
        """List the layers that have a forward pass of their own."""
        return self.models.watched()

    def follow(self) -> None:
        """Watch the layers that were put into a model since."""
        if self.layers.follow():
            self.optimizers.forget()
            # No update made what is bad in new layers.
            self.tracker.judge.known_clean(self.tracker.step)
            self.check_weights()

    def check_weights(self) -> None:
        """Look at every weight and buffer once."""
        bad = self.weights.bad()
        try:
            if any(item.buffer for item in bad):
                named = dict(self.models.buffers())
                self.replays.begin([named[item.name] for item in bad if item.buffer])
            self.attached(bad)
        except AnomalyError as error:
            # The user's stack is what matters, not the way through the core.
            raise error.with_traceback(None) from None

    def written(self, reading: Reading, bad: list[BadParameter]) -> Replay | None:
        """Compute again what the program wrote into weights before they were watched."""
        named = dict(self.weights.all())
        return self.replays.written(reading, [named[item.name] for item in bad])

    # Steps.

    def read(self) -> None:
        """Read and judge this thread's unread rows now."""
        self.steps.read()

    def finish(self) -> None:
        """End the open steps and read what is left."""
        self.steps.finish()

    # Root calls.

    def enter_root(self, module: Any, args: Any, kwargs: Any, path: str) -> None:
        """Begin a root call of a tracked model."""
        raise NotImplementedError

    def exit_root(self, module: Any, args: Any, output: Any) -> None:
        """End a root call of a tracked model."""
        raise NotImplementedError

    def start_root(
        self, state: State, fn: Callable[..., Any], layer: str | None, args: Any, kwargs: Any
    ) -> RootCall:
        """Remember a root call for a replay, and read its inputs."""
        rows = state.rows
        if rows is None:
            rows = self.steps.open(state)
        elif not rows.holding:  # what opened it may have been an evaluation
            self.ranks.begin(state, rows)
        named = list(self.models.inputs(fn, args, kwargs))
        root = state.root = self.note_call(state, fn, args, kwargs, [x for _, x in named])
        if self.tracker.judge.level == "operation":
            with state.aside():
                if state.operations is None:
                    self._watch_operations(state, root, layer)
                    rows.watch_operations(functools.partial(self._seen_around, state))
                else:
                    state.operations.enter(root)
        state.step_roots.append((len(rows.sites), weakref.ref(root)))
        handed = self.models.parts or self.models.handed
        for name, x in named:
            if x.requires_grad and root.grad:
                noted.enters(x)
            # What a part of the model gets from another is no input.
            if x.dtype in DTYPE_NAME and not (handed and x.grad_fn is not None):
                site = site_of(self.tracker.judge.monitor, layer, "input", name, x)
                if state.slots.deferred:
                    rows.keep(len(rows.sites), weakref.ref(x))
                self.steps.write(state, rows, site, 0, x)
        return root

    @whole
    def _watch_operations(self, state: State, root: RootCall, layer: str | None) -> None:
        state.operations = Operations(self.replays.scene, root, layer, self.graphs.ran)

    def _seen_around(self, state: State, reading: Reading, value: Any) -> Replay | None:
        """Tell what was seen of every operation, and of those behind the model."""
        found: Replay | None = state.operations.seen(reading, value)
        if found is not None and found.incoming:
            behind = self.replays.tails.replay(state.thread.ident, reading, found)
            return behind or found
        return found

    def read_result(self, state: State, result: Any) -> None:
        """Read what a function returned, or its loss."""
        rows = state.rows
        if rows is None or rows.failed is not None:
            return
        for name, x in tensors(result, "result", objects=True):
            if x.dtype in DTYPE_NAME:
                one = x.numel() == 1
                phase: Any = "loss" if one else "forward"
                label = "loss" if name == "result" and one else name
                site = site_of(self.tracker.judge.monitor, None, phase, label, x)
                known = read_before(state, rows, x)
                if known is None:
                    self.steps.write(state, rows, site, 0, x)
                else:
                    rows.add(site, 0, *known)
        for name, x in leaves(result, "result"):
            if isinstance(x, float):
                site = self.tracker.judge.monitor.site(
                    None, "loss", "loss" if name == "result" else name, "float64", None
                )
                if state.slots.deferred:
                    state.slots.read()
                rows.add(site, 0, x, x)
                if not (-site.limit <= x <= site.limit):
                    value = torch.tensor(x, dtype=torch.float64, device="cpu")
                    self.steps.flag(state, rows, rows.last, value)

    def note_call(
        self, state: State, fn: Callable[..., Any], args: Any, kwargs: Any,
        values: list[torch.Tensor],
    ) -> RootCall:  # fmt: skip
        """Take what a second run of a call will need; the tensors among its arguments, too."""
        root = RootCall.now(fn, tuple(args), dict(kwargs), values, state.calls)
        if self.writes:
            root.set_apart()
        root.reached = self.reaching or self.replays.reached
        if root.reached is not None:
            # Tensors hold nothing else; the rest is looked through by name.
            only = not kwargs and all(type(x) is torch.Tensor for x in args)
            named = [] if only else given(fn, args, kwargs)
            root.began = root.reached.begin(self.models, named)
        return root

    def look_back(self, state: State, error: BaseException) -> None:
        """Judge what a call read until an exception ended it, and what it took last."""
        self.steps.take(state)
        rows, operations = state.rows, state.operations
        if rows is None:
            return
        with state.aside():
            state.slots.read()
            self.tracker.judge.raised(
                rows,
                error,
                lambda: (
                    self.replays.up_to(state, rows)
                    if operations is None
                    else operations.ended(error)
                ),
            )

    # What the core asks for.

    def bad_parameters(self) -> list[BadParameter]:
        """List weights with a NaN or an Inf, and buffers that were so when the call began."""
        return self.weights.bad(read=True, root=self.threads.owner().root)

    def is_bad(self, item: BadParameter) -> bool:
        """Look at one weight or buffer."""
        return self.weights.is_bad(item.name)

    def memory(self, value: Any) -> Callable[[Any], bool] | None:
        """Tell whether another tensor is of the same storage: detached, a view."""
        return same_memory(value)

    def bad_rows(self, value: Any) -> tuple[int, ...]:
        """List the rows of a bad input that are bad; of a shard those of this rank."""
        held = local(value)
        return super().bad_rows(held.float() if getattr(held, "dtype", None) in FLOAT8 else held)

    def computed(self, value: Any) -> Sequence[str]:
        """Tell an input that has a graph, which operations before the call made, or is trained."""
        made = getattr(value, "grad_fn", None)
        if made is None and not getattr(value, "requires_grad", False):
            return ()
        name, of_model = self.tracker.name, self.tracker.of_model
        step = "your training step" if of_model else "the function around it"
        instead = f"anynan.torch.track({step})"
        if made is None:
            return (INPUT_TRAINED(name=name, instead=instead),)
        return (INPUT_COMPUTED(operation=node_name(made.name()), name=name, instead=instead),)

    def loss_scale(self) -> float | None:
        """Give the scale of a gradient scaler that is in use."""
        return self.scalers.scale(self.threads.state())

    def rank(self) -> int | None:
        """Give the rank, when a process group is up."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return None

    def replay(self, reading: Reading) -> Replay:
        """Run the failing call again under the operation watcher."""
        if self._gone:
            raise ReplayError(MODEL_GONE())
        self.ranks.replayed()
        state = self.threads.owner()
        try:
            return self.replays.run(state, reading)
        finally:
            for name, x in self.replays.handed():
                if state.rows is not None:
                    self.tracker.judge.handed(state.rows, name, x)

    def escalation(self) -> Escalation:
        """Watch every operation of the next steps."""
        return EVERY_OPERATION

    def replay_call(self, reading: Reading) -> Replay | None:
        """Run a model's own call inside the failing step again."""
        if self._gone:
            return None
        return self.replays.run_inner(self.threads.owner(), reading)

    def capture(self, reading: Reading, into: Collector) -> None:
        """Run the failing call again for a bundle, with the weights of its layer."""
        for name, x in [*self.models.parameters(), *self.models.buffers()]:
            inside = into.layer is not None and f"{name}.".startswith(f"{into.layer}.".lstrip("."))
            if inside or name == into.event.parameter:
                into.add("weights", name, x, host)
        super().capture(reading, into)

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the failing call again with operations repaired; not where ranks take part in it."""
        if self._gone or world() is not None:
            return None
        return self.replays.attempt(self.threads.owner(), reading, repairs)


tracked: ByIdentity[torch.nn.Module, weakref.ref[Session]] = ByIdentity()


def session_of(model: torch.nn.Module) -> Session | None:
    """Return the session of a tracked model, None if it is not tracked."""
    ref = tracked.get(model)
    session = None if ref is None else ref()
    return session if session is not None and session.layers.handles else None
