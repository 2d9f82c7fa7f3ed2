"""Watch MLX models and training steps."""

from anynan._base.imports import need as _need

_need("mlx.core", "MLX", "array")

from anynan.mlx.tracking import track

__all__ = ["track"]
