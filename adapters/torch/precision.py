"""Run a target in a narrow dtype: weights and inputs cast, some modules kept in float32."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch

from anynan._apps.precision.watch import Narrow, bound_of, factors_of
from anynan._arrays.containers import rebuilt
from anynan._base.patches import Patches
from anynan._readings.patterns import within
from anynan._trace.op import Observed, Observer, Op, RerunError
from anynan.torch.call.discovery import find_weights, named_models
from anynan.torch.observe import Sight, TorchTarget
from anynan.torch.private import DispatchMode, StorageWeakRef, returns_of, tree_map, undispatched
from anynan.torch.read.paths import clean_path, join
from anynan.torch.read.probes import read_ends
from anynan.torch.replay.operands import flat, rerun, shape_of

_CODE = """\
kept = {kept}  # whether the result is cast back

def cast(x, dtype):
    if isinstance(x, (tuple, list)):
        return type(x)(cast(each, dtype) for each in x)
    if isinstance(x, dict):
        return type(x)(**{{name: cast(each, dtype) for name, each in x.items()}})
    return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x

for name, back in kept.items():
    module = model.get_submodule(name){how}
    module.register_forward_pre_hook(
        lambda _, args, kwargs: cast((args, kwargs), torch.float32), with_kwargs=True)
"""
_BACK = """\
    if back:
        module.register_forward_hook(lambda _, args, out: cast(out, torch.{dtype}))
"""
_AUTOCAST = '''
    module.forward = torch.autocast("cuda", enabled=False)(module.forward)  # or "cpu"'''


_PRODUCTS = frozenset({"matmul", "linear"})
_ATTENTION = "attention"


class Narrowed(TorchTarget, Narrow):
    """Run one target in narrow dtypes."""

    widening = "x.float() for each operand"
    outside = 'with torch.autocast("cuda", enabled=False), and x.float() for each operand'

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(target, args, kwargs)
        self._sight = Sight(target)
        found = named_models(target, args, kwargs)
        self._models = list(found.values())
        self._modules = [
            (join(name, clean_path(path, model)), module)
            for name, model in found.items()
            for path, module in model.named_modules()
        ]

    def observe(self, observer: Observer) -> Observed:
        """Run as it is, and show each operation."""
        return self._shown(*self.call[1:], observer, None)

    def memory(self, x: torch.Tensor) -> tuple[Any, Any, Any]:
        """Give a tensor's storage, and which of that it is: however its dimensions lie."""
        try:
            storage = StorageWeakRef(x.untyped_storage())
        except (NotImplementedError, RuntimeError):  # a class without one
            return super().memory(x)
        dense = 1
        for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
            if size != 1 and stride != dense:
                return storage, (x.dtype, x.storage_offset(), x.shape, x.stride()), None
            dense *= size
        return storage, (x.dtype, x.storage_offset(), dense), None

    def rounded(self, x: Any, dtype: str) -> Any:
        """Round a tensor to a dtype, and give it in its own again."""
        return x if x.is_complex() else x.detach().to(getattr(torch, dtype)).to(x.dtype)

    def bounded(self, x: Any, top: float) -> Any:
        """Put the largest number in the place of Inf, and 0 in that of NaN."""
        return torch.nan_to_num(x.detach(), posinf=top, neginf=-top)

    def narrows(self, x: Any) -> bool:
        """Tell whether a tensor is one that is cast."""
        return _narrows(x)

    def given(self) -> list[tuple[str, str | None, Any]]:
        """List weights, buffers and arguments."""
        found: list[tuple[str, str | None, Any]] = []
        for path, module in self._modules:
            for held in (module._parameters, module._buffers):
                found += [(join(path, name), path, x) for name, x in held.items() if _narrows(x)]
        return found + super().given()

    def hides(self, x: Any) -> bool:
        """Tell whether an object holds arrays that are cast in others: a module's are its own."""
        return not isinstance(x, torch.nn.Module) and super().hides(x)

    def sizes(self) -> dict[str, int]:
        """Give the modules that are called, with the elements of all weights in them."""
        lists = torch.nn.ModuleList | torch.nn.ModuleDict
        return {
            path: sum(p.numel() for p in module.parameters())
            for path, module in self._modules
            if not isinstance(module, lists)
        }

    def tied(self, layer: str) -> list[str]:
        """List the modules that hold a weight of another module's, or of one in it."""
        mine = {id(p) for path, m in self._modules if path == layer for p in m.parameters()}
        return [
            path
            for path, module in self._modules
            if not within(path, layer) and any(id(p) in mine for p in module._parameters.values())
        ]

    def run(
        self, observer: Observer, dtype: str, how: str, keep: Mapping[str, bool], *, own: bool
    ) -> Observed:
        """Run in a dtype, with some modules kept in float32, and leave no trace."""
        narrow: torch.dtype = getattr(torch, dtype)
        _, args, kwargs = self.call
        kept = [module for path, module in self._modules if path in keep]
        weights = (p.device.type for model in self._models for p in model.parameters())
        device = next(weights, "cpu") if how == "autocast" else None
        with ExitStack() as stack:
            if device is None:
                stack.enter_context(self._cast(kept, narrow))
                cast = partial(tree_map, lambda x: _like(x, narrow) if _narrows(x) else x)
                args, kwargs = rebuilt((args, kwargs), cast)
            else:
                stack.enter_context(_autocast(device, narrow))
            for path, module in self._modules:
                if path in keep:  # what the model itself returns stays as it is
                    back = keep[path] and device is None and module not in self._models
                    _keep(stack, module, narrow, device, back=back)
            return self._shown(args, kwargs, observer, _Storing(narrow, own=own))

    def alone(self, observer: Observer, dtype: str, *, own: bool) -> Observed:
        """Run as it is while Keras's layers compute in a dtype."""
        return self._shown(*self.call[1:], observer, _Storing(getattr(torch, dtype), own=own))

    def _shown(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer,
        kernels: "_Storing | None",
    ) -> Observed:  # fmt: skip
        with self._sight as sight:
            seen = observer if kernels is None else _apart(observer)
            return sight.run(args, kwargs, seen, kernels=kernels)

    def code(self, dtype: str, how: str, keep: Mapping[str, bool], scale: float) -> str:
        """Write the code that keeps modules in float32, and scales the loss."""
        text = ""
        if keep and how == "autocast":
            text = _CODE.format(kept=dict.fromkeys(keep, False), how=_AUTOCAST)
        elif keep:
            kept = {k: back and bool(k) for k, back in keep.items()}
            text = _CODE.format(kept=kept, how=".float()") + _BACK.format(dtype=dtype)
        return text + (f"scaler = torch.amp.GradScaler(init_scale={scale:g})" * (scale != 1))

    @contextmanager
    def _cast(self, kept: Sequence[torch.nn.Module], narrow: torch.dtype) -> Iterator[None]:
        """Have weights, buffers, gradients and optimizer state in another dtype meanwhile."""
        wide = {id(x) for module in kept for x in _held(module.modules())}
        tensors = {id(x): x for x in _held(module for _, module in self._modules)}
        tensors.update((id(x), x) for x in find_weights(self.call[0]).values() if _narrows(x))
        tensors = {number: x for number, x in tensors.items() if number not in wide}
        held = [(x, x.data, x.grad) for x in tensors.values()]
        states = [
            (state, name, x)
            for optimizer in self._sight.objects
            if isinstance(optimizer, torch.optim.Optimizer)
            for weight, state in optimizer.state.items()
            if id(weight) in tensors and isinstance(state, dict)
            for name, x in state.items()
            if _narrows(x) and x.shape == weight.shape
        ]
        try:
            with torch.no_grad():
                for x, data, grad in held:
                    x.grad = None
                    x.data = data.to(narrow)
                    x.grad = None if grad is None else grad.to(narrow)
                for state, name, value in states:
                    state[name] = value.to(narrow)
            yield
        finally:
            for x, data, grad in held:
                x.grad = None
                x.data = data
                x.grad = grad
            for state, name, value in states:
                state[name] = value


