"""The ways in which TensorFlow runs a model."""

LAYERS = ["first", "block", "block.dense", "block.inner", "last", ""]
# Those with weights, whose gradients are read every step.
HEAVY = ["first", "block.dense", "last"]
WAYS = {
    "graph": {},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}


def layers(tracker, phase):
    return {reading.layer for reading in tracker.history.last() if reading.phase == phase}
