"""Count how far a NaN in a forward pass walks through anynan, from the call to the exception.

Run it as ``python -m tests.benchmarks.hops torch jax tensorflow``; ``-v`` lists the way.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import anynan
from anynan._steps.framework import Framework

PACKAGE = Path(anynan.__file__).parent
# What all adapters begin with is a part of each.
ADAPTERS = ("torch/", "jax/", "tensorflow/", "keras/", "cupy/", "_steps/framework.py")
# What says how it went, not what is done: words, rules and what an event is made of.
_SAYS = ("_reports/", "_diagnosis/rules/", "events.py", "errors.py")
Place = tuple[str, str]


@dataclass
class Walk:
    """Follow the functions of anynan that run inside, each by its file and name.

    Attributes:
        functions: Each once, in the order in which they are first entered.
        asked: What the core asks an adapter: methods of `Framework`, each once.
    """

    functions: list[Place] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    _callers: set[Place] = field(default_factory=set)

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        sys.setprofile(None)
        return isinstance(error, anynan.NonFiniteError)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.functions))

    @property
    def main_line(self) -> list[Place]:
        """List the functions that lead on to others, without those that only say how it went."""
        return [x for x in self.functions if x in self._callers and not x[0].startswith(_SAYS)]

    @property
    def hops(self) -> int:
        """Count the steps of the main line from one file into another."""
        files = [file for file, _ in self.main_line]
        return sum(a != b for a, b in pairwise(files))

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        place = _place(frame.f_code)
        if event != "call" or place is None:
            return
        if place not in self.functions:
            self.functions.append(place)
        back = frame.f_back
        while back is not None and _place(back.f_code) is None:
            back = back.f_back
        caller = None if back is None else _place(back.f_code)
        if caller is None:
            return
        self._callers.add(caller)
        question = place[1].rpartition(".")[2]
        is_one = question in vars(Framework) and question not in ("call", *self.asked)
        if is_one and _is_adapter(place) and not _is_adapter(caller):
            self.asked.append(question)


def _is_adapter(place: Place) -> bool:
    return place[0].startswith(ADAPTERS)


@cache
def _place(code: CodeType) -> Place | None:
    path = Path(code.co_filename)
    if code.co_qualname.startswith("<") or not path.is_relative_to(PACKAGE):
        return None
    return path.relative_to(PACKAGE).as_posix(), code.co_qualname.partition(".<locals>")[0]


def _torch(*, replay: bool) -> Callable[[float], Any]:
    import torch

    class Bad(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.log()

    model = torch.nn.Sequential(torch.nn.Identity(), Bad())
    kept = model, anynan.torch.track(model, advanced=anynan.Advanced(replay=replay))
    return lambda value: kept[0](torch.full((3,), value))


def _jax(*, replay: bool) -> Callable[[float], Any]:
    import jax
    import jax.numpy as jnp

    step = anynan.jax.track(
        jax.jit(lambda x: jnp.log(x).sum()), advanced=anynan.Advanced(replay=replay)
    )
    return lambda value: step(jnp.full(3, value))


def _tensorflow(*, replay: bool) -> Callable[[float], Any]:
    import tensorflow as tf

    @tf.function
    def log(x: Any) -> Any:
        return tf.reduce_sum(tf.math.log(x))

    step = anynan.tensorflow.track(log, advanced=anynan.Advanced(replay=replay))
    return lambda value: step(tf.fill([3], value))


STEPS: dict[str, Callable[..., Callable[[float], Any]]] = {
    "torch": _torch, "jax": _jax, "tensorflow": _tensorflow
}  # fmt: skip


def walk(backend: str, *, replay: bool) -> Walk:
    """Follow one bad call of something tracked, from the call to the exception."""
    step = STEPS[backend](replay=replay)
    for _ in range(2):  # what is made, loaded and searched once is no part of it
        step(1.0)
        with Walk():
            step(-1.0)
    with Walk() as found:
        step(-1.0)
    return found


def main() -> None:
    backends = [word for word in sys.argv[1:] if word in STEPS] or ["torch"]
    print("| | functions | files | hops | asked |\n|---|---|---|---|---|")
    for backend in backends:
        for replay in (False, True):
            found = walk(backend, replay=replay)
            name = f"{backend}{', run again' if replay else ''}"
            numbers = len(found.functions), len(found.files), found.hops, len(found.asked)
            print(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
            if "-v" in sys.argv:
                for file, function in found.functions:
                    mark = "*" if (file, function) in found.main_line else " "
                    print(f"  {mark} {file:32} {function}")
                print("  asked:", *found.asked)


if __name__ == "__main__":
    main()
