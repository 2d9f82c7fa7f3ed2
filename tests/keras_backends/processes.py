"""Run checks in a process of their own, under one backend of Keras."""

import os
import subprocess
import sys
from pathlib import Path

import anynan

HERE = Path(__file__).parent
SHARED = ("checks.py", "cost_checks.py", "compare_checks.py")


def run(backend, own):
    """Run the checks of all backends and its own, and fail with what the process says."""
    roots = [str(HERE.parents[1]), str(Path(anynan.__file__).parents[1])]
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
            "-p", "tests.keras_backends.seeding", "-o", "markers=tier(n)",
            "-o", "filterwarnings=error::anynan.AnynanWarning",  # Keras and PyTorch have their own
            *(str(HERE / file) for file in (*SHARED, own)),
        ],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONPATH": os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        cwd=HERE.parents[1],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
