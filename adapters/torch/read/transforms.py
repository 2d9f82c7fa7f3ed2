"""Where no check can run: a graph that is being traced, a function transform."""

from collections.abc import Callable

import torch

from anynan.torch.private import PROXY, is_tracing, is_transformed, level, mode


def _capturing() -> bool:
    # Without a driver the second call raises; before CUDA is in use nothing is captured.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# While a CUDA graph is captured nothing may be read, and its replays call no hook.
capturing: Callable[[], bool] = _capturing if torch.backends.cuda.is_built() else bool
TRANSFORMED = (
    "the layers of the model inside a function transform (vmap, grad, jvp and the like of "
    "torch.func) are not read: their values are those of no single call; track the step, which "
    "is read at what comes of them, and runs again in there"
)
_NO_CHECK = "is not watched: a check there would become a part of the graph"


def say_traced(say: Callable[[str], None]) -> None:
    """Say once that a call which makes a graph is not watched.

    Nothing is said where Dynamo traces the hooks themselves, as in a strict export.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if torch.compiler.is_exporting():
        say(f"the model inside torch.export {_NO_CHECK}")
    elif is_tracing():
        say(f"the model inside torch.jit.trace {_NO_CHECK}")
    elif mode(PROXY) is not None and not torch.compiler.is_compiling():
        say(f"the model inside make_fx {_NO_CHECK}")


def say_unseen(say: Callable[[str], None], path: str, x: torch.Tensor) -> None:
    """Say once what hides an output's values."""
    if level() is not None or is_transformed(x):
        say(TRANSFORMED)
    elif hasattr(x, "fake_mode"):
        say("the model on fake tensors is not watched: they hold no values")
    else:
        say(
            f"the output of {path or 'the model'} is not watched: a {type(x).__name__} whose "
            "values cannot be reduced"
        )
