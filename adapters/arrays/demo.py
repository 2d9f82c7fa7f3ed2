"""Train a small classifier of sensor readings, gradients by hand, until a real bug strikes.

``anynan demo --framework numpy`` runs this file. It is array code: the step is written over a
namespace ``xp``, and ``anynan.track`` watches it. Each line that can be the buggy one asks
``broken`` which it is.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

import anynan
from anynan._cli.outcome import show
from anynan.tracker import Tracker

BUGS = {
    "softmax": "exp of logits that nothing was subtracted from",
    "variance": "a variance as mean(x**2) - mean(x)**2, of a sensor that is stuck",
    "log": "the logarithm of a probability that rounded to 0",
    "batch": "a sensor that reports NaN",
}

Params = dict[str, Any]

ROWS, SENSORS, HIDDEN, CLASSES = 64, 6, 32, 3
STUCK = 60  # the step from which on one sensor does not move any more
STEPS = 400


# The data.


class Loader:
    """Make batches of sensor readings: temperatures, pressures, and what state they belong to."""

    def __init__(self, xp: Any, seed: int, broken: str) -> None:
        self.xp, self.seed, self.broken = xp, seed, broken
        self.centres = np.random.default_rng(seed).normal(size=(CLASSES, SENSORS))

    def batch(self, step: int) -> tuple[Any, Any]:
        """Return readings and one-hot states."""
        random = np.random.default_rng([self.seed, step])
        states = random.integers(CLASSES, size=ROWS)
        x = self.centres[states] + random.normal(scale=0.7, size=(ROWS, SENSORS))
        x[:, 3] = 1013.25 + 3 * x[:, 3]  # hPa
        if step >= STUCK:
            x[:, 3] = 1013.25 + 0.01 * random.normal(size=ROWS)
        if self.broken == "batch" and step >= STUCK:
            x[5, 2] = np.nan
        y = np.eye(CLASSES)[states]
        return self.xp.asarray(x.astype(np.float32)), self.xp.asarray(y.astype(np.float32))


# The training step.


def make_step(xp: Any, broken: str) -> Callable[..., tuple[Any, Params]]:
    """Return the function that is tracked."""

    def train_step(params: Params, x: Any, y: Any, rate: float) -> tuple[Any, Params]:
        with anynan.scope("standardise"):
            mean = xp.mean(x, axis=0)
            if broken == "variance":
                deviation = xp.sqrt(xp.mean(x * x, axis=0) - mean * mean)
                x = (x - mean) / (deviation + 1e-6)
            else:
                x = (x - mean) / xp.maximum(xp.std(x, axis=0), xp.asarray(1e-3, dtype=x.dtype))
        with anynan.scope("hidden"):
            hidden = xp.tanh(x @ params["w1"] + params["b1"])
        with anynan.scope("logits"):
            logits = hidden @ params["w2"] + params["b2"]
        with anynan.scope("softmax"):
            if broken != "softmax":
                logits = logits - xp.max(logits, axis=-1, keepdims=True)
            grown = xp.exp(logits)
            total = xp.sum(grown, axis=-1, keepdims=True)
            p = grown / total
        with anynan.scope("loss"):
            logs = xp.log(p) if broken == "log" else logits - xp.log(total)
            loss = -xp.sum(xp.where(y > 0, logs, xp.zeros_like(logs))) / ROWS
        with anynan.scope("backward"):
            slope = (p - y) / ROWS
            inner = (slope @ params["w2"].T) * (1 - hidden * hidden)
            gradients = {
                "w1": x.T @ inner,
                "b1": xp.sum(inner, axis=0),
                "w2": hidden.T @ slope,
                "b2": xp.sum(slope, axis=0),
            }
        return loss, {name: params[name] - rate * g for name, g in gradients.items()}

    return train_step


def start(xp: Any, seed: int) -> Params:
    """Draw the first weights."""
    random = np.random.default_rng(seed)
    shapes = {"w1": (SENSORS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
    return {
        name: xp.asarray(random.normal(scale=0.3, size=shape).astype(np.float32))
        for name, shape in shapes.items()
    }


def rate_of(step: int, broken: str) -> float:
    """Give the learning rate; two of the bugs show only where it is too large for too long."""
    return 0.2 * 1.06**step if broken in ("softmax", "log") else 0.2


def main(
    bug: str = "softmax", *, fixed: bool = False, steps: int | None = None, seed: int = 0,
    xp: Any = np,
) -> int:  # fmt: skip
    """Train until the bug strikes; with ``fixed``, train on without it.

    Args:
        bug: Name of the bug.
        fixed: Leave the bug out.
        steps: Stop after this many; the default is enough for every bug.
        seed: Decides data and weights.
        xp: The array library.

    Returns:
        0 if the bug was found, or stayed away from the fixed training; else 1.
    """

    def train(console: Console, broken: str, steps: int, losses: list[float]) -> Tracker:
        loader, params = Loader(xp, seed, broken), start(xp, seed)
        train_step = anynan.track(make_step(anynan.arrays.namespace(xp), broken))
        with np.errstate(all="ignore"):
            for step in range(steps):
                loss, params = train_step(params, *loader.batch(step), rate_of(step, broken))
                losses.append(float(loss))
                if step % 50 == 0:
                    console.print(f"step {step}  loss {losses[-1]:.3g}")
        return train_step

    return show(BUGS[bug], train, bug, fixed=fixed, steps=steps or STEPS, parts="scopes")
