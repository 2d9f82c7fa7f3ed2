"""What a replay needs of one root call: inputs, random state, modes."""

import copy
import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from anynan._arrays.containers import mapped
from anynan._base.sources import is_library, located
from anynan._reach import Items
from anynan.events import Source
from anynan.torch.call.randomstate import RandomState
from anynan.torch.call.regions import inside
from anynan.torch.private import casts, task, tree_map, version
from anynan.torch.read.paths import inner

if TYPE_CHECKING:
    from anynan.torch.call.reached import Began, Reached


# So many bytes of an input are copied, where a model writes into it.
APART = 2**20


def _released() -> None:
    """Stand for a function that was called."""


@dataclass(slots=True, weakref_slot=True)
class Alive:
    """Keep a model while the graph of its call is there: the program may drop it before."""

    model: torch.nn.Module | None


@dataclass(slots=True, weakref_slot=True)
class RootCall:
    """Remember one call of a tracked model or step."""

    target: Callable[..., Any] | weakref.ref[torch.nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    grad: bool
    inference: bool
    autocast: dict[str, torch.dtype]
    versions: list[tuple["weakref.ref[torch.Tensor]", int]]
    caller: tuple[CodeType, int] | None = None
    calls: dict[str, int] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)
    earlier: dict[int, torch.Tensor | None] = field(default_factory=dict)
    number: int = -1
    began: "Began | None" = None
    alive: "weakref.ref[Alive] | None" = None
    sent: tuple[torch.nn.Module, Any] | None = None
    reached: "Reached | None" = None

    @classmethod
    def now(
        cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: Any,
        calls: dict[str, int],
    ) -> "RootCall":  # fmt: skip
        """Take what a replay of this call will need.

        Args:
            fn: What is called.
            args: Its positional arguments; they are held, not copied.
            kwargs: Its keyword arguments.
            values: The tensors among them.
            calls: How often each layer was called in this step before.
        """
        # What the call takes out of its batch must still be there for a replay.
        args, kwargs = _copied(args), _copied(kwargs) if kwargs else {}
        versions = [(weakref.ref(x), version(x)) for x in values if not x.is_inference()]
        target = weakref.ref(fn) if isinstance(fn, torch.nn.Module) else fn
        return cls(
            target, args, kwargs, RandomState.now(), torch.is_grad_enabled() or inside(),
            torch.is_inference_mode_enabled(), casts(), versions, caller(),
            dict(calls), sent=_sent(fn),
        )  # fmt: skip

    @property
    def fn(self) -> Any:
        """Give what was called; a model is not kept alive, and None once it is gone."""
        return self.target() if isinstance(self.target, weakref.ref) else self.target

    @property
    def of_function(self) -> bool:
        """Tell whether a function was called, and no model."""
        return not isinstance(self.target, weakref.ref)

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have a replay called with what keeps its items, where an argument is an iterator."""
        self.args = tuple(
            new if type(new) is Items else old for old, new in zip(self.args, args, strict=True)
        )
        self.kwargs |= {name: new for name, new in kwargs.items() if type(new) is Items}

    def send(self) -> None:
        """Have a wrapper call what it called then: a trainer may set that for one call alone."""
        if self.sent is not None:
            inner, forward = self.sent
            inner.forward = forward

    def keep_gradient(self, index: int, grad: torch.Tensor, keep: int | str) -> None:
        """Keep a gradient that came into an output, within the memory allowed.

        Args:
            index: Which output.
            grad: Its gradient.
            keep: So many bytes, or ``"all"`` for all.
        """
        if self.number != (number := task()):
            self.earlier, self.number = dict(self.gradients), number
        small = keep == "all" or grad.nbytes <= int(keep)
        self.gradients[index] = grad.detach() if small else None

    def ended(self) -> "RootCall":
        """Give it with the gradients of the last backward pass that is over."""
        running = self.number == task()
        return replace(self, gradients=self.earlier if running else self.gradients)

    def stay(self, outputs: list[torch.Tensor]) -> Alive:
        """Give what keeps the model until the step is judged, for the graph's hooks to hold.

        A model that holds an output of its own is left alone: it would be held by its own graph
        for good, which Python's garbage collector does not see.
        """
        model = self.fn
        if not isinstance(model, torch.nn.Module) or _holds(model, outputs):
            return Alive(None)
        alive = Alive(model)
        self.alive = weakref.ref(alive)
        return alive

    def release(self) -> None:
        """Let go of what was called and its inputs: the graph of a kept output would hold them."""
        self.args, self.kwargs, self.began, self.sent, self.reached = (), {}, None, None, None
        if self.of_function:
            self.target = _released
        self.gradients = self.earlier = {}
        alive = None if self.alive is None else self.alive()
        if alive is not None:
            alive.model = None

    def source(self) -> Source | None:
        """Give the user's line that made the call."""
        if self.caller is None:
            return None
        code, line = self.caller
        return located(code, line)

    def changed(self) -> bool:
        """Tell whether an input was changed in place since the call."""
        return any((x := ref()) is not None and version(x) != count for ref, count in self.versions)

    def set_apart(self) -> None:
        """Hold copies of small inputs: the model writes into what it is given."""
        inputs = {id(x): x for x in self.living() if not x.requires_grad and x.nbytes <= APART}
        with torch.no_grad():
            copies = {key: x.clone() for key, x in inputs.items()}

        def copy_of(x: Any) -> Any:
            return copies.get(id(x), x)

        self.args, self.kwargs = tree_map(copy_of, self.args), tree_map(copy_of, self.kwargs)
        self.versions = [(ref, count) for ref, count in self.versions if id(ref()) not in inputs]

    def living(self) -> list[torch.Tensor]:
        """List what it was given, as far as that is there."""
        return [x for ref, _ in self.versions if (x := ref()) is not None]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Enter the grad mode and autocast state that the call ran under."""
        with ExitStack() as stack:
            for device in casts() | self.autocast:
                dtype = self.autocast.get(device)
                # Without its cache: casts of weights that the first run left there would
                # not be made again, and an overflow in one would not be seen.
                stack.enter_context(
                    torch.autocast(
                        device, dtype=dtype, enabled=dtype is not None, cache_enabled=False
                    )
                )
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad and not self.inference))
            yield


def _sent(fn: Any) -> tuple[torch.nn.Module, Any] | None:
    """Give the model in a wrapper, and what stands in its ``forward``'s place, if anything does."""
    model = inner(fn) if isinstance(fn, torch.nn.Module) else fn
    forward = None if model is fn else vars(model).get("forward")
    return None if forward is None else (model, forward)


