"""What this room says."""

from anynan._base.messages import Message

LAYER_ALONE = Message("layer-alone", "{layer}: the second model has no such {what}")
SHAPES_DIFFER = Message("shapes-differ", "{layer}: its shapes do not fit {other} of the second")
AFTER_CHOICE = Message("after-choice", "what comes after the choice that differs; {next}")
BACKWARD_NOT_COMPARED = Message("backward-not-compared", "the backward pass{from_}: {why}")
ONLY_GROSS = Message(
    "only-gross",
    "a history has only the smallest and largest value or the norm of each array, so only gross "
    "differences show; anynan.compare(a, b, batch) looks closer",
)
