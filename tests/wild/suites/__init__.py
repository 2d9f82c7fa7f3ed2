"""The suites: each is a module of its own with ``cases``, ``run`` and ``SAMPLE``."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        module: The module, where it is none of this folder's and of the suite's name.
        environment: What must be in the environment before it is imported.
    """

    packages: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    fork: bool = False
    seconds: float = 180.0
    gigabytes: float = 4.0
    module: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def _keras(backend: str, package: str, **limits: float) -> Suite:
    return Suite(
        ("keras", package),
        ("keras", backend),
        fork=True,
        **limits,
        module="tests.wild.keras_training",
        environment={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


SUITES = {
    "torch_modules": Suite(("torch", "expecttest"), ("torch",), fork=True),
    "torch_operators": Suite(("torch", "expecttest"), ("torch",), fork=True),
    "jax": Suite(("jax", "flax", "optax", "equinox", "diffrax"), ("jax",), fork=True, seconds=900),
    "keras_tensorflow": _keras("tensorflow", "tensorflow_cpu", seconds=900, gigabytes=8),
    "keras_torch": _keras("torch", "torch", seconds=600),
    "keras_jax": _keras("jax", "jax", seconds=600),
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
