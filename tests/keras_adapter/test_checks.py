"""What holds for Keras on every backend, on TensorFlow."""

import pytest

from tests.keras_backends.checks import (  # noqa: F401
    test_a_model_that_fit_builds_is_watched_from_its_first_batch,
    test_backward_fault_is_found_in_fit,
    test_bad_batch_and_bad_label_are_told_apart,
    test_bad_weight_is_found_at_once,
    test_being_built_into_another_model_is_no_step,
    test_fit_reads_every_layer_and_a_forward_fault_is_found,
    test_mixed_float16_overflow_is_expected,
    test_patterns_and_nested_models,
    test_record_does_what_would_have_happened,
    test_run_names_the_line_that_made_a_layer_for_its_activation,
    test_skip_drops_the_update_and_goes_on,
    test_statistics_that_the_failing_call_spoils_are_not_to_blame,
    test_the_other_ways_are_watched,
    test_training_is_the_same_with_tracking,
    test_what_cannot_be_tracked_is_refused,
)

pytestmark = pytest.mark.tier(2)