narrowed_of = Narrowed.of


class _Storing(DispatchMode):
    """Compute in float32 what PyTorch computes in a dtype, and store it in that.

    What it gives has the dtypes that PyTorch's own kernels give, so that the program and autograd
    do as they do there; no kernel of the dtype runs, but of what writes into a tensor: those
    compute each element in float32.

    Args:
        narrow: The dtype.
        own: Run the dtype's kernels all the same, but for products and attention whose sums stay
            below half of its largest number in whatever order: on a CPU those are slow.
    """

    # Of operators, by the dtypes of their operands: the same in every run.
    _known: ClassVar[dict[Any, list[torch.dtype | None] | None]] = {}

    def __init__(self, narrow: torch.dtype, *, own: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._narrow, self._runs = narrow, own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs, shape = kwargs or {}, shape_of(func)
        if shape.view or shape.written:
            return func(*args, **kwargs)
        tensors = list(flat([*args, *kwargs.values()]))
        mine = any(x.dtype is self._narrow for x in tensors)
        # A kernel refuses operands of two dtypes.
        product = shape.name in _PRODUCTS and all(x.dtype is self._narrow for x in tensors)
        bounded = product or _ATTENTION in shape.name
        if not mine or _own(func) or (self._runs and not bounded):
            return func(*args, **kwargs)
        given = {**dict(zip(shape.argument_names, args, strict=False)), **kwargs}
        kinds = self._kinds(func, tensors, args, kwargs)
        try:
            made = rerun(func, given, {}, {}, "float32")
            if self._runs and not self._stays(func, given, made):
                return func(*args, **kwargs)
        except RerunError:
            return func(*args, **kwargs)
        if kinds is None or sum(kind is not None for kind in kinds) != len(made):
            return func(*args, **kwargs)
        left = iter(made)
        outs = [None if kind is None else next(left).to(kind) for kind in kinds]
        given_back = returns_of(func)
        if given_back[0] != "Tensor":
            return outs
        return outs[0] if len(given_back) == 1 else tuple(outs)

    def _stays(self, func: Any, given: dict[str, Any], made: Sequence[torch.Tensor]) -> bool:
        """Tell whether the sums of a product stay below half of the largest number."""
        half = torch.finfo(self._narrow).max / 2
        if _ATTENTION in shape_of(func).name:
            grad = given.get("grad_out", given.get("grad_out_"))
            query, key, value = (given[name] for name in ("query", "key", "value"))
            return _attention_bound(query, key, value, grad, given.get("scale")) < half
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        sizes = {name: (x.numel(), _largest(x)) for name, x in tensors.items()}
        factors = [given.get(name, 1) for name in ("alpha", "beta")]
        if factors != [1, 1] or len(factors_of(list(sizes))) != 2:
            return False
        if bound_of(shape_of(func).name, sizes, made[0].numel()) < half:
            return True
        again = rerun(func, given, {}, {name: x.abs() for name, x in tensors.items()}, "float32")
        return all(_largest(x) < half for x in again)

    def _kinds(
        self, func: Any, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.dtype | None] | None:
        """Give the dtypes of what an operator makes of these; None if its kernel has to run.

        A gradient that nobody wants is None there.
        """
        masks = [each for x in args if isinstance(x, list | tuple) for each in x]
        said = [*args, *masks, *kwargs.values()]  # a mask says which gradients are wanted
        words = tuple(x for x in said if isinstance(x, torch.dtype | bool))
        kinds = tuple((x.dtype, not x.ndim) for x in tensors)
        key = (func, words, kinds, torch.get_default_dtype())
        if key not in self._known:
            self._known[key] = None
            if {*returns_of(func)} in ({"Tensor"}, {"List[Tensor]"}):
                with suppress(Exception):
                    meta = tree_map(
                        lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs)
                    )
                    made = func(*meta[0], **meta[1])
                    many = made if isinstance(made, tuple | list) else [made]
                    self._known[key] = [getattr(x, "dtype", None) for x in many]
        return self._known[key]


