"""The differences that are listed, each with its reason."""

from tests.wild.known_arrays import KNOWN_ARRAYS
from tests.wild.known_jax import KNOWN_JAX
from tests.wild.rows import Known

KNOWN: list[Known] = [
    Known(
        "*",
        "*",
        "nan weight.cause",
        "the weight is right, its cause is not: what another code writes into a weight between an "
        "update and the next step is taken for the update",
        said="*optimizer_step_too_large*",
    ),
    *KNOWN_ARRAYS,
    *KNOWN_JAX,
]
