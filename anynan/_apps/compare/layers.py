"""Collect what the layers of a model are given and make while it runs."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from anynan._apps.compare.captures import Array, Choice, RecordedChoices, RunRequest, Taken, Way
from anynan._base.sources import is_anynans, user_source
from anynan.events import Source


@dataclass(slots=True)
class LayerCall:
    """Hold one call of a layer; ``started`` says how many calls had ended before."""

    layer: str
    kind: str
    number: int
    started: int
    given: tuple[Array, ...]
    into: Sequence[Any]
    out_of: Sequence[Any] = ()


class LayerCapture:
    """Collect what layers are given and make, and what is chosen on the way.

    Args:
        wish: How the model runs.
        host: Brings a tensor to the host.
        line: Finds the line of the program that runs now.
    """

    def __init__(
        self, wish: RunRequest, host: Callable[[Any], Array], line: Callable[[], Source | None]
    ) -> None:
        self.wish, self._host, self._line = wish, host, line
        self.calls: dict[str, int] = defaultdict(int)
        self.open: list[LayerCall] = []
        self.ended: list[LayerCall] = []
        self.taken: list[Taken] = []
        self.choices: list[Choice] = []
        self._held = RecordedChoices(wish.follow or ())

    def enter(self, layer: str, kind: str, into: Sequence[Any]) -> None:
        """Begin a call of a layer."""
        given = self._arrays(into)
        call = LayerCall(layer, kind, self.calls[layer], len(self.taken), given, into)
        self.calls[layer] += 1
        self.open.append(call)

    def leave(self, out_of: Sequence[Any]) -> None:
        """End the innermost call."""
        call = self.open.pop()
        call.out_of = out_of
        self._take(call, "forward", call.given, self._arrays(out_of))
        self.ended.append(call)

    def _arrays(self, found: Sequence[Any]) -> tuple[Array, ...]:
        return tuple(map(self._host, found)) if self.wish.inside is None else ()

    def _take(
        self, call: LayerCall, way: Way, given: tuple[Array, ...], made: tuple[Array, ...]
    ) -> None:
        self.taken.append(Taken(call.layer, call.kind, call.number, way, given, made))

    def go_back(self, found: Iterable[tuple[Any, Any]], weights: Iterable[tuple[str, Any]]) -> None:
        """Take the gradients of tensors, beside each, and of each layer's own weights."""
        grads = {id(x): self._host(grad) for x, grad in found if grad is not None}
        own: dict[str, list[Array]] = defaultdict(list)
        for layer, x in weights:
            own[layer] += [grads[id(x)]] if id(x) in grads else []
        for call in sorted(self.ended, key=lambda call: call.started, reverse=True):
            given = tuple(grads[id(x)] for x in call.out_of if id(x) in grads)
            made = [grads[id(x)] for x in call.into if id(x) in grads]
            if self.calls[call.layer] == 1:
                made += own[call.layer]
            if given and made:
                self._take(call, "backward", given, tuple(made))

    def held_to(self, name: str, mine: Array) -> Array | None:
        """Find what to hold a choice to; None where there is nothing, or it is the same."""
        found = self._held.next(name, mine.shape)
        return None if found is None or np.array_equal(found.picked, mine) else found.picked

    def choose(
        self, name: str, mine: Array, like: Array | None = None, *, gate: bool = False,
        drawn: bool = False,
    ) -> None:  # fmt: skip
        """Note what a discrete operation chose by itself, and what it was held to."""
        layer = self.open[-1].layer if self.open else ""
        picked, moved = (mine, 0.0) if like is None else (like, float(np.mean(like != mine)))
        self.choices.append(
            Choice(name, layer, self._line(), picked, len(self.taken), moved, gate, drawn)
        )


def line(framework: str, passes: Callable[[str], bool] = is_anynans) -> Source | None:
    """Find the line that called a framework, past files that only hand calls on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and passes(frame.f_code.co_filename):
        frame = frame.f_back
    return user_source(frame, framework=framework)
