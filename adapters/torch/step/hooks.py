"""The hooks: small objects that write readings and let go of everything else."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from anynan._base import context
from anynan._base.summary import Summary
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan.torch.call.rootcall import Alive, RootCall
from anynan.torch.call.state import State
from anynan.torch.graphs.compiler import run_outside
from anynan.torch.graphs.fixed import Layer
from anynan.torch.private import (
    PROXY,
    hook_last,
    is_batch,
    is_tracing,
    mode,
    own_hooks,
    task,
    version,
)
from anynan.torch.read.hooks import CallHook, Hook
from anynan.torch.read.probes import DTYPE_MAX, DTYPE_NAME, measure, nonfinite, plain
from anynan.torch.read.tensors import tensors
from anynan.torch.read.transforms import capturing, say_traced, say_unseen
from anynan.torch.step.steps import Steps
from anynan.torch.weights.scalers import in_use

_Tensor = torch.Tensor
_grad_enabled = torch.is_grad_enabled
_compiler = torch.compiler
_is_dynamo = torch.compiler.is_dynamo_compiling
_expectations = context._expected.get


class GradHook(Hook):
    """Read the gradient that arrives at one output. It must never hold that output."""

    __slots__ = ("call", "expected", "root", "site", "state", "steps")

    def __init__(
        self, steps: "weakref.ref[Steps]", state: State, root: Any, site: Site, call: int,
        expected: dict[str, str] | None,
    ) -> None:  # fmt: skip
        self.steps, self.state, self.root = steps, state, root
        self.site, self.call, self.expected = site, call, expected

    def __call__(self, grad: Any) -> None:
        """Write the reading of this gradient."""
        state = self.state
        rows = state.rows
        if rows is None or state.idle:
            return
        state.saw_backward = True
        if grad is None:
            return
        order = len(rows.sites)
        bad = state.slots.write(rows, self.site, self.call, grad)
        if bad is None:
            return
        if self.expected is not None:
            rows.expect((order,), self.expected)
        if self.root is not None:
            state.roots[order] = self.root
        if bad:
            steps = self.steps()
            if steps is not None:
                steps.flag(state, rows, order, grad)


class WeightHook(Hook):
    """Read the gradients that come to a weight which no known optimizer takes."""

    __slots__ = ("site", "steps")

    def __init__(self, steps: Steps, site: Site) -> None:
        self.steps, self.site = weakref.ref(steps), site

    def __call__(self, grad: Any) -> None:
        """Write the reading of this gradient."""
        steps = self.steps()
        state = None if steps is None else steps.threads.owner()
        # What is scaled may overflow, and somebody else divides it again.
        if steps is None or state is None or state.idle or not state.depth or in_use(state.scales):
            return
        x = None if grad is None else plain(grad)
        if state.rows is not None and x is not None:
            state.saw_backward = True
            if state.slots.write(state.rows, self.site, 0, x):
                steps.flag(state, state.rows, state.rows.last, grad)


def bad_input(args: Any) -> Summary | None:
    """Measure what a layer was given that holds a NaN or +Inf; -Inf may be a mask."""
    for _, x in tensors(args, "input"):
        found = measure(x) if nonfinite(x) else None
        if found is not None and (found.nan or found.posinf):
            return found
    return None


def read_before(state: State, rows: Step, x: torch.Tensor) -> tuple[float, float] | None:
    """Return both ends of what a watched layer gave in this step, where the host has them already.

    A loss that is a layer's output need not be read a second time after the update.
    """
    if version(x) or not state.deferred or len(rows.lo) < len(rows.sites):
        return None
    for hook in own_hooks(x):
        if isinstance(hook, GradHook) and hook.root is state.root:
            grad = hook.site
            name = "output" if grad.tensor == "grad" else grad.tensor.removeprefix("grad of ")
            for order, site in enumerate(rows.sites):
                found = site.layer, site.phase, site.tensor, rows.calls[order]
                if found == (grad.layer, "forward", name, hook.call):
                    return rows.lo[order], rows.hi[order]
    return None


class KeepGradHook(Hook):
    """Keep the gradient that comes into a root output, for a replay of the backward pass.

    Before that the loss is read, where no step of a function gives it.
    """

    __slots__ = ("alive", "index", "root", "state", "steps")

    def __init__(
        self, steps: Steps, state: State, root: RootCall, alive: Alive, index: int
    ) -> None:
        self.steps, self.state, self.alive = weakref.ref(steps), state, alive
        self.root, self.index = root, index

    def __call__(self, grad: torch.Tensor | None) -> None:
        """Keep the gradient."""
        steps = self.steps()
        if grad is None or steps is None or is_batch(grad):  # None where the loss does not use it
            return
        self.root.keep_gradient(self.index, grad, steps.options.keep)
        if not (self.state.in_step or self.state.idle):
            steps.read_root(self.state, _is_read)


def _is_read(x: torch.Tensor) -> bool:
    """Tell whether a tensor is what a watched layer gave."""
    return any(isinstance(hook, GradHook) for hook in own_hooks(x))


def keep_gradients(steps: Steps, state: State, root: RootCall, output: Any) -> bool:
    """Have a call keep the gradients that come into its outputs; tell whether any may come."""
    trains = False
    found = (
        [output]
        if type(output) is _Tensor
        else [x for _, x in tensors(output, "output", objects=True)]
    )
    alive = root.stay(found)
    for i, x in enumerate(found):
        if x.requires_grad:
            trains = True
            if steps.options.backward:
                handle = x.register_hook(KeepGradHook(steps, state, root, alive, i))
                if x.grad_fn is None:
                    state.leaves.append(handle)
    return trains


class ForwardHook(Hook):
    """Read a layer's outputs, and hook their gradients."""

    __slots__ = (
        "__weakref__", "backward", "dtype", "fixed", "pair", "past", "path", "sites", "steps",
        "threads", "weak",
    )  # fmt: skip

    def __init__(
        self, steps: Steps, path: str, fixed: Layer | None, past: Callable[[], None]
    ) -> None:
        self.steps, self.path, self.fixed, self.past = steps, path, fixed, past
        self.threads = steps.threads
        self.weak = weakref.ref(steps)
        self.backward = steps.options.backward
        self.sites: dict[Any, tuple[Site, Site]] = {}
        # Those of a layer whose output is one tensor, and its dtype when it ran last.
        self.dtype: torch.dtype | None = None
        self.pair: tuple[Site, Site] | None = None

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Write the readings of the outputs, in order."""
        if _is_dynamo():
            # To older compilers `is_exporting()` is true of all that they trace.
            if self.fixed is not None and not _compiler._is_exporting_flag:
                self.fixed.trace(output, self.backward)
            return
        if _compiler._is_compiling_flag or is_tracing() or mode(PROXY) is not None:
            if self.steps.options.level != "step":
                say_traced(self.steps.tracker.judge.say)
            return
        threads = self.threads
        state = threads.own.state or threads.state()
        if state.idle:
            return
        if state.deferred and capturing():
            if self.fixed is not None:
                self.fixed.trace(output, self.backward)
            return
        rows, root = state.rows, state.root
        recompute = task() != -1
        if rows is None:
            if recompute:
                # The engine runs a device's backward passes in a thread of its own.
                state = threads.owner(state)
                rows = state.rows
                if rows is None or state.idle:
                    return
            else:
                rows = self.steps.open(state)
                self.past()
            root = state.root
        path, calls = self.path, state.calls
        if recompute or (root is not None and root.grad and not _grad_enabled()):
            call, root = state.regions.number(calls, path, again=recompute, root=root)
            if recompute:
                self._recomputed(state, output, call, root)
                return
            root = state.root
        else:
            call = calls.get(path, 0)
            calls[path] = call + 1
        if type(output) is _Tensor:
            if output.dtype is not self.dtype:
                self.dtype, self.pair = output.dtype, self._sites(output, "output")
            found: Any = ((output, self.pair),)
        else:
            named = tensors(output, "output", objects=True)
            found = [(x, self._sites(x, name)) for name, x in named]
        for x, pair in found:
            if pair is None:
                continue
            order = len(rows.sites)
            bad = state.slots.write(rows, pair[0], call, x)
            if bad is None:
                if x.numel() and not x.is_meta and x.dtype in DTYPE_NAME:
                    say_unseen(self.steps.tracker.judge.say, path, x)
                continue
            expected = _expectations()
            if expected is not None:
                rows.expect((order,), expected)
            if bad:
                rows.know_input(lambda: (bad_input(args), threads.models.around(path)))
                try:
                    self.steps.flag(state, rows, order, x)
                finally:
                    rows.know_input(None)
            if self.backward and x.requires_grad:
                handle = hook_last(x, GradHook(self.weak, state, root, pair[1], call, expected))
                if handle is not None:
                    state.leaves.append(handle)

    def _recomputed(self, state: State, output: Any, call: int, root: Any) -> None:
        # The first pass of reentrant checkpointing has no graph, so the second one is hooked.
        # What non-reentrant checkpointing recomputes is never run backward: its hooks rest.
        for name, x in tensors(output, "output", objects=True):
            pair = self.sites.get((name, x.dtype))
            if pair is not None and self.backward and x.requires_grad:
                hook = GradHook(self.weak, state, root, pair[1], call, _expectations())
                handle = hook_last(x, hook)
                if handle is not None:
                    state.leaves.append(handle)

    def _sites(self, x: torch.Tensor, name: str) -> tuple[Site, Site] | None:
        """Give the slots of an output and of its gradient; None for what is never bad."""
        key = (name, x.dtype)
        pair = self.sites.get(key)
        if pair is None and x.dtype in DTYPE_NAME:
            dtype, limit = DTYPE_NAME[x.dtype], DTYPE_MAX[x.dtype]
            site = self.steps.tracker.judge.monitor.site
            grad = "grad" if name == "output" else f"grad of {name}"
            pair = self.sites[key] = (
                site(self.path, "forward", name, dtype, limit),
                site(self.path, "backward", grad, dtype, limit),
            )
        return pair


class RootHook(CallHook):
    """Tell the session that a root call begins, or that it ends, also when it raised."""

    __slots__ = ()

    def __call__(self, *given: Any) -> None:
        """Hand over to the session."""
        if _is_dynamo() or _compiler._is_compiling_flag or is_tracing() or mode(PROXY) is not None:
            return
        if not capturing():
            self.function(*given)


run_outside(
    ForwardHook.__call__, GradHook.__call__, KeepGradHook.__call__, RootHook.__call__,
    WeightHook.__call__,
)  # fmt: skip
