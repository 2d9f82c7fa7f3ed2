"""Watch PyTorch models and training steps."""

try:
    import torch as _torch
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    if error.name != "torch":  # it is there, and something that it needs is not
        raise
    msg = 'anynan.torch needs PyTorch: pip install "anynan[torch]"'
    raise ImportError(msg) from None
if not hasattr(_torch, "Tensor"):
    msg = 'anynan.torch needs PyTorch: pip install "anynan[torch]"'
    raise ImportError(msg)

from anynan._arrays import registry as _registry
from anynan.torch.firstbad import BadBatch, first_bad_batch
from anynan.torch.read.probes import READER as _READER
from anynan.torch.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["BadBatch", "first_bad_batch", "track"]

_registry.register(_READER)
