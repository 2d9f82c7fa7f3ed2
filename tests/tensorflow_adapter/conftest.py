"""TensorFlow with two devices, and every test beginning afresh."""

from importlib.util import find_spec

from tests.tensorflow_adapter.fresh import fresh

__all__ = ["fresh"]

if find_spec("tensorflow") is None:
    collect_ignore_glob = ["*"]
