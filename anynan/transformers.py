"""The door for transformers: a callback of its Trainer, and ``track`` for a Trainer."""

from anynan.torch.transformers import Monitor, track

__all__ = ["Monitor", "track"]
