"""What a replay does about the collectives of the program that it runs again."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed

from anynan._base.patches import Patches
from anynan._diagnosis.evidence import ReplayError
from anynan.torch.private import DispatchMode, moved
from anynan.torch.read.probes import nonfinite
from anynan.torch.replay.names import MOVING
from anynan.torch.replay.operands import flat
from anynan.torch.replay.recorder import StorageRecorder, storage_of

_AVAILABLE = distributed.is_available()
SENT = "what another rank sent"


def world() -> Any:
    """Return the default process group, None unless several processes share it."""
    if not _AVAILABLE or not distributed.is_initialized():
        return None
    group = distributed.group.WORLD
    return group if distributed.get_world_size() > 1 else None


@contextmanager
def replaying(weights: Iterable[torch.Tensor], *, together: bool) -> Iterator[None]:
    """Keep a replay from waiting for ranks that do not run it.

    Args:
        weights: Those of what is tracked.
        together: True if all ranks run it.

    Raises:
        ReplayError: If it cannot be run without them.
    """
    if world() is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(inner_modules())
        if not together:
            # Gathered in the forward pass, which one rank cannot do.
            if any(hasattr(p, "to_local") for p in weights):
                msg = (
                    "the model's weights are sharded over the ranks, and only this one is at "
                    "this point, so it cannot be run again: the report names no operation"
                )
                raise ReplayError(msg)
            stack.enter_context(_NoCollectives())
        yield


class _NoCollectives(DispatchMode):
    """Stop a replay that only this rank runs where it would wait for the others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in MOVING - {"fsdp"}:
            msg = (
                f"the second run stopped at a collective ({func.overloadpacket}), since the other "
                "ranks do not run it again"
            )
            raise ReplayError(msg)
        return func(*args, **(kwargs or {}))


@contextmanager
def inner_modules() -> Iterator[None]:
    """Let a data-parallel wrapper only call its module: no buffers sent, no gradients summed.

    Its reducer takes no notice of a backward pass that its own forward pass did not announce.
    """
    from torch.nn.parallel import DistributedDataParallel

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = moved(inputs, kwargs, device)
        return self.module(*inputs, **kwargs)

    with Patches() as patches:
        patches.put(DistributedDataParallel, "forward", forward)
        yield


class Sent(DispatchMode):
    """Follow a run's bad values through collectives, which its watcher lets pass unread.

    Their results arrive later, and to run one again, as the watcher does with an operation that
    overflows, would leave this rank one ahead of the others.
    """

    def __init__(self, seen: StorageRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in MOVING:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        own = func.namespace == "fsdp"
        # In place is the first argument written, and the rest read, where there is more.
        given = [*flat([*args[:1]] if own else [*args[1:]])] or [*flat([*args])]
        if name.startswith("recv"):
            given = []
        parents = sorted({parent for x in given for parent in self._seen.parents(x)})
        labels = [self._seen.outside.get(storage_of(x)) for x in given if nonfinite(x)]
        label = next((label for label in labels if label is not None), None)
        out = func(*args, **kwargs)
        if name == "wait_tensor" or name.startswith(("send", "barrier")):
            return out
        if not own and label is None:
            label = ("input", SENT)
        written = args[0] if func.namespace == "c10d" else [kwargs.get("out"), out]
        for x in flat(written):
            self._seen.receive(x, list(parents), label)
        return out
