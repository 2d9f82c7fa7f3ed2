"""The suites: each is a module of its own with ``cases``, ``run`` and ``SAMPLE``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """What must be known of a suite before its module is imported.

    Attributes:
        packages: What it needs; their versions are part of a row.
        adapters: Those it runs; their sources and the core's are a row's state of anynan.
        fork: Import the module once and fork for every case. Not for what starts threads when
            it is imported or first used before the fork: JAX, TensorFlow.
        seconds: How much of the processor's time one case may take, and how long stand still.
        gigabytes: How much memory one case may hold.
    """

    packages: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    fork: bool = False
    seconds: float = 180.0
    gigabytes: float = 4.0


SUITES = {
    "torch_modules": Suite(("torch", "expecttest"), ("torch",), fork=True),
    "torch_operators": Suite(("torch", "expecttest"), ("torch",), fork=True),
    "jax": Suite(
        (
            *("jax", "flax", "optax", "equinox", "dm-haiku", "jraph"),
            *("numpyro", "blackjax", "diffrax", "optimistix"),
        ),
        ("jax",),
        fork=True,
        seconds=900,
    ),
    "keras_tensorflow": Suite(
        ("keras", "tensorflow_cpu"), ("keras", "tensorflow"), fork=True, seconds=900, gigabytes=8
    ),
    "keras_torch": Suite(("keras", "torch"), ("keras", "torch"), fork=True, seconds=600),
    "keras_jax": Suite(("keras", "jax"), ("keras", "jax"), fork=True, seconds=600),
    "array_api": Suite(
        ("numpy", "array_api_strict", "hypothesis", "ndindex", "pytest-json-report"),
        fork=True,
        seconds=1200,
    ),
    "libraries": Suite(
        ("numpy", "scipy", "scikit-learn", "statsmodels", "pandas", "xarray"), fork=True
    ),
    "transformers": Suite(("torch", "transformers"), ("torch",), fork=True),
    "timm": Suite(("torch", "timm"), ("torch",), fork=True, seconds=600),
    "diffusers": Suite(("torch", "diffusers"), ("torch",), fork=True),
    "torch_geometric": Suite(("torch", "torch-geometric"), ("torch",), fork=True),
    "torchvision": Suite(("torch", "torchvision"), ("torch",), fork=True, seconds=600),
    "peft": Suite(("torch", "peft", "transformers"), ("torch",), fork=True),
}
