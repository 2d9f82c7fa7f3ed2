"""The generators a step may draw from: taken at every root call, put back for a replay."""

import ctypes
import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_CUDA = torch.backends.cuda.is_built()
# What NumPy's global generator holds: 624 words, and the place of the next.
_WORDS = 624
# The last state of it that was taken, and the memory that it was taken from.
_taken: tuple[bytes, Any] | None = None


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
        return cls(torch.get_rng_state(), devices, _of_numpy(), random.getstate())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give what is held of PyTorch's own generators, by name."""
        held = {f"torch_cuda_{device}": state for device, state in self.devices.items()}
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
        """Put the states back."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)


def _of_numpy() -> Any:
    """Take the state of NumPy's global generator; the same again while nothing was drawn.

    NumPy takes 0.1 ms to hand it out, word by word, and most steps draw nothing from it.
    """
    global _taken  # noqa: PLW0603  one generator, one state
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return np.random.get_state()  # noqa: NPY002  the user's global state, not ours
    memory = ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS + 4)
    if _taken is not None and _taken[0] == memory:
        return _taken[1]
    state: Any = np.random.get_state()  # noqa: NPY002
    _, words, place, spare, _ = state
    # A spare normal number is not in that memory: while there is one, all is taken each time.
    same = words.tobytes() + place.to_bytes(4, sys.byteorder) == memory
    _taken = (memory, state) if same and not spare else None
    return state
