"""Causes that TensorFlow produces beyond those of tests/conformance/recipes_causes.py.

The rows that TensorFlow cannot produce stand in ``NOT_IN_TENSORFLOW``, each with its reason.
"""

import numpy as np
import tensorflow as tf

import anynan
from anynan._diagnosis.causes import RULES
from tests.conformance.recipes_causes import produced
from tests.failing import failure


def norm_of_inf(x):
    image = tf.reshape(tf.where(x > 3, np.inf, x), (1, 2, 2, 1))
    return tf.reduce_sum(tf.compat.v1.nn.fused_batch_norm(image, [1.0], [0.0])[0])  # bad


def test_the_cause_of_a_norm_of_inf_is_named_at_its_line():
    step = anynan.tensorflow.track(tf.function(norm_of_inf))
    event = failure(step, tf.constant([1.0, 2.0, 3.0, 4.0]))
    found = (event.cause.tag, event.operation.name, event.phase, event.kind)
    assert found == ("normalisation_of_inf", "batch_norm", "loss", "nan")
    assert event.cause.evidence
    assert event.operation.source.text.endswith("# bad")


NOT_IN_TENSORFLOW = {
    "overwritten_input": "tensors of TensorFlow cannot be written to",
    "uninitialised_memory": "every tensor of TensorFlow's public functions is filled",
    "logit_of_zero_or_one": "there is no logit: its division or logarithm is named",
    "logit_gradient_at_bound": "there is no logit: its division or logarithm is named",
    "binary_cross_entropy_saturated": "Keras's loss clips, and TensorFlow's takes logits",
    "kl_div_domain": "Keras's loss clips; by hand, its logarithm is named",
    "variance_of_one": "every variance divides by n; a batch norm of one value by 1",
    "cdist_gradient_at_zero": "a distance is a square root of a sum: norm_gradient_at_zero",
    "eigen_gradient_degenerate": "the gradient takes 1/0 for 0 between equal eigenvalues",
    "product_gradient_at_zero": "prod has no division in its gradient, cumprod divides 0/0 to 0",
    "lgamma_gradient_at_pole": "the forward result is +Inf already, which is lgamma_pole",
    "index_out_of_range": "an index out of range raises, or reads a 0",
    "optimizer_state_overflow": "an infinite second moment makes the update 0, so no weight goes "
    "bad of it",
    "ctc_target_too_long": "Keras's loss and TensorFlow's stay finite",
    "growth_without_training": "sizes are read where gradients are",
    "log_gradient_at_zero": "a logarithm's result is -Inf already, and xlogy takes 0/0 for 0",
}
ELSEWHERE = {  # produced by tests/keras_adapter
    "bad_input", "bad_label", "bad_parameter", "sqrt_gradient_at_zero",
}  # fmt: skip
IN_TRAINING = {  # produced by tests/keras_adapter/test_causes.py
    "running_statistics_bad", "learning_rate_divergence", "exploding_gradient", "beyond_limit",
    "loss_scale_floor", "loss_scale_too_high", "optimizer_step_too_large", "weight_written",
    "optimizer_state_bad", "optimizer_epsilon_underflow", "optimizer_setting_bad",
    "vanishing_gradient",
}  # fmt: skip


def test_every_row_is_produced_or_has_its_reason():
    made = {"normalisation_of_inf"} | IN_TRAINING | ELSEWHERE
    made |= produced("tensorflow") | set(NOT_IN_TENSORFLOW)
    assert {rule.tag for rule in RULES} == made
