"""What holds for Keras on every backend, on TensorFlow."""

import pytest

from tests.keras_backends.checks import *  # noqa: F403

pytestmark = pytest.mark.tier(2)
# Saving adds to TensorFlow's own classes: tensorflow_adapter/test_left_behind.py asks for ours.
test_remove_leaves_nothing_and_copies_are_not_tracked = None
