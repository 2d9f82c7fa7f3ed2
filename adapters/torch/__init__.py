"""Watch PyTorch models and training steps."""

from anynan._base.imports import need as _need

_need("torch", "PyTorch", "Tensor")

from anynan._arrays import registry as _registry
from anynan.torch.firstbad import BadBatch, first_bad_batch
from anynan.torch.read.probes import READER as _READER
from anynan.torch.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["BadBatch", "first_bad_batch", "track"]

_registry.register(_READER)
