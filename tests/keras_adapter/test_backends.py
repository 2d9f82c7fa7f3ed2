"""Keras on its other backends, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import anynan

CODE = """
import anynan, keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
anynan.keras.track(model)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_other_backends_are_refused(engine):
    pytest.importorskip(engine)
    paths = [str(Path(anynan.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={**os.environ, "KERAS_BACKEND": engine, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    wanted = f"anynan.keras cannot watch Keras on the {engine} backend yet"
    assert last == f"NotImplementedError: {wanted}"