def _attention_bound(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor | None,
    scale: float | None,
) -> float:  # fmt: skip
    """Bound what attention, or its gradient, can reach on its way: rows of weights add up to 1."""
    width, length = query.shape[-1], max(query.shape[-2], key.shape[-2])
    factor = max(1.0, abs(scale or 0.0)) * width
    ends, of_scores = max(_largest(query), _largest(key)), factor * _largest(query) * _largest(key)
    if grad is None:
        return max(of_scores, _largest(value))
    slope = 2 * factor * _largest(grad) * _largest(value)
    return max(of_scores, slope, length * slope * ends, length * _largest(grad))


def _largest(x: torch.Tensor) -> float:
    return max(map(abs, read_ends(x))) if x.numel() else 0.0


@lru_cache(maxsize=4096)
def _own(func: Any) -> bool:
    """Tell whether PyTorch's own kernel has to run.

    A loss stores its elements in the dtype before it adds them up, and another kernel may draw
    other random numbers.
    """
    draws = torch.Tag.nondeterministic_seeded in func.tags and _ATTENTION not in str(func)
    return draws or "reduction" in shape_of(func).argument_names


def _apart(observer: Observer) -> Observer:
    """Have an observer whose own operations are no matter of a mode."""

    def see(op: Op) -> Sequence[Any] | None:
        with undispatched():
            return observer(op)

    return see


def _held(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Walk the weights and buffers that modules hold themselves, of those that can be cast."""
    for module in modules:
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and _narrows(x):
                yield x


@contextmanager
def _autocast(device: str, narrow: torch.dtype) -> Iterator[None]:
    """Have the forward pass under autocast; the backward pass follows it, and is under none."""

    def outside(real: Callable[..., Any]) -> Callable[..., Any]:
        def differentiate(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, enabled=False):
                return real(*args, **kwargs)

        return differentiate

    with Patches() as patches, torch.autocast(device, narrow):
        for name in ("backward", "grad"):
            patches.change(torch.autograd, name, outside)
        yield


def _keep(
    stack: ExitStack, module: torch.nn.Module, narrow: torch.dtype, device: str | None,
    *, back: bool,
) -> None:  # fmt: skip
    """Have a module compute in float32: what it is given is cast, and what it gives cast back."""
    inner = ExitStack()
    stack.enter_context(inner)

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        if device is not None:
            inner.enter_context(torch.autocast(device, enabled=False))
        return tree_map(lambda x: x.float() if _is(x, narrow) else x, (args, kwargs))

    def after(_: Any, args: Any, out: Any) -> Any:
        inner.close()
        if not back:
            return out
        return tree_map(lambda x: x.to(narrow) if _is(x, torch.float32) else x, out)

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _narrows(x: Any) -> bool:
    wide = (torch.float32, torch.float64)
    return isinstance(x, torch.Tensor) and x.dtype in wide and x.layout is torch.strided


def _like(x: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """Cast an argument; a leaf that takes a gradient is one again."""
    return x.detach().to(narrow).requires_grad_(x.requires_grad)


def _is(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is dtype
