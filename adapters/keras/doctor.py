"""What ``anynan doctor`` tells of Keras."""

import keras

WATCHED = "models on TensorFlow, PyTorch and JAX, in fit and outside"
UNWATCHED = "on JAX, gradients of a step that does not fail"


def devices() -> list[str]:
    """Say what Keras runs on."""
    return [f"on {keras.backend.backend()}"]
