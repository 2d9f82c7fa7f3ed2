"""Watch MLX models and training steps."""

try:
    import mlx.core as _mx
except ModuleNotFoundError as error:  # pragma: no cover - shown by a test in a subprocess
    if (error.name or "").partition(".")[0] != "mlx":  # it is there, and what it needs is not
        raise
    msg = 'anynan.mlx needs MLX: pip install "anynan[mlx]"'
    raise ImportError(msg) from None
if not hasattr(_mx, "array"):
    msg = 'anynan.mlx needs MLX: pip install "anynan[mlx]"'
    raise ImportError(msg)

from anynan.mlx.tracking import track

__all__ = ["track"]
