"""A callback for the Trainer of transformers, and ``track`` for a Trainer."""

from anynan.torch.transformers import Monitor, track

__all__ = ["Monitor", "track"]
