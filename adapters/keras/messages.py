"""What this adapter says."""

from anynan._base.messages import Message

TRACED_ELSEWHERE = Message(
    "traced-elsewhere",
    "JAX traces the function that calls the model (jit, grad, vmap), and a tracked model is "
    "not watched there: track that function with anynan.jax.track, which names the layers",
)
PLAIN_CALLS = Message(
    "plain-calls",
    "a plain call of a model on JAX reads only inputs and layers: level='operation' and "
    "Advanced(parameters=True) work in fit, evaluate and predict",
)
RUNS_COMPILED = Message(
    "runs-compiled",
    "you compiled the model with run_eagerly=True or jit_compile=False, but while it is "
    "tracked, fit, evaluate and predict run compiled: Python code in them runs once for each "
    "kind of batch",
)
RUNS_UNCOMPILED = Message(
    "runs-uncompiled",
    "you compiled the model with jit_compile=True, but while it is tracked, fit, evaluate and "
    "predict run uncompiled: layers inside one compiled step cannot be seen",
)
BACKUP_KEPT = Message(
    "backup-kept",
    "fit ends early, so the backup in {folder} is kept: BackupAndRestore would delete it as "
    "after a complete training",
)
