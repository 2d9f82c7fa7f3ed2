"""What this adapter says."""

from anynan._base.messages import Message

INSIDE_UNSEEN = Message(
    "inside-unseen",
    "what runs inside of mx.compile or mx.vmap has no values while MLX traces it: of it the ends "
    "are read, and a second run of a bad step runs what is compiled without mx.compile",
)
CALLED_COMPILED = Message(
    "called-compiled",
    "the model was traced by mx.compile or mx.vmap, and a tracked model is not watched there: "
    "track the step function with anynan.mlx.track, which reads its ends and runs a bad step again",
)
