"""What this adapter says."""

from anynan._base.messages import Message

TRACED_ELSEWHERE = Message(
    "traced-elsewhere",
    "the model was called inside a function that JAX traces (jit, grad, vmap), where a tracked "
    "model is not watched: track that function with anynan.jax.track, and its layers are named",
)
PLAIN_CALLS = Message(
    "plain-calls",
    "in a plain call of a model on JAX only inputs and layers are read: level='operation' and "
    "parameters=True are for fit, evaluate and predict",
)
RUNS_COMPILED = Message(
    "runs-compiled",
    "the model was compiled with run_eagerly=True or jit_compile=False: fit, evaluate and predict "
    "run compiled while it is tracked, so Python code in them runs once for each kind of batch",
)
RUNS_UNCOMPILED = Message(
    "runs-uncompiled",
    "the model was compiled with jit_compile=True: fit, evaluate and predict run uncompiled while "
    "it is tracked, since the layers inside one compiled step cannot be seen",
)
BACKUP_KEPT = Message(
    "backup-kept",
    "fit ends early, and BackupAndRestore would delete its backup as after a whole training: the "
    "backup in {folder} is kept",
)
