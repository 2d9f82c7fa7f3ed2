"""What the package is, for its own rooms: its version, and the adapters that come with it."""

__version__ = "0.1.0"
ADAPTERS = ("torch", "jax", "tensorflow", "keras", "cupy")
