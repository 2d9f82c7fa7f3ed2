"""What ``anynan doctor`` tells of MLX."""

import mlx.core as mx

WATCHED = "modules, training steps and functions, forward, backward and in the optimizer"
UNWATCHED = "layers inside mx.compile, except what goes in and comes out"


def devices() -> list[str]:
    """List the devices that MLX sees."""
    kinds = [kind for kind in (mx.gpu, mx.cpu) if mx.is_available(kind)]
    return [str(mx.Device(kind, i)) for kind in kinds for i in range(mx.device_count(kind))]
