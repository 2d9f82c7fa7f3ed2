"""Differences of JAX programs that are listed."""

from tests.wild.rows import Known

KNOWN_JAX = [
    Known(
        "jax",
        "optimistix_*",
        "silent",
        "documented: the inside of lineax's solver, a primitive of its own, is not watched, which "
        "is said once",
        said="warning: anynan: linear_solve is a black box*",
    ),
    Known(
        "jax",
        "equinox_attention",
        "nan weight.layer",
        "the weight is named at its first use, with the right layer and cause, and not in the "
        "phase of parameters: the optimizer keeps one moment, so weights and state look alike",
        said="*layer mlp.layers.0*bad_parameter*",
    ),
    Known(
        "keras_jax",
        "*",
        "nan weight.layer",
        "the weight is named at its first use, with the right layer and cause, and not in the "
        "phase of parameters",
        said="*layer target*bad_parameter*",
    ),
]
