"""The hooks: small objects that write readings and let go of everything else."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from anynan import context
from anynan.monitor import Rows, Site
from anynan.torch.probes import DTYPE_MAX, DTYPE_NAME, plain

if TYPE_CHECKING:
    from anynan.torch.session import Session, State

_Tensor = torch.Tensor
_task = torch._C._current_graph_task_id
_expectations = context._expected.get
WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)


def clean_path(name: str) -> str:
    """Drop the segments that wrappers add to a module's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def join(prefix: str, path: str) -> str:
    """Join two parts of a layer path, either of which may be empty."""
    return f"{prefix}.{path}" if prefix and path else prefix or path


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk the tensors in a module's inputs or outputs, with readable names."""
    if isinstance(value, _Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}.{names[i]}" if names else f"{name}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            inner = getattr(value, item.name, None)
            if inner is not None:
                yield from tensors(inner, f"{name}.{item.name}")


class _Hook:
    """Be dropped from copies: a deep-copied or unpickled model is not tracked."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # What loads the model may not have anynan: this stands for "do nothing" in the
        # standard library, whatever the arguments.
        return getattr, (contextlib.nullcontext(), "__exit__")


class GradHook(_Hook):
    """Read the gradient that arrives at one output. It must never hold that output."""

    __slots__ = ("call", "expected", "root", "session", "site", "state")

    def __init__(
        self, session: "weakref.ref[Session]", state: "State", site: Site, call: int, root: Any
    ) -> None:
        self.session, self.state, self.site, self.call = session, state, site, call
        self.root = root
        self.expected = _expectations()

    def __call__(self, grad: torch.Tensor) -> None:
        state = self.state
        rows = state.rows
        if rows is None or state.idle:
            return
        state.saw_backward = True
        values = plain(grad)
        if values is None:
            return
        if self.expected is not None:
            rows.expected[len(rows.sites)] = self.expected
        state.roots[len(rows.sites)] = self.root
        if state.slots.write(rows, self.site, self.call, values):
            session = self.session()
            if session is not None:
                session.flag(state, rows, len(rows.lo) - 1, grad)


class KeepGradHook(_Hook):
    """Keep the gradient that comes into a root output, for a replay of the backward pass."""

    __slots__ = ("index", "root", "session")

    def __init__(self, session: "weakref.ref[Session]", root: Any, index: int) -> None:
        self.session, self.root, self.index = session, root, index

    def __call__(self, grad: torch.Tensor) -> None:
        session = self.session()
        if session is not None:
            session.keep_gradient(self.root, self.index, grad)


class ForwardHook(_Hook):
    """Read a layer's outputs, and hook their gradients."""

    __slots__ = ("__weakref__", "backward", "path", "session", "sites", "weak")

    def __init__(self, session: "Session", path: str) -> None:
        self.session, self.path = session, path
        self.weak = weakref.ref(session)
        self.backward = session.options.backward
        self.sites: dict[Any, tuple[Site, Site]] = {}

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        session = self.session
        state = session.state()
        if state.idle or torch.compiler.is_compiling():
            return
        recompute = _task() != -1
        rows = state.rows
        if rows is None:
            if recompute:
                return
            rows = session.open_step(state)
        calls = state.calls
        call = calls.get(self.path, 0)
        if not recompute:
            calls[self.path] = call + 1
        if type(output) is _Tensor:
            self._read(state, rows, output, "output", call, recompute)
        else:
            for name, tensor in tensors(output, "output"):
                self._read(state, rows, tensor, name, call, recompute)

    def _read(
        self, state: "State", rows: Rows, x: Any, name: str, call: int, recompute: bool
    ) -> None:
        pair = self.sites.get((name, x.dtype))
        if pair is None:
            if x.dtype not in DTYPE_NAME:
                return
            pair = self._sites(x, name)
        if recompute:
            # The first pass of reentrant checkpointing has no graph: hook the second one.
            if self.backward and x.requires_grad and state.hook_recomputed(self.path):
                x.register_hook(GradHook(self.weak, state, pair[1], max(call - 1, 0), state.root))
            return
        values = plain(x)
        if values is None:
            if x.numel() and not x.is_meta:
                self.session.unseen(self.path, x)
            return
        expected = _expectations()
        if expected is not None:
            rows.expected[len(rows.sites)] = expected
        if state.slots.write(rows, pair[0], call, values):
            self.session.flag(state, rows, len(rows.lo) - 1, x)
        if self.backward and x.requires_grad:
            x.register_hook(GradHook(self.weak, state, pair[1], call, state.root))

    def _sites(self, x: torch.Tensor, name: str) -> tuple[Site, Site]:
        dtype, limit = DTYPE_NAME[x.dtype], DTYPE_MAX[x.dtype]
        site = self.session.tracker.monitor.site
        grad = "grad" if name == "output" else f"grad of {name}"
        pair = (
            site(self.path, "forward", name, dtype, limit),
            site(self.path, "backward", grad, dtype, limit),
        )
        self.sites[(name, x.dtype)] = pair
        return pair


class RootEnter(_Hook):
    """Begin a root call: step boundary, what a replay needs, the batch."""

    __slots__ = ("path", "session")

    def __init__(self, session: "Session", path: str) -> None:
        self.session, self.path = session, path

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.session.enter_root(module, self.path, args, kwargs)


class RootExit(_Hook):
    """End a root call, also when it raised."""

    __slots__ = ("session",)

    def __init__(self, session: "Session") -> None:
        self.session = session

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.session.exit_root(module, output)
