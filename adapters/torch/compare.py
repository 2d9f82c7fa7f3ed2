"""One side of a comparison: run a model with hooks, and keep what every layer gave."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from anynan._apps.compare.captures import Array, Capture, Operation, Runner, RunRequest, cotangent
from anynan._apps.compare.layers import LayerCapture, line
from anynan._base.sources import is_anynans
from anynan.errors import reason
from anynan.events import Source
from anynan.torch.call.discovery import named_models
from anynan.torch.messages import COMPILED_ENDS, GRADIENT_FAILED, NO_GRADIENT
from anynan.torch.observe import Sight
from anynan.torch.private import hands_over, is_compiled, tree_leaves, tree_map, unseen
from anynan.torch.read.paths import clean_path, inner, join
from anynan.torch.read.probes import on_host
from anynan.torch.replay.names import canonical

# Operations whose result jumps where their operand moves by a rounding unit, in the field's words.
_CHOOSING = {
    "argmax": "argmax", "argmin": "argmin", "argsort": "sort", "kthvalue": "kthvalue",
    "mode": "mode", "sort": "sort", "topk": "topk", "median": "median",
    "nanmedian": "nanmedian", "bucketize": "searchsorted", "searchsorted": "searchsorted",
}  # fmt: skip
_DRAWING = {
    "bernoulli": "bernoulli", "bernoulli_": "bernoulli", "multinomial": "categorical",
    "normal": "normal", "normal_": "normal", "randn": "normal", "randn_like": "normal",
    "rand": "uniform", "rand_like": "uniform", "uniform_": "uniform", "randint": "randint",
    "randint_like": "randint", "random_": "randint", "randperm": "permutation",
    "exponential_": "exponential", "poisson": "poisson",
}  # fmt: skip
_DROPPING = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_"})
# Their gradient jumps where an operand passes a limit.
_GATES = frozenset(
    {"relu", "relu_", "relu6", "relu6_", "clamp", "clamp_", "clip", "clip_", "clamp_min",
     "clamp_max", "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "threshold",
     "hardswish", "hardsigmoid", "maximum", "minimum", "abs"}
)  # fmt: skip
_VALUES = frozenset({"kthvalue", "mode", "sort", "topk", "median", "nanmedian"})
_SEED = 0


def side_of(target: Any) -> Runner | None:
    """Give the side of a model, or of a function that uses one; None for all else."""
    models = named_models(target) if callable(target) else {}
    return TorchSide(target, models) if models else None


class TorchSide(Runner):
    """Run a PyTorch model."""

    backend = "torch"
    can_widen = True
    can_give = True
    can_look_inside = True

    def __init__(self, call: Callable[..., Any], models: dict[str, torch.nn.Module]) -> None:
        self.call = call
        self.models = {name: inner(model) for name, model in models.items()}
        self.paths: dict[torch.nn.Module, str] = {}
        for name, model in self.models.items():
            for path, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                    self.paths.setdefault(module, join(name, clean_path(path, model)))
        self.layers = {path: module for module, path in self.paths.items()}
        self.compiled = [path for module, path in self.paths.items() if is_compiled(module)]
        self._sight = Sight(call)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walk weights and buffers, each once, by name."""
        seen: set[int] = set()
        for name, model in self.models.items():
            for path, x in (*model.named_parameters(), *model.named_buffers()):
                if id(x) not in seen:
                    seen.add(id(x))
                    yield join(name, clean_path(path, model)), x

    def run(self, batch: tuple[Any, ...], wish: RunRequest) -> Capture:
        """Run once, and put everything back."""
        taking = _Taking(self, wish)
        with ExitStack() as stack:
            stack.enter_context(self._kept(batch, taking.notes))
            stack.enter_context(self._moved(wish))
            stack.enter_context(torch.set_grad_enabled(wish.backward))
            torch.manual_seed(_SEED)
            args = self._brought(batch, wish)
            with taking.hooks(), nullcontext() if self.compiled else _Watch(taking):
                out = self.call(*args)
            if wish.backward:
                taking.differentiate(out)
        return taking.capture()

    @contextmanager
    def _kept(self, batch: tuple[Any, ...], notes: list[str]) -> Iterator[None]:
        """Put everything back afterwards that a run changes."""
        with self._sight, self._sight.kept(batch, {}, notes):
            yield

    @contextmanager
    def _moved(self, wish: RunRequest) -> Iterator[None]:
        """Move or widen weights and buffers meanwhile."""
        held = [(name, x) for name, x in self.weights() if x.is_floating_point()]
        narrow = [(x, x.data) for _, x in held if wish.wide]
        for x, data in narrow:
            x.data = data.double()
        if wish.nudge is not None:
            for name, x in held:
                factor = torch.from_numpy(wish.nudge.factor(name, tuple(x.shape)))
                x.data.copy_((x.detach().double().cpu() * factor).to(x.dtype))
        try:
            yield
        finally:
            for x, data in narrow:
                x.data = data

    def _brought(self, batch: tuple[Any, ...], wish: RunRequest) -> tuple[Any, ...]:
        """Bring a batch of any framework to the model's device, and floats to its dtype."""
        weights = [x for _, x in self.weights() if x.is_floating_point()]
        device = weights[0].device if weights else torch.device("cpu")
        dtypes = {x.dtype for x in weights}
        number = iter(range(1 << 30))

        def bring(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                if not hasattr(x, "dtype") or not hasattr(x, "shape"):
                    return x
                x = torch.from_numpy(np.array(x))
            x = x.detach().to(device)
            if x.is_floating_point():
                if wish.nudge is not None:
                    factor = wish.nudge.factor(f"input {next(number)}", tuple(x.shape))
                    x = (x.double() * torch.from_numpy(factor).to(device)).to(x.dtype)
                if len(dtypes) == 1:
                    x = x.to(next(iter(dtypes)))
                x = x.clone().requires_grad_(wish.backward)
                if not self.compiled:  # no leaf: what works in place may work on it
                    x = x.clone()
            return x

        return tuple(tree_map(bring, item) for item in batch)

    @contextmanager
    def standing(
        self, paths: dict[torch.nn.Module, str], before: Callable[[str], Any],
        after: Callable[..., Any],
    ) -> Iterator[None]:  # fmt: skip
        """Stand at the calls of modules: before each, where its inputs may change, and after."""
        with ExitStack() as stack:
            for module, path in paths.items():
                first = module.register_forward_pre_hook(before(path), with_kwargs=True)
                stack.callback(first.remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            yield


class _Taking(LayerCapture):
    """Collect what layers are given and make."""

    def __init__(self, side: TorchSide, wish: RunRequest) -> None:
        super().__init__(wish, _host, _line)
        self.side = side
        self.operations: list[Operation] = []
        self.notes: list[str] = []
        self.unit = 0.0
        self.weights = {name: _host(x) for name, x in side.weights()} if wish.weights else {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Stand at every layer; those inside compiled code stay alone."""
        paths = self.side.paths
        if self.side.compiled:
            paths = {module: path for module, path in paths.items() if not self._inside(module)}
            self.notes.append(COMPILED_ENDS())
        with self.side.standing(paths, self._before, self._after):
            yield

    def _inside(self, module: torch.nn.Module) -> bool:
        return any(
            outer is not module and is_compiled(outer) and any(x is module for x in outer.modules())
            for outer in self.side.paths
        )

    def _before(self, path: str) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            changed = None
            if self.wish.given is not None and self.open:
                wanted = self.wish.given.get((path, self.calls[path]))
                if wanted is not None:
                    changed = args, kwargs = _replaced((args, kwargs), wanted)
            with unseen():
                if self.wish.backward and not self.side.compiled:
                    # A gradient of its own: that of a residual stream has more in it.
                    changed = args, kwargs = tree_map(_alias, (args, kwargs))
                self.enter(path, type(module).__name__, _floats((args, kwargs)))
            return changed

        return hook

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        with unseen():
            found = _floats(out)
            self.unit = max([self.unit, *(torch.finfo(x.dtype).eps / 2 for x in found)])
            self.leave(found)

    def differentiate(self, out: Any) -> None:
        """Run the backward pass, and take the gradients of what layers were given and made."""
        loss = _objective(out)
        if loss is None:
            self.notes.append(NO_GRADIENT())
            return
        weights = [(n, x) for n, x in self.side.weights() if x.requires_grad]
        wanted: dict[int, torch.Tensor] = {}
        for call in self.ended:
            for x in (*call.into, *call.out_of):
                if x.requires_grad:
                    wanted.setdefault(id(x), x)
        tensors = [*wanted.values(), *(x for _, x in weights)]
        try:
            found = torch.autograd.grad(loss, tensors, allow_unused=True)
        except RuntimeError as error:  # a graph that is gone, or that takes backward() alone
            self.notes.append(GRADIENT_FAILED(error=reason(error)))
            return
        own = [(name.rpartition(".")[0], x) for name, x in weights]
        self.go_back(zip(tensors, found, strict=True), own)

    def capture(self) -> Capture:
        """Give what was collected."""
        return Capture(
            self.side.backend, self.taken, self.weights, self.unit, self.choices, self.operations,
            self.notes,
        )  # fmt: skip


class _Watch(TorchFunctionMode):
    """See discrete operations, and every operation of the layer that was asked about."""

    def __init__(self, taking: _Taking) -> None:
        super().__init__()
        self.taking = taking

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with unseen():
            return self._seen(func, args, kwargs, out)

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        taking = self.taking
        called = getattr(func, "__name__", str(func))
        name = canonical(called)
        if called in _CHOOSING:
            out = self._chosen(called, args, out)
        elif called in _DRAWING:
            out = self._drawn(_DRAWING[called], out)
        elif called in _DROPPING:
            out = self._dropped(args, kwargs, out)
        elif called == "scaled_dot_product_attention":
            if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0):
                taking.choose("dropout", np.zeros(0, bool), drawn=True)  # nobody sees which
        elif taking.wish.backward and called in _GATES:
            self._gate(called, args, out)
        inside, here = taking.wish.inside, taking.open[-1] if taking.open else None
        if inside is not None and here is not None and (here.layer, here.number) == inside:
            made = tuple(_host(x) for x in _floats(out))
            if made and not name.startswith("__get__"):
                source = _line()
                taking.operations.append(Operation(name, source, made))
        return out

    def _gate(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        if not isinstance(out, torch.Tensor) or not out.requires_grad:
            return
        held = args[0].detach() if args and isinstance(args[0], torch.Tensor) else out.detach()
        open_ = _host(held.sign() if name == "abs" else (out.detach() == held) & (out != 0))
        self.taking.choose(name, open_, gate=True)

    def _chosen(self, name: str, args: tuple[Any, ...], out: Any) -> Any:
        picks = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and _whole(x)]
        if not picks:  # values alone move no further than their operand
            return out
        mine = _host(picks[0])
        like = self.taking.held_to(_CHOOSING[name], mine)
        held = None if like is None else _held_to(name, args, out, like)
        self.taking.choose(_CHOOSING[name], mine, None if held is None else like)
        return out if held is None else held

    def _drawn(self, name: str, out: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return out
        mine = _host(out)
        like = self.taking.held_to(name, mine)
        if like is not None:
            out.data.copy_(torch.from_numpy(np.array(like)))
        self.taking.choose(name, mine, like, drawn=True)
        return out

    def _dropped(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        x, *rest = args
        p = kwargs.get("p", rest[0] if rest else 0.5)
        training = kwargs.get("training", rest[1] if len(rest) > 1 else True)
        if not training or not 0 < p < 1:
            return out
        changed = x is out or kwargs.get("inplace") or (len(rest) > 2 and rest[2])
        mine = _host((out != 0) | (x == 0) & (not changed))
        like = None if changed else self.taking.held_to("dropout", mine)
        if like is not None:
            out = x * torch.from_numpy(np.array(like)).to(x.device, x.dtype) / (1 - p)
        self.taking.choose("dropout", mine, like, drawn=True)
        return out


def _held_to(name: str, args: tuple[Any, ...], out: Any, picked: Array) -> Any:
    """Give an operation's result as it is with another choice; None where that is not known."""
    indices = torch.from_numpy(np.array(picked))
    if not isinstance(out, tuple):
        return indices.to(out.device, out.dtype)
    values, old = out[0], out[1]
    indices = indices.to(old.device, old.dtype)
    x = args[0]
    for dim in range(x.ndim):
        if name in _VALUES and x.ndim == indices.ndim:
            gathered = torch.gather(x, dim, indices) if _fits(x, indices, dim) else None
            if gathered is not None and torch.equal(torch.gather(x, dim, old), values):
                return type(out)((gathered, indices))
    return None


def _fits(x: torch.Tensor, indices: torch.Tensor, dim: int) -> bool:
    return (
        all(i == dim or indices.shape[i] == x.shape[i] for i in range(x.ndim))
        and int(indices.max()) < x.shape[dim]
    )


def _line() -> Source | None:
    """Find the line that called an operation, past what PyTorch needs to show it to a mode."""
    return line("torch", lambda file: is_anynans(file) or hands_over(file))


def _alias(x: Any) -> Any:
    differs = isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()
    return x.view_as(x) if differs else x


def _whole(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()


def _floats(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for x in tree_leaves(tree):
        if isinstance(x, torch.Tensor):
            if (x.is_floating_point() or x.is_complex()) and not x.is_sparse:
                found.append(x)
        elif hasattr(x, "__dict__") and not callable(x):  # an output object, a cache
            found += [
                y for y in vars(x).values() if isinstance(y, torch.Tensor) and y.is_floating_point()
            ]
    return found


def _host(x: torch.Tensor) -> Array:
    return np.array(on_host(x.float() if x.dtype is torch.float16 else x))


def _replaced(tree: Any, arrays: Sequence[Array]) -> Any:
    """Put other numbers in the place of a call's arrays, where all of their shapes fit."""
    floats = _floats(tree)
    if [tuple(x.shape) for x in floats] != [a.shape for a in arrays]:
        return tree
    new = {
        id(x): torch.from_numpy(np.array(a)).to(x.device, x.dtype)
        for x, a in zip(floats, arrays, strict=True)
    }
    return tree_map(lambda x: new.get(id(x), x) if isinstance(x, torch.Tensor) else x, tree)


def _objective(out: Any) -> torch.Tensor | None:
    """Give the loss, or one number that depends on every element of every output."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.reshape(())
    floats = [x for x in _floats(out) if x.requires_grad and not x.is_complex()]
    if len(floats) == 1 and floats[0].numel() == 1:
        return floats[0].reshape(())
    weights = (torch.from_numpy(cotangent(tuple(x.shape), i)) for i, x in enumerate(floats))
    parts = [(x.double() * w.to(x.device)).sum() for x, w in zip(floats, weights, strict=True)]
    return sum(parts[1:], parts[0]) if parts else None
