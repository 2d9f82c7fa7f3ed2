"""A suite for the tests of the frame: cases that end in every way."""

import os
import time
from collections.abc import Iterator

from tests.wild.rows import Row

SAMPLE = ["good"]


def cases() -> list[str]:
    return ["good", "raises", "dies", "hangs", "spins", "grows"]


def run(case: str) -> Iterator[Row]:
    yield Row("ends", case, "layer", identical="yes")
    if case == "raises":
        msg = "its own"
        raise ValueError(msg)
    if case == "dies":
        os.abort()
    held = []
    while case in {"hangs", "spins", "grows"}:
        if case != "spins":
            time.sleep(0.05)
        if case == "grows":
            held.append(b"x" * 50_000_000)
    yield Row("ends", case, "operation", identical="yes")
