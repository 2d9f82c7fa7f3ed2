"""Keras's layers and applications on PyTorch."""

import os
from collections.abc import Iterator

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.wild.keras_training import cases, rows_of
from tests.wild.rows import Row

__all__ = ["SAMPLE", "SUITE", "cases", "run"]

SUITE = "keras_torch"
SAMPLE = ["Dense", "LSTM"]


def run(case: str) -> Iterator[Row]:
    yield from rows_of(SUITE, case)
