"""The generators a step may draw from: taken at every root call, put back for a replay.

Python's and NumPy's are Mersenne Twisters, and their own ways to hand out a state build hundreds
of numbers. Here the raw bytes are copied, and made a state of only where one is put back.
"""

import _random
import ctypes
import pickle
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_CUDA = torch.backends.cuda.is_built()
_WORDS = 624
_twister: Any = getattr(random.getstate, "__self__", None)  # the one behind random.random


def _python_raw() -> tuple[bytes, Any]:
    """Copy the generator's own fields: a position, then the words, behind the object's head."""
    head = object.__basicsize__
    size = _random.Random.__basicsize__ - head
    return ctypes.string_at(id(_twister) + head, size), _twister.gauss_next


def _python_state(kept: Any) -> Any:
    """Make what ``random.setstate`` takes."""
    if len(kept) != 2:
        return kept
    raw, gauss = kept
    at, *words = struct.unpack_from(f"={1 + _WORDS}I", raw)
    return random.Random.VERSION, (*words, at), gauss


def _is_known() -> bool:
    """Tell whether this interpreter's generator looks as expected."""
    try:
        return bool(_python_state(_python_raw()) == random.getstate())
    except (AttributeError, struct.error):
        return False


_python_now = _python_raw if _is_known() else random.getstate


class _NumpyState:
    """Take NumPy's global state, which is slow to take, only for programs that use it.

    Its raw bytes are compared first. Once they have moved, the whole state is taken every
    time, since a cached Gaussian does not show in them.
    """

    # The words, and the position.
    SIZE = _WORDS * 4 + 4

    def __init__(self) -> None:
        self._raw: bytes | None = None
        self._state: Any = None
        self._moves = False

    def state(self) -> Any:
        if not self._moves:
            generator = np.random.mtrand.get_bit_generator()
            if type(generator) is np.random.MT19937:
                raw = ctypes.string_at(generator.ctypes.state_address, self.SIZE)
                if raw == self._raw:
                    return self._state
                self._moves = self._raw is not None
                self._raw = raw
            else:
                self._moves = True
        self._state = np.random.get_state()  # noqa: NPY002  the user's global state, not ours
        return self._state


_numpy = _NumpyState()


@dataclass(slots=True)
class RandomState:
    """Hold the states of the generators a step may draw from."""

    cpu: torch.Tensor
    devices: dict[int, torch.Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Take the present states; nothing is drawn and no device is read."""
        devices = {}
        if _CUDA and torch.cuda.is_initialized():
            devices = {i: torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
        return cls(torch.get_rng_state(), devices, _numpy.state(), _python_now())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give what is held of PyTorch's own generators, by name."""
        held = {f"torch_cuda_{device}": state for device, state in self.devices.items()}
        return {"torch_cpu": self.cpu, **held}

    def python_state(self) -> Any:
        """Give what ``random.setstate`` takes."""
        return _python_state(self.python)

    def is_now(self) -> bool:
        """Tell whether no number was drawn since."""
        now = RandomState.now()
        return (
            torch.equal(self.cpu, now.cpu)
            and self.devices.keys() == now.devices.keys()
            and all(torch.equal(state, now.devices[i]) for i, state in self.devices.items())
            and _python_state(self.python) == _python_state(now.python)
            and (self.numpy is now.numpy or pickle.dumps(self.numpy) == pickle.dumps(now.numpy))
        )

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(_python_state(self.python))
