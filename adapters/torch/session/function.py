"""A tracked training step: one call is one step, its models are found and watched."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from anynan._base.identity import SetByIdentity
from anynan._base.interrupts import whole
from anynan._steps.tracked import Tracked
from anynan.torch.call.discovery import find_modules, in_arguments
from anynan.torch.call.growth import registered
from anynan.torch.call.models import Models
from anynan.torch.call.state import State
from anynan.torch.messages import NO_MODULE_FOUND, SCRIPTED
from anynan.torch.private import task, version
from anynan.torch.session.session import Session, session_of
from anynan.torch.step.hooks import WeightHook, keep_gradients
from anynan.torch.weights.optimizers import Held, exact_site, gradient_site
from anynan.torch.weights.scalers import in_use


class FunctionSession(Session):
    """Watch a function: its models, its inputs, what it returns, its updates."""

    def __init__(self, fn: Callable[..., Any], tracker: Tracked) -> None:
        super().__init__(tracker, Models(tracker.judge.options, fn))
        self._searched = False
        # Until an optimizer is seen: the gradients as a step found them, and their slots.
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], int]] | None = None
        self._loose: Held | None = None
        # What is on weights that no optimizer of PyTorch's holds, each with its slot.
        self._by_hand: list[Any] = []
        self._written: list[int] = []  # how often each weight was written to as the step began
        self._seen: SetByIdentity[torch.nn.Module] = SetByIdentity()

    def attach(self) -> None:
        """Install what can be found already; the rest comes with the first call."""
        self._find((), {})
        super().attach()

    def give(self, models: list[torch.nn.Module]) -> None:
        """Watch models that may be out of the function's sight."""
        self._searched = True
        self._find((), {"state": models})

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        models = self.models
        models.refs = [(prefix, ref) for prefix, ref in models.refs if ref() is not None]
        known = {id(ref()) for _, ref in models.refs}
        found = find_modules(self.models.fn, args, kwargs)
        scripted = [m for m in found.values() if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            models.scripted.add(*scripted)
            self.tracker.judge.say(SCRIPTED())
        new = {
            name: model
            for name, model in found.items()
            if id(model) not in known and model not in models.scripted
        }
        if not new:
            return False
        alone = not models.refs and len(new) == 1
        taken = {prefix for prefix, _ in models.refs}
        installed = bool(self.layers.handles)
        self.optimizers.forget()
        for name, model in new.items():
            prefix = "" if alone else name
            while prefix in taken:
                prefix += "_"
            taken.add(prefix)
            models.refs.append((prefix, weakref.ref(model)))
            self._seen.add(*model.modules())
        if installed or self._searched:
            for prefix, ref in models.refs[-len(new) :]:
                found_model = ref()
                if found_model is not None:
                    self.layers.hook(prefix, found_model)
        return True

    def _unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a later call brings a model that the first one did not."""
        return any(model not in self._seen for model in in_arguments(args, kwargs))

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step: read its inputs, its layers, its gradients and what it returns."""
        if not self._searched or self._unknown(args, kwargs):
            first, self._searched = not self._searched, True
            if self._find(args, kwargs):
                self.check_weights()
            if first and not self.models.refs and not self.models.scripted:
                name = getattr(fn, "__name__", fn)
                self.tracker.judge.say(NO_MODULE_FOUND(name=name))
        state = self.threads.state()
        if self.replays.lock.locked():
            self.replays.let_pass(state)
        if state.idle or state.depth:
            return fn(*args, **kwargs)
        if self.layers.grown != registered.count:
            self.follow()
        others: list[State] = []
        lent = ExitStack()
        try:
            self._suspend(others)
            return self._step(state, fn, args, kwargs, lent, others)
        finally:  # again, where Ctrl-C came before the step had put things back
            if state.depth or others:
                self._put_back(state, lent, others)

    def _step(
        self, state: State, fn: Callable[..., Any], args: Any, kwargs: Any,
        lent: ExitStack, others: list[State],
    ) -> Any:  # fmt: skip
        try:
            state.depth = 1
            if state.updated:
                self.updates.owed = None
            state.updated = False  # an update since the last step is none of this one's
            self.steps.open(state)
            self._before = None
            if not self.models.stepped and self.options.backward:
                grads = ((p, p.grad) for _, p in self.models.with_gradient())
                self._before = {id(p): (weakref.ref(g), version(g)) for p, g in grads}
            self._follow_weights()
            self._written = self._writes() if self._by_hand else []
            root = self.start_root(state, fn, None, args, kwargs)
            reached = self.replays.reached
            if reached is not None:
                now = lent.enter_context(reached.lending(args, kwargs))
                if now[0] is not args or now[1] is not kwargs:
                    args, kwargs = now
                    root.lend(args, kwargs)
            with nullcontext() if state.operations is None else state.operations.watching():
                result = fn(*args, **kwargs)
            self.steps.take(state)
            self.read_result(state, result)
            self._read_gradients(state)
            if self.options.parameters and state.rows is not None:
                self.steps.write_weights(state, state.rows)
        except BaseException as error:
            # What broke the step may be what anynan looks for: judge it, then let it go on.
            with self.tracker.judge.carried_by(error, state.rows), self.ranks.alone():
                self.look_back(state, error)
                self.steps.take(state)
                self._close(state)
            raise
        else:
            self._close(state)
        finally:
            self._put_back(state, lent, others)
        return result

    @whole
    def _put_back(self, state: State, lent: ExitStack, others: list[State]) -> None:
        """Leave a thread as it was before its step; safe to do again."""
        state.end_operations()
        lent.close()
        state.idle = state.in_optimizer = False
        while others:
            others.pop().idle = False
        state.depth = 0

    def detach(self) -> None:
        """Undo everything; safe to call twice."""
        super().detach()
        self._unhook_weights()

    @whole
    def _unhook_weights(self) -> None:
        while self._by_hand:
            self._by_hand.pop().remove()

    def _follow_weights(self) -> None:
        """Read gradients as they come where no optimizer is known to take them.

        The step may update its weights by hand, or an optimizer that is none of PyTorch's: the
        gradients may be gone as it ends.
        """
        if self.models.stepped or not self.options.backward or self.optimizers.exist():
            if self._by_hand:
                self._unhook_weights()
        elif not self._by_hand and not any(
            torch.nn.parameter.is_lazy(p) for _, p in self.models.parameters()
        ):
            self._hook_weights()

    @whole
    def _hook_weights(self) -> None:
        for name, p in self.models.parameters():
            if p.requires_grad:
                site = gradient_site(self.tracker.judge.monitor, name, p)
                site = exact_site(self.tracker.judge.monitor, site)
                self._by_hand.append(p.register_hook(WeightHook(self.steps, site)))

    def _read_gradients(self, state: State) -> None:
        """Read the gradients of a backward pass that no known optimizer took.

        Whatever takes them (the step itself, an optimizer of another library, one that steps
        after this call) is not seen doing it.
        """
        rows, before = state.rows, self._before
        if before is None or rows is None or rows.failed is not None or rows.held is not None:
            return
        if self.models.stepped or in_use(state.scales):  # what is scaled may overflow
            return
        if self.updates.owed is not None:  # what they are added to is bad, and was told
            return
        if self._by_hand and state.operations is None:  # they were read as they came
            return
        pairs = [
            (name, p)
            for name, p in self.models.with_gradient()
            if not _is_old(p.grad, before.get(id(p)))
        ]
        if not pairs:
            return
        if state.operations is not None:
            state.operations.look_at_gradients()
            return
        weights: list[torch.Tensor] = [p for _, p in pairs]
        known = [] if self._loose is None else self._loose.parameters
        if list(map(id, known)) != list(map(id, weights)):
            sites = [gradient_site(self.tracker.judge.monitor, name, p) for name, p in pairs]
            self._loose = Held(len(weights), weights, sites)
        assert self._loose is not None
        self.updates.gradients.read(state, rows, self._loose, [p.grad for p in weights], None)

    def _close(self, state: State) -> None:
        rows = state.rows
        if rows is not None:
            # The update may come after the call, as in Lightning's training_step.
            by_hand = bool(self._by_hand) and state.saw_backward
            state.updated = state.updated or (by_hand and self._written != self._writes())
            ran = any(site.phase == "forward" and site.layer is not None for site in rows.sites)
            self.updates.ran_before = ran or self.updates.ran_before
            trained = state.saw_backward
            self.steps.close(state)
            if trained and rows.failed is not None:
                self.updates.owed = self.updates.owed or rows
            if by_hand and rows.failed is not None:
                self.tracker.judge.applied_bad_update(rows)

    def _writes(self) -> list[int]:
        """Count the writes to each weight."""
        return [version(p) for _, p in self.models.parameters()]

    def _suspend(self, suspended: list[State]) -> None:
        """Let the outer step own what trackers of its models would report; note their states."""
        for _, model in self.models.living():
            other = session_of(model)
            if other is not None and other is not self:
                state = other.threads.state()
                if not state.idle:
                    suspended.append(state)
                    state.idle = True

    def read_loss(self, loss: Any) -> None:
        """Read what the step that runs is about to differentiate, which it need not return."""
        state = self.threads.state()
        if state.depth and not state.idle:
            self.read_result(state, loss)

    def enter_root(self, module: Any, args: Any, kwargs: Any, path: str) -> None:
        """Keep what a model's own call is given: it can be run again where the step can not."""
        state = self.threads.own.state or self.threads.state()
        if self.replays.lock.locked():
            self.replays.let_pass(state)
        if state.idle or self.ranks.rehearses(state) or not state.depth or task() != -1:
            return
        state.depth += 1
        if state.depth == 2 and self.options.replay and state.operations is None:
            values = [x for _, x in self.models.inputs(module, args, kwargs)]
            state.inner = self.note_call(state, module, args, kwargs, values)
            state.inners.append((path, weakref.ref(state.inner)))

    def exit_root(self, module: Any, args: Any, output: Any) -> None:
        """Leave the step open: it ends when the function returns."""
        state = self.threads.state()
        if self.ranks.rehearsed(state) or state.idle:
            return
        if state.depth > 1 and task() == -1:
            state.depth -= 1
            if state.depth == 1 and state.inner is not None and output is not None:
                keep_gradients(self.steps, state, state.inner, output)
        if self.graphs.boards and not state.deferred:
            self.steps.take(state)


def _is_old(grad: torch.Tensor, before: "tuple[weakref.ref[torch.Tensor], int] | None") -> bool:
    """Tell whether a gradient is the one that the step found, and nothing was added to it."""
    return before is not None and before[0]() is grad and before[1] == version(grad)
