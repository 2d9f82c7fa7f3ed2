"""What ``anynan doctor`` tells of TensorFlow."""

import tensorflow as tf

WATCHED = "functions, modules and models, eager, in tf.function and under XLA"
UNWATCHED = "saved functions without their Python code"


def devices() -> list[str]:
    """List the devices that TensorFlow sees."""
    return [
        device.name.removeprefix("/physical_device:")
        for device in tf.config.list_physical_devices()
    ]
