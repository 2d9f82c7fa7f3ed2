"""Keras's layers and applications on TensorFlow."""

import os
from collections.abc import Iterator

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.wild.keras_layers import TABLE
from tests.wild.keras_training import APPLICATIONS, of_application, of_layer
from tests.wild.rows import Row

SUITE = "keras_tensorflow"
SAMPLE = ["Dense"]


def cases() -> list[str]:
    return [*TABLE, *APPLICATIONS]


def run(case: str) -> Iterator[Row]:
    of = of_layer if case in TABLE else of_application
    yield from of(SUITE, case)
