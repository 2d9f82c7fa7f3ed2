"""The generators a step may draw from: taken at every root call, put back for a replay."""

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_CUDA = torch.backends.cuda.is_built()


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
        numpy = np.random.get_state()  # noqa: NPY002  the user's global state, not ours
        return cls(torch.get_rng_state(), devices, numpy, random.getstate())

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
