"""What ``anynan doctor`` tells of PyTorch."""

import torch

WATCHED = "modules and training steps, forward and backward, eager and under torch.compile"
UNWATCHED = "inside of vmap, export and scripted modules"


def devices() -> list[str]:
    """List the devices that PyTorch sees."""
    found = [f"cpu with {torch.get_num_threads()} threads"]
    found += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found + ["mps"] * torch.backends.mps.is_available()
