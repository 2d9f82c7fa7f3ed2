"""Run what an installation must be able to do: ``python -m tests.smoke torch``, by adapter."""

import importlib
import importlib.metadata
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import anynan

DISTRIBUTIONS = (
    "numpy", "array-api-compat", "rich", "torch", "jax", "flax", "tensorflow", "tensorflow-cpu",
    "keras",
)  # fmt: skip


def arrays() -> anynan.Event:
    """Check an array, and track a function of arrays."""
    anynan.check({"x": np.ones(3)})
    assert anynan.summarize(np.array([1.0, np.inf])).posinf == 1
    tracker = anynan.track(lambda x: np.log(x), action="record")
    with np.errstate(all="ignore"):
        tracker(np.array([-1.0]))
    return tracker.events[0]


def torch() -> anynan.Event:
    """Track a model through a step that goes well and one that does not."""
    framework: Any = importlib.import_module("torch")

    class Log(framework.nn.Module):
        def forward(self, x: Any) -> Any:
            return framework.log(x)

    model = framework.nn.Sequential(framework.nn.Linear(2, 2), Log())
    adam = framework.optim.AdamW(model.parameters())
    with framework.no_grad():
        model[0].weight.fill_(0.5)
        model[0].bias.fill_(0.1)
    with anynan.torch.track(model, action="record") as tracker:
        for sign in (1, -1):
            model(sign * framework.ones(3, 2)).sum().backward()
            adam.step()
            adam.zero_grad()
    return tracker.events[0]


def jax() -> anynan.Event:
    """Track a compiled function."""
    framework: Any = importlib.import_module("jax")
    tracker = anynan.jax.track(framework.jit(framework.numpy.log), action="record")
    tracker(framework.numpy.ones(3))
    tracker(-framework.numpy.ones(3))
    return tracker.events[0]


def tensorflow() -> anynan.Event:
    """Track a function that becomes a graph."""
    framework: Any = importlib.import_module("tensorflow")
    tracker = anynan.tensorflow.track(framework.function(framework.math.log), action="record")
    tracker(framework.ones(3))
    tracker(-framework.ones(3))
    return tracker.events[0]


def keras() -> anynan.Event:
    """Track a model through ``fit``."""
    framework: Any = importlib.import_module("keras")
    log = framework.layers.Lambda(lambda x: framework.ops.log(x))
    model = framework.Sequential([framework.Input((2,)), log, framework.layers.Dense(1)])
    model.compile("sgd", "mse")
    with anynan.keras.track(model, action="record") as tracker:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        model.fit(-np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return tracker.events[0]


PARTS: dict[str, Callable[[], anynan.Event]] = {
    "numpy": arrays, "torch": torch, "jax": jax, "tensorflow": tensorflow, "keras": keras,
}  # fmt: skip


def main(names: list[str]) -> None:
    """Run the parts that are named, then the demo of each that has one and needs nothing else."""
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            event = PARTS[name]()
        assert event.operation is not None, event
        assert (event.operation.name, event.kind) == ("log", "nan"), event
        if name in ("numpy", "torch"):  # JAX's needs flax and optax: make test-jax-older runs it
            demo = [sys.executable, "-m", "anynan", "demo", "--framework", name]
            done = subprocess.run(demo, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and "cause" in done.stdout, done.stdout + done.stderr
    seen = []
    for name in DISTRIBUTIONS:
        try:
            seen.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(f"Python {sys.version.split()[0]}, {', '.join(seen)}: {' '.join(names)} work")


if __name__ == "__main__":
    main(sys.argv[1:])
