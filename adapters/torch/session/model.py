"""A tracked module: its root calls, and where its steps end."""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from anynan._base import tracebacks
from anynan._base.identity import SetByIdentity
from anynan._steps.tracked import Tracked
from anynan.errors import AnomalyError
from anynan.torch.call import noted
from anynan.torch.call.growth import registered
from anynan.torch.call.models import Models
from anynan.torch.call.reached import Reached
from anynan.torch.call.rootcall import RootCall
from anynan.torch.call.state import State
from anynan.torch.graphs.compiler import whole
from anynan.torch.private import call_code, is_compiler_loaded, original, task, version
from anynan.torch.read.tensors import tensors
from anynan.torch.session.session import Session, tracked
from anynan.torch.step.hooks import keep_gradients
from anynan.torch.weights.scalers import rescaled

# Without an optimizer to end the step, this many readings do.
MAX_ROWS = 50_000


class ModelSession(Session):
    """Watch one module; its step ends at its optimizer's step."""

    def __init__(
        self, model: torch.nn.Module, tracker: Tracked, models: Models | None = None
    ) -> None:
        super().__init__(tracker, models or Models(tracker.judge.options))
        self.models.refs = [("", weakref.ref(model))]
        self._joined: SetByIdentity[torch.nn.Module] = SetByIdentity()
        self._kind = type(model).__name__

    def follows(self, module: torch.nn.Module) -> bool:
        """Tell whether a module is made of the very parts of this model, which is gone."""
        parts = [*module.modules()][1:]
        return (
            self.tracker.fn is None
            and self._kind == type(module).__name__
            and ({*self.models.hooked} == {*parts})
        )

    def take_over(self, module: torch.nn.Module) -> None:
        """Watch a module in the place of the model that is gone, in the same steps."""
        self.models.refs = [("", weakref.ref(module))]
        self.tracker._target = weakref.ref(module)
        tracked[module] = weakref.ref(self)
        self.optimizers.forget()
        self.layers.remove()
        self.layers.install()

    def join(self, module: torch.nn.Module) -> None:
        """Watch a module that is handed what the model made, as a loss is, in the same steps."""
        models, name = self.models, type(module).__name__
        taken = {path.partition(".")[0] for path in models.layers().values()}
        while name in taken:
            name += "_"
        models.refs.append((name, weakref.ref(module)))
        models.parts = True
        self._joined.add(module)
        self.layers.hook(name, module)

    def through(
        self, fn: Any, run: Callable[..., Any], reached: Reached, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a compiled function that runs the model: to a replay it is the model's own call.

        Args:
            fn: The function as it was before.
            run: What is called.
            reached: What its code reaches.
            args: With what.
            kwargs: By name.
        """
        out, self.reaching = None, reached if self.options.replay else None
        try:
            self.enter_root(fn, args, kwargs, "")
        finally:
            self.reaching = None
        try:
            out = run(*args, **kwargs)
        finally:
            self.exit_root(fn, args, out)
        return out

    def enter_root(self, module: Any, args: Any, kwargs: Any, path: str) -> None:
        """Begin a root call: end the step before it if that is over, read the inputs."""
        state = self.threads.own.state or self.threads.state()
        if self.replays.lock.locked():
            self.replays.let_pass(state)
        if state.idle or self.ranks.rehearses(state):
            return
        noted.within_models()
        if state.depth and not _running(module, state.root):
            state.depth = 0  # an interrupt left the call before: its exit hook never ran
        state.depth += 1
        if state.depth > 1 or task() != -1:
            return
        if self.layers.grown != registered.count:
            self.follow()
        if state.rows is not None:
            if self.graphs.boards:
                self.steps.take(state)
            if module not in self._joined and self._over(state, path):
                self.steps.close(state)
        if state.rows is None and is_compiler_loaded():
            state.weight = self._one_weight()
        self.start_root(state, module, None if self.reaching else path, args, kwargs)
        if state.operations is not None:
            state.operations.begin()

    def _one_weight(self) -> "tuple[weakref.ref[Any], str, int] | None":
        """Give a weight's module, its name there, and how often it was written to.

        A weak reference to the weight itself would keep PyTorch from swapping it.
        """
        modules = (module for _, model in self.models.living() for module in model.modules())
        for module in modules:
            for name, p in module._parameters.items():
                if p is not None and not is_lazy(p):
                    return weakref.ref(module), name, version(p)
        return None

    def _over(self, state: State, path: str) -> bool:
        rows = state.rows
        if rows is None or state.in_optimizer:
            return False
        if state.broken or state.updated or len(rows.sites) > MAX_ROWS:
            return True
        if not state.saw_backward and self.options.backward:
            part = self.models.parts and path not in state.calls  # of the same pass, as it seems
            return rows.failed is not None and not part
        if rescaled(state.scales, self.optimizers.mine()):  # the update was skipped
            return True
        if whole and state.weight is not None:
            owner, name, writes = state.weight
            p = getattr(owner(), "_parameters", {}).get(name)
            if p is not None and version(p) != writes:
                self.tracker.judge.updated(rows.number)
                return True
        return not self.optimizers.exist()

    def exit_root(self, module: Any, args: Any, output: Any) -> None:
        """End a root call; without gradients it is a whole step."""
        state = self.threads.own.state or self.threads.state()
        if self.ranks.rehearsed(state) or state.idle:
            return
        again = task() != -1  # as enter_root asks: nothing was entered
        root = self._left(state, again=again)
        if root is None:
            return
        if output is None and sys.exc_info()[0] is not None:
            self._raised(state, module)
            return
        self.writes = self.writes or (not again and root.changed())
        if root.grad and not torch.is_grad_enabled():
            state.trained = True  # checkpointed as a whole: the graph comes when it runs again
        if root.of_function:
            self.read_result(state, output)
        state.trained = keep_gradients(self.steps, state, root, output) or state.trained
        if state.trained and not again:
            self._note_on(output)
        if len(state.calls) < 2 and not root.of_function and self._has_layers(module):
            self.graphs.missed(called=True)
        # A part without gradients, as a frozen one, is not the whole step.
        part = self.models.parts and torch.is_grad_enabled()
        over = not (state.trained or again or part)
        if self.graphs.boards and (over or not state.deferred):
            self.steps.take(state)
        if over:
            self.steps.close(state, evaluation=True)

    def _left(self, state: State, *, again: bool) -> RootCall | None:
        """Count a call as left; give the root call that has ended, if one has."""
        if state.depth:
            state.depth -= 1
        if state.depth:
            return None
        if not again and state.operations is not None:
            state.operations.end()
        root: RootCall | None
        root = self.threads.owner(state).regions.root() if again else state.root
        return root

    def _raised(self, state: State, module: Any) -> None:
        """End a call that raised: torch walks through the hooks; the next call ends the step."""
        state.broken = True
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and _raised_by(module, error):
            judge = self.tracker.judge
            with judge.carried_by(error, state.rows, raising=False), self.ranks.alone():
                self.look_back(state, error)

    def _has_layers(self, module: Any) -> bool:
        """Tell whether a call should have come by layers: compiled code that ran has none."""
        layers = next(module.children(), None) is not None
        return self.options.level != "step" and layers and not self.graphs.ran_now()

    def _note_on(self, output: Any) -> None:
        """Note what is made of the model's output, up to the backward pass."""
        if not (self.options.replay and self.options.backward):
            return
        notes = noted.begin()
        for _, x in tensors(output, "output"):
            notes.hold(x)
        noted.behind_models()


def _raised_by(module: Any, error: Exception) -> bool:
    """Tell whether an exception came out of this module's call, and is none of anynan's own."""
    through = [] if isinstance(error, AnomalyError) else tracebacks.frames(error)
    calls = (x.tb_frame for x in through if x.tb_frame.f_code is call_code)
    return any(frame.f_locals.get("self") is module for frame in calls)


def _running(module: Any, root: RootCall | None) -> bool:
    """Tell whether a call is on the stack besides the one that begins: the root's, or its own.

    A compiled module's call is one of the module it was made of.
    """
    if root is not None and root.of_function:  # it ends by itself, whatever comes
        return True
    calls, mine = 0, original(module)
    outer = mine if root is None or root.fn is None else original(root.fn)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call_code:
            found = original(frame.f_locals.get("self"))
            if found is outer and outer is not mine:
                return True
            calls += found is mine
        frame = frame.f_back
    return calls > 1
