"""The generators a step may draw from: taken at every root call, put back for a replay."""

import array
import ctypes
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# What either global generator holds: 624 words, and the place of the next.
_WORDS = 624


@dataclass(slots=True)
class RandomState:
    """Hold the states of the generators a step may draw from."""

    cpu: torch.Tensor
    devices: dict[str, torch.Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Take the present states; nothing is drawn and no device is read."""
        return cls(torch.get_rng_state(), _of_devices(), _of_numpy(), _of_python())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give what is held of PyTorch's own generators, by name."""
        held = {f"torch_{name.replace(':', '_')}": x for name, x in self.devices.items()}
        return {"torch_cpu": self.cpu, **held}

    def is_now(self) -> bool:
        """Tell whether no number was drawn since."""
        now = RandomState.now()
        return (
            torch.equal(self.cpu, now.cpu)
            and self.devices.keys() == now.devices.keys()
            and all(torch.equal(state, now.devices[i]) for i, state in self.devices.items())
            and self.python == now.python
            and pickle.dumps(self.numpy) == pickle.dumps(now.numpy)
        )

    def restore(self) -> None:
        """Put the states back, where a number was drawn since."""
        if self.is_now():
            return
        torch.set_rng_state(self.cpu)
        for name, state in self.devices.items():
            torch.get_device_module(name).set_rng_state(state, name)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)


def _of_devices() -> dict[str, torch.Tensor]:
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {}
    module = torch.get_device_module(kind)
    used = getattr(module, "is_initialized", module.is_available)
    if not (used() and hasattr(module, "get_rng_state")):
        return {}
    names = [f"{kind.type}:{i}" for i in range(module.device_count())]
    return {name: module.get_rng_state(name) for name in names}


class _Memory:
    """Give a generator's state again for as long as the memory that it lies in is the same.

    Either generator is slow to hand out its 624 words, one by one, and most steps draw nothing.

    Args:
        take: Takes the state.
        words: Gives the words and the place of the next in a state, None where it holds more
            than that memory does, as a spare normal number.
    """

    def __init__(
        self, take: Callable[[], Any], words: Callable[[Any], tuple[bytes, int] | None]
    ) -> None:
        self._take, self._words = take, words
        self._owner: Any = None
        self._memory: Any = None
        self._known: tuple[bytes, Any] | None = None

    def state(self, owner: Any, address: Callable[[], int]) -> Any:
        """Give the present state.

        Args:
            owner: Whose memory it is, which is kept with it.
            address: Tells where its words lie.
        """
        if owner is not self._owner:
            self._owner, self._known = owner, None
            self._memory = (ctypes.c_char * (4 * _WORDS + 4)).from_address(address())
        memory: bytes = self._memory.raw
        if self._known is not None and self._known[0] == memory:
            return self._known[1]
        state = self._take()
        found = self._words(state)
        # The memory is believed where it holds what the state says.
        same = found is not None and memory in _orders(*found)
        self._known = (memory, state) if same else None
        return state


def _orders(words: bytes, place: int) -> tuple[bytes, bytes]:
    """Give how the words and the place may lie."""
    at = place.to_bytes(4, sys.byteorder)
    return words + at, at + words


_numpy = _Memory(
    lambda: np.random.get_state(),  # noqa: NPY002, PLW0108  the user's, and as it is called now
    lambda state: None if state[3] else (state[1].tobytes(), state[2]),
)
_python = _Memory(
    random.getstate, lambda state: (array.array("I", state[1][:-1]).tobytes(), state[1][-1])
)
_own: Any = random.getstate.__self__  # type: ignore[attr-defined]
# CPython's object is its head, then the place and the words, and nothing that its type leaves out.
_HEAD = object.__basicsize__
_LIES = (
    sys.implementation.name == "cpython"
    and array.array("I").itemsize == 4
    and type(_own) is random.Random
    and random.Random.__basicsize__ >= _HEAD + 4 * _WORDS + 4
)


def _of_numpy() -> Any:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return np.random.get_state()  # noqa: NPY002
    return _numpy.state(generator, lambda: generator.ctypes.state_address)


def _of_python() -> Any:
    if not _LIES or _own.gauss_next is not None:
        return random.getstate()
    return _python.state(_own, lambda: id(_own) + _HEAD)
