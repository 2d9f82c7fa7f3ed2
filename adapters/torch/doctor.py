"""What ``anynan doctor`` tells of PyTorch."""

import torch

from anynan._diagnosis.rules.evidence import plural

WATCHED = "modules and training steps, forward and backward, eager and under torch.compile"
UNWATCHED = "inside of vmap, export and scripted modules"


def devices() -> list[str]:
    """List the devices that PyTorch sees."""
    found = [f"cpu with {plural(torch.get_num_threads(), 'thread')}"]
    kind = torch.accelerator.current_accelerator(check_available=True)
    for i in range(0 if kind is None else torch.accelerator.device_count()):
        name = getattr(torch.get_device_module(kind), "get_device_name", None)
        found.append(f"{kind}:{i}" if name is None else name(i))
    return found