def _holds(model: torch.nn.Module, outputs: list[torch.Tensor]) -> bool:
    """Tell whether an attribute of a model is one of these, or a container of one."""
    values = [*vars(model).values()]
    for value in vars(model).values():
        kind = type(value)
        if kind is dict or kind is list or kind is tuple:
            values += value.values() if kind is dict else value
    for x in outputs:
        for value in values:
            if value is x:
                return True
    return False


def _copied(value: Any) -> Any:
    """Copy the containers of an argument, not what they hold."""
    try:
        return mapped(value, _own_copy)
    except RecursionError:
        return value


def _own_copy(value: Any) -> Any:
    if not issubclass(type(value), dict | UserDict):  # a proxy may refuse to tell its class
        return value
    try:
        return copy.copy(value)
    except Exception:  # noqa: BLE001  a class of the user's may refuse
        return value


def cut(value: Any, *, leaves: bool = True) -> Any:
    """Cut the inputs off the graph they came from: a replay must not run it backward.

    Args:
        value: The inputs.
        leaves: Put others in the place of leaves, too: a gradient lands on these then.
    """
    return mapped(value, lambda x: _cut(x, leaves) if issubclass(type(x), torch.Tensor) else x)


def _cut(x: torch.Tensor, leaves: bool) -> torch.Tensor:
    kept = isinstance(x, torch.nn.Parameter) or (x.is_leaf and not leaves)
    if not x.requires_grad or kept:
        return x
    leaf = x.detach().requires_grad_()
    if x.is_leaf:
        return leaf
    with torch.enable_grad():  # a leaf could not be written to in place
        return leaf.clone()


def caller() -> tuple[CodeType, int] | None:
    """Return the innermost user frame's code and line; cheap enough for every call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None
