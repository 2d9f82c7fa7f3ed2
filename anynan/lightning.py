"""A callback for Lightning, which the environment can ask for too."""

import os

from anynan.torch.lightning import Monitor

__all__ = ["Monitor"]


def callbacks() -> list[Monitor]:
    """Give every Trainer a Monitor if ``ANYNAN_LIGHTNING`` names its action; Lightning asks."""
    action = os.environ.get("ANYNAN_LIGHTNING", "").strip().lower()
    return [Monitor(action)] if action else []
