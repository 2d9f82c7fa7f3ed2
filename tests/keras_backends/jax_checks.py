"""What only Keras on JAX has."""

from tests.keras_backends.checks import _fresh  # noqa: F401
