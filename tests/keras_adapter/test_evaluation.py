"""What Keras evaluates on TensorFlow is read as on the other backends: its loss, too."""

from tests.keras_backends.checks import (
    _fresh,
    test_fault_inside_the_loss,
    test_step_of_ones_own_that_never_asks_for_the_loss,
)

__all__ = [
    "_fresh",
    "test_fault_inside_the_loss",
    "test_step_of_ones_own_that_never_asks_for_the_loss",
]
