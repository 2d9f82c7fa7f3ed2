"""Where no check can run: a graph that is being traced, a function transform."""

from collections.abc import Callable

import torch

from anynan.torch.messages import EXPORTED, FAKE_TENSORS, OUTPUT_UNREAD, TRANSFORMED
from anynan.torch.private import PROXY, is_tracing, is_transformed, level, mode


def _capturing() -> bool:
    # Without a driver the second call raises; before CUDA is in use nothing is captured.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# While a CUDA graph is captured nothing may be read, and its replays call no hook.
capturing: Callable[[], bool] = _capturing if torch.backends.cuda.is_built() else bool


def say_traced(say: Callable[[str], None]) -> None:
    """Say once that a call which makes a graph is not watched.

    Nothing is said where Dynamo traces the hooks themselves, as in a strict export.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if torch.compiler.is_exporting():
        say(EXPORTED(tracer="torch.export"))
    elif is_tracing():
        say(EXPORTED(tracer="torch.jit.trace"))
    elif mode(PROXY) is not None and not torch.compiler.is_compiling():
        say(EXPORTED(tracer="make_fx"))


def say_unseen(say: Callable[[str], None], path: str, x: torch.Tensor) -> None:
    """Say once what hides an output's values."""
    if level() is not None or is_transformed(x):
        say(TRANSFORMED())
    elif hasattr(x, "fake_mode"):
        say(FAKE_TENSORS())
    else:
        say(OUTPUT_UNREAD(path=path or "the model", kind=type(x).__name__))
