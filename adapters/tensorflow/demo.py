"""The demo of Keras, on TensorFlow: ``anynan demo --framework tensorflow``."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras

from anynan.keras.demo import BUGS, main

__all__ = ["BUGS", "main"]

if keras.backend.backend() != "tensorflow":
    msg = (
        f"Keras is set to run on {keras.backend.backend()}: anynan demo --framework keras trains "
        "the same model there, and KERAS_BACKEND=tensorflow chooses TensorFlow"
    )
    raise ImportError(msg)
