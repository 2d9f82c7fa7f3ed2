"""What this adapter says."""

from anynan._base.messages import Message

INSIDE_UNSEEN = Message(
    "inside-unseen",
    "MLX traces what runs inside mx.compile or mx.vmap, where nothing has a value yet: anynan "
    "reads what goes in and comes out, and runs a bad step again without mx.compile",
)
CALLED_COMPILED = Message(
    "called-compiled",
    "the model was traced by mx.compile or mx.vmap, and a tracked model is not watched there: "
    "track the step function with anynan.mlx.track, which reads its ends and runs a bad step again",
)
EAGER_MLX = Message(
    "eager-mlx",
    "MLX code that is neither differentiated nor compiled: "
    "anynan.mlx.track(the function around it)",
)
