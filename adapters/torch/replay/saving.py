"""Hand an operation's call over to a bundle, with whole operands, in a second run for it alone."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anynan._calls.calls import Call, Gradient, Line, UnwritableError
from anynan._calls.collector import Collector, Operands
from anynan._calls.generators import take as take_generators
from anynan._calls.tensors import HostTensor
from anynan._diagnosis.lineage import OpRecord
from anynan.torch.call.models import Models
from anynan.torch.call.rootcall import RootCall
from anynan.torch.private import node_number, tree_map
from anynan.torch.read.probes import local
from anynan.torch.read.tensors import tensors
from anynan.torch.replay.operands import Made, Operation, shape_of

_OWN = (torch.layout, torch.memory_format)


class Catcher:
    """Stand beside a watcher, and take what the collector wants.

    Args:
        into: The collector.
    """

    def __init__(self, into: Collector) -> None:
        self._into = into
        self._forward: dict[int, tuple[Any, Sequence[Any], dict[str, Any]]] = {}

    @contextmanager
    def within(self, models: Models, root: RootCall) -> Iterator[None]:
        """Take what the call was given, and what the layer is given while it runs."""
        into = self._into
        for name, x in models.inputs(root.fn, root.args, root.kwargs):
            into.add("call", name, x, host)
        for name, state in root.random.tensors().items():
            into.add("random", name, state, host)
        take_generators(into, root.random.numpy, root.random.python)

        def take(module: Any, args: Any, kwargs: Any) -> None:
            for name, x in [*tensors(list(args), "args"), *tensors(dict(kwargs), "kwargs")]:
                into.add("layer", name, x, host)

        with ExitStack() as stack:
            for prefix, model in models.living():
                module = models.named(prefix, model).get(into.layer or "")
                if module is not None and into.layer is not None:
                    hook = module.register_forward_pre_hook(take, prepend=True, with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def made(self, made: Made, op: Operation) -> None:
        """Keep what a forward operation took, if the event is about its gradient."""
        wanted = self._into.wanted
        if wanted is None or wanted.phase != "backward" or op.overwritten or op.backward:
            return
        if (made.name, made.layer, made.source) == (wanted.name, wanted.layer, wanted.source):
            self._forward[op.seq] = op.func, *tree_map(_copied, (op.args, op.kwargs))

    def recorded(self, record: OpRecord, op: Operation) -> None:
        """Take the operation, if it is the one that is wanted."""
        if not self._into.wants(record):
            return
        known = self._forward.get(node_number(op.node)) if op.of_node else None

        def describe(operands: Operands) -> Call:
            if known is not None:
                return _gradient(*known, op.incoming, operands)
            # Arguments as they were before the operation wrote to them.
            args, kwargs = tree_map(lambda x: op.before.get(id(x), x), (op.args, op.kwargs))
            return _called(op.func, args, kwargs, operands)

        self._into.take(record, describe, host)
        self._forward.clear()


def host(x: torch.Tensor) -> HostTensor:
    """Bring a tensor to the host, bit by bit."""
    x = local(x).detach()
    if x.layout is not torch.strided:
        msg = f"a {x.layout} tensor has no place in the file"
        raise TypeError(msg)
    x = x.resolve_conj().resolve_neg().cpu().contiguous()
    name = str(x.dtype).removeprefix("torch.")
    return HostTensor(name, tuple(x.shape), x.reshape(-1).view(torch.uint8).numpy().tobytes())


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Operands) -> Call:
    names = shape_of(func).argument_names

    def value(name: str, x: Any) -> Any:
        return operands.value(name, x, lambda item: isinstance(item, torch.Tensor), _other)

    arguments = [value(names[i], x) for i, x in enumerate(args)]
    keywords = {name: value(name, x) for name, x in kwargs.items()}
    if func.namespace != "aten":
        msg = f"{func} is none of PyTorch's own operators"
        raise UnwritableError(msg)
    return Call([Line("result", str(func), arguments, keywords)], "result")


def _gradient(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], incoming: Sequence[Any],
    operands: Operands,
) -> Call:  # fmt: skip
    """Describe a gradient: the forward operation, and what arrives at its results."""
    call = _called(func, args, kwargs, operands)
    of = [name for name, x in operands.arrays.items() if x.requires_grad]
    arrives = [
        operands.ref("grad", x)["tensor"] if isinstance(x, torch.Tensor) else None for x in incoming
    ]
    if not of or not any(arrives):
        msg = "what its gradient is of is not known"
        raise UnwritableError(msg)
    return Call(call.lines, call.result, Gradient(of, arrives))


def _copied(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _other(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"name": "device"}
    if isinstance(value, _OWN):
        return {"name": str(value)}
    return int(value) if isinstance(value, torch.SymInt) else None
