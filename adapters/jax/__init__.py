"""Watch JAX functions and training steps."""

from anynan._base.imports import need as _need

_need("jax", "JAX", "Array")

from anynan._arrays import registry as _registry
from anynan.jax.reader import Reader as _Reader
from anynan.jax.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["track"]

_registry.register(_Reader())
