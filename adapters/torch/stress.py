"""What a hunt needs of PyTorch: the slope of a distance, and ways to run a target."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anynan._apps.stress.edges import Edge, told
from anynan._apps.stress.lab import Array, Lab, Watch
from anynan._arrays.arguments import positional
from anynan._base.context import but
from anynan._base.sources import user_source
from anynan._reach import Holder, Reach
from anynan._trace.op import Observed, Observer
from anynan.torch.call.discovery import named_models
from anynan.torch.call.reached import KINDS
from anynan.torch.observe import Sight, TorchTarget, takes
from anynan.torch.private import tree_leaves, version, without_modes
from anynan.torch.tracking import track

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

WEIGHTS = 2 * 10**6  # numbers up to which they are moved
DRAWS, FEW = 8, 32  # draws that are hit, and numbers up to which all of a draw are
_UNIFORM, _EITHER = ("rand", "rand_like", "uniform_"), ("bernoulli", "bernoulli_")


class TorchLab(TorchTarget, Lab):
    """Run a model, a training step or a function on changed inputs."""

    door = staticmethod(track)
    imports = ("import torch",)
    deadly = MappingProxyType(
        {
            "aten._pdist_forward.default": "empty",  # its gradient divides by their number
            # Whole numbers are places in memory to these, which nobody checks.
            "aten._ctc_loss.default": "ignored",
            "aten._ctc_loss.Tensor": "ignored",
            "aten._embedding_bag.default": "shaped",
            "aten._embedding_bag_forward_only.default": "shaped",
        }
    )

    def __init__(self, target: Any, args: tuple[Any, ...], *more: Any) -> None:
        super().__init__(target, args, *more)
        self.parameters = positional(getattr(target, "forward", target))
        self._sight: Sight | None = None
        self._models = named_models(target, args)
        passes: list[Any] = []
        self._draws = _Draws(target)
        with Sight(self._draws.step) as sight:
            found = sight.run(args, {}, None, passes.append)
        if self._draws.seen:
            self.target = target = self._draws.step
        self.trains = bool(passes)
        self._leaves: list[Holder] = []
        self._weights = set[int]()
        self._held, written = self._sorted(sight)
        self._differentiates = not passes and bool(_roots(found.value))
        if self._differentiates:
            self.target = _differentiated(target)
        elif found.value is None:
            self.target = _leaving(target, written)

    @staticmethod
    def takes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a target is PyTorch's, also by the tensors that its code holds."""
        return takes(target, args, kwargs) or bool(_data(target))

    # Arrays.

    def like(self, numbers: Array, x: Any) -> Any:
        """Make a tensor as another is; one for a weight knows which."""
        made = super().like(numbers, x)
        if id(x) in self._weights:
            vars(made)["stands_for"] = x
        return made

    def changes(self, x: Any) -> bool:
        """Tell whether something is an array that a hunt may change: of real numbers."""
        return self.is_array(x) and not x.is_complex()

    def code(self, x: Any) -> str:
        """Write an array of the same dtype."""
        made = f"torch.as_tensor({{}}, dtype={x.dtype})"
        return f"{made}.requires_grad_()" if x.requires_grad else made

    def results(self, value: Any) -> Any:
        """Give what the target itself returned."""
        return value[0] if self._differentiates and value is not None else value

    def held(self) -> list[Holder]:
        """Say where its code reaches tensors that it leaves alone."""
        return self._held

    def weights(self) -> list[Holder]:
        """Say where the weights are: of models, and leaves of its own; not where they are many."""
        found = [(holder.name, holder.get()) for holder in self._leaves]
        for name, model in self._models.items():
            found += model.named_parameters(prefix=name)
        plain = (torch.Tensor, torch.nn.Parameter)  # not what several processes hold parts of
        found = [(n, p) for n, p in found if p.requires_grad and type(p) in plain]
        if sum(p.numel() for _, p in found) > WEIGHTS:
            return []
        self._weights = {id(p) for _, p in found}
        return [_Weight(name, partial(list, [p]), 0) for name, p in found]

    def _sorted(self, sight: Sight) -> tuple[list[Holder], list[Holder]]:
        """Tell the tensors that a run leaves alone from those that it makes or writes to.

        Where all are written, and no run takes a gradient, it works on leaves of its own.
        """
        with sight.kept(self.args, {}, []):
            before = {h.name: (x := h.get(), version(x)) for h in _data(self.target)}
            try:
                self.target(*self.args)
            except Exception:  # noqa: BLE001  the first run of the hunt tells of it
                return [], []
            now = [(holder, holder.get()) for holder in _data(self.target)]
            started = {n for n, (x, _) in before.items() if x.is_leaf and x.requires_grad}
            self._leaves = [holder for holder, _ in now if holder.name in started]
            same = [
                h for h, x in now
                if h.name in before and before[h.name][0] is x and before[h.name][1] == version(x)
            ]  # fmt: skip
        written = [holder for holder, _ in now if holder not in same]
        data = [holder for holder in same if not holder.get().requires_grad]
        given = any(isinstance(x, torch.Tensor) for x in tree_leaves(self.args))
        if not (data or given or self.trains):
            data = self._leaves
        return data, written

    # Runs.

    def sloped(self, program: Callable[..., Any]) -> Callable[..., Any] | None:
        """Take the gradient that nobody asked for, where the target takes none."""
        if self.trains or self._differentiates:
            return None
        taking = _differentiated(program)

        def sloped(*xs: Any) -> Any:
            return taking(*map(_leaf, xs))

        return _named(sloped, program)

    def _seen(self, program: Callable[..., Any]) -> Sight:
        if self._sight is None or self._sight.fn is not program:
            self._sight = Sight(program)
        return self._sight

    def observe(self, program: Callable[..., Any], xs: Sequence[Any], watch: Observer) -> Observed:
        """Run a program once."""
        with self._seen(program) as sight:
            return sight.run(tuple(xs), {}, watch)

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put back what runs change."""
        return self._seen(program).kept((), {}, [])

    def modes(self) -> Iterator[tuple[str, Callable[[], AbstractContextManager[object]]]]:
        """Give the other mode of the models, and half precision."""
        for model in [*self._models.values()][:1]:
            words = "in evaluation" if model.training else "in training"
            yield words, partial(_mode, [*self._models.values()], not model.training)
        for at, (words, draws) in enumerate(self._draws.seen[:DRAWS]):
            for text, change in draws:
                yield f"where {words} draws {text}", partial(self._draws.hit, at, change)
        tensors = [x for x in tree_leaves(self.args) if isinstance(x, torch.Tensor)]
        kind = next((x.device.type for x in tensors), "cpu")
        for name, dtype in _HALVES.items():
            yield f"under autocast in {name}", partial(torch.autocast, kind, dtype=dtype)

    def slopes(
        self, program: Callable[..., Any], xs: Sequence[Any], watch: Watch
    ) -> list[Array | None]:
        """Run a program, and differentiate its smallest distance from an edge to its inputs."""
        leaves = [_leaf(x) for x in xs]
        found: list[Array | None] = [None for _ in xs]
        places = [i for i, x in enumerate(leaves) if x.requires_grad]

        def differentiate(_: object = None) -> None:
            kept, watch.kept[:] = list(watch.kept), []
            kept = [x for x in kept if x.requires_grad]
            if not kept or not places or watch.wanted is None:
                return
            with without_modes(), torch.enable_grad():
                distance = torch.stack([_distance(watch.wanted.edge, x) for x in kept]).min()
                wanted = [getattr(leaves[i], "stands_for", leaves[i]) for i in places]
                grads = torch.autograd.grad(distance, wanted, retain_graph=True, allow_unused=True)
            for i, grad in zip(places, grads, strict=True):
                found[i] = None if grad is None else self.host(grad)

        def run(*given: Any) -> Any:
            # A leaf could not be written to in place.
            out = program(
                *(x if given_x.requires_grad or not x.requires_grad else x.clone()
                  for x, given_x in zip(given, xs, strict=True))
            )  # fmt: skip
            differentiate()
            return out

        with self._seen(program) as sight:
            run_by, sight.fn = sight.fn, run
            try:
                observed = sight.run(tuple(leaves), {}, watch, differentiate)
            finally:
                sight.fn = run_by
        if observed.error is not None:
            differentiate()
        return found


lab_of = TorchLab.of


class _Draws(TorchFunctionMode):
    """Know what a target draws at random, and have it draw what comes rarely.

    Attributes:
        step: Calls the target.
        seen: What the first call drew, in words, and what else can be drawn.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[str, Callable[[Any], object]]]]] = []
        self._at = 0
        self._hit: tuple[int, Callable[[Any], object]] = (-1, lambda _: None)

        def step(*args: Any, **kwargs: Any) -> Any:
            self._at = 0
            with self:
                return target(*args, **kwargs)

        self.step = _named(step, target)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is called."""
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name not in _UNIFORM + _EITHER or not isinstance(out, torch.Tensor):
            return out
        if self._at == len(self.seen):
            where = told(user_source(framework="torch"), None)
            bounds = args[1:] or kwargs if name == "uniform_" else ()
            self.seen.append((f"{name}{where}", [] if bounds else list(_rare(name, out))))
        if self._at == self._hit[0]:
            self._hit[1](out.data)
        self._at += 1
        return out

    def hit(self, at: int, change: Callable[[Any], object]) -> AbstractContextManager[None]:
        """Have a draw be another meanwhile."""
        return but(self, _hit=(at, change))


class _Weight(Holder):
    """Write other numbers into a weight, where its model and its optimizer find them."""

    def set(self, value: Any) -> bool:
        """Copy the numbers; what runs it puts the old ones back."""
        with torch.no_grad():
            self.get().data.copy_(value)
        return True


def _rare(name: str, x: torch.Tensor) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Say what a draw is rarely: one number in 17 million of float32 is 0."""
    if name in _UNIFORM and x.numel() and x.dtype != torch.float64:
        yield "a 0", lambda x: x.__setitem__((0,) * x.ndim, 0.0)
    if name in _EITHER and 0 < x.numel() <= FEW:
        yield "nothing but 0", lambda x: x.zero_()
        yield "nothing but 1", lambda x: x.fill_(1)


