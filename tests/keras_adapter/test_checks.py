"""What holds for Keras on every backend, on TensorFlow."""

import pytest

from tests.keras_backends.checks import *  # noqa: F403

pytestmark = pytest.mark.tier(2)
