"""Watch JAX functions and training steps."""

try:
    import jax as _jax
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    if error.name != "jax":  # it is there, and something that it needs is not
        raise
    msg = 'anynan.jax needs JAX: pip install "anynan[jax]"'
    raise ImportError(msg) from None
if not hasattr(_jax, "Array"):
    msg = 'anynan.jax needs JAX: pip install "anynan[jax]"'
    raise ImportError(msg)

from anynan._arrays import registry as _registry
from anynan.jax.reader import Reader as _Reader
from anynan.jax.tracking import track
from anynan.tracker import old_untrack as untrack  # noqa: F401  until 0.2

__all__ = ["track"]

_registry.register(_Reader())
