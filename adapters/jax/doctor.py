"""What ``anynan doctor`` tells of JAX."""

import jax

WATCHED = "functions and whole training steps, jitted or not"
UNWATCHED = "code that no tracked function calls"


def devices() -> list[str]:
    """List the devices that JAX sees."""
    return [f"{device.platform}:{device.id}" for device in jax.devices()]
