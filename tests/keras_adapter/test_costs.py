"""What a failing batch costs with Keras on TensorFlow, as on the other backends."""

from tests.keras_backends.cost_checks import (
    test_the_batches_after_a_bad_one_cost_what_clean_ones_do as test_costs,
)

__all__ = ["test_costs"]
