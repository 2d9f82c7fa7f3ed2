"""Time a tracked training step under ``torch.compile``, and the compilation itself.

The model is compiled whole (``fullgraph=True``, inductor), with and without tracking; both train
their own copy and take turns.
"""

from types import FunctionType

import torch
from torch._dynamo.utils import counters
from torch._inductor import config

import anynan
from tests.benchmarks.gpt import GPT, LARGE, SMALL, Size, publish_sizes, train_step
from tests.benchmarks.timing import ratios, seconds

BASE = "compiled, no tracking"
GOALS = {SMALL.name: "step <= 1.02", LARGE.name: "step <= 1.02, layer <= 1.03"}


def _own(kind: type[GPT]) -> type[GPT]:
    """Return a class with code of its own: models of one class share their graphs."""
    forward = kind.forward
    own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward")
    return type(kind.__name__, (kind,), {"forward": own})


def measure(size: Size, rounds: int, device: str) -> dict[str, float]:
    """Return the ratios of steps, and of the first step with its compilation."""
    runs, first = {}, {}
    ends = 'compiled, anynan track(model, level="step")'
    compiled = (BASE, ends, "compiled, anynan track(model)")
    # The first compilation of all loads the compiler, and is nobody's.
    for name in ("warm up", *compiled, "eager, no tracking"):
        torch.manual_seed(0)
        model = _own(GPT)(size).to(device)
        call = model if "eager" in name else torch.compile(model, fullgraph=True)
        if name == ends:
            anynan.torch.track(call, level="step")
        elif "anynan" in name:
            anynan.torch.track(model)
        runs[name] = train_step(call, model, size, device)
        with config.patch(force_disable_caches=True):
            first[name] = seconds(runs[name])
    del runs["warm up"]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    counters.clear()
    found = ratios(runs, BASE, rounds, wait=wait)
    if counters["graph_break"] or counters["stats"]["unique_graphs"]:
        msg = f"compiled again while timed: {dict(counters['stats'])}"
        raise RuntimeError(msg)
    found["first step, anynan track(model)"] = first[compiled[2]] / first[BASE]
    found['first step, anynan track(model, level="step")'] = first[ends] / first[BASE]
    return found


if __name__ == "__main__":
    publish_sizes("torch compiled", __doc__, measure, GOALS)