def _leaf(x: Any) -> torch.Tensor:
    leaf: torch.Tensor = x.requires_grad_() if x.is_floating_point() and not x.requires_grad else x
    return leaf


def _distance(edge: Edge, x: torch.Tensor) -> torch.Tensor:
    distance: torch.Tensor = edge.distances(x[x.isfinite()].double()).min()
    return distance


def _data(target: Any) -> list[Holder]:
    """List where its code reaches dense tensors past modules and arguments."""
    if isinstance(target, torch.nn.Module):
        return []
    reach = Reach(target, KINDS)
    reach.search(())
    found, seen = [], set[int]()
    for holder in sorted(reach.arrays, key=lambda holder: holder.name):
        x = holder.get()
        if isinstance(x, torch.Tensor) and type(x) is torch.Tensor and id(x) not in seen:
            seen.add(id(x))
            found.append(holder)
    return found


def _roots(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.requires_grad]


def _differentiated(target: Callable[..., Any]) -> Callable[..., Any]:
    """Take the gradient of what a target returns, as the program around it does."""

    def step(*args: Any, **kwargs: Any) -> Any:
        out = target(*args, **kwargs)
        roots = _roots(out)
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return out, [x.grad for x in given if x.is_leaf and x.grad is not None]

    return _named(step, target)


def _named(step: Callable[..., Any], target: Callable[..., Any]) -> Callable[..., Any]:
    """Have a step go by the name of its target, whose code is looked into for what it changes."""
    step.__name__ = getattr(target, "__name__", type(target).__name__)
    step.__wrapped__ = target  # type: ignore[attr-defined]
    return step


def _leaving(target: Callable[..., Any], written: Sequence[Holder]) -> Callable[..., Any]:
    """Return what a step that returns nothing leaves behind: something may read it there.

    What it computed comes before what it made of that: new weights are bad because a loss is.
    """

    def step(*args: Any) -> Any:
        target(*args)
        left = {holder.name: holder.get() for holder in written}
        return {name: x for name, x in left.items() if x.grad_fn is not None} or left

    return _named(step, target)


@contextmanager
def _mode(models: Sequence[torch.nn.Module], training: bool) -> Iterator[None]:
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was
