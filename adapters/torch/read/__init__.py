"""Reduce tensors to readings, where they live."""
