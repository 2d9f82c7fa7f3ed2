"""Name the layer, operation, line, cause and fix when a number goes bad.

``anynan.check`` looks at any array; ``anynan.torch.track`` watches a model or a training
step. Importing this package loads no framework: an adapter is loaded when it is first
named.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anynan._runtime.about import ADAPTERS as _ADAPTERS
from anynan._runtime.about import __version__ as __version__

_WHERE = {
    "AnomalyError": "errors",
    "AnynanWarning": "errors",
    "LostRankError": "errors",
    "NonFiniteError": "errors",
    "Cause": "events",
    "Event": "events",
    "Operation": "events",
    "Source": "events",
    "Spread": "events",
    "Trial": "events",
    "Summary": "_arrays.summary",
    "Allow": "_readings.policy",
    "Policy": "_readings.policy",
    "Run": "_reports.run",
    "Capture": "_compare.captures",
    "Comparison": "_compare.comparison",
    "capture": "_compare.compare",
    "compare": "_compare.compare",
    "load": "_jsonl.reading",
    "render": "_reports.forms",
    "expect": "_runtime.context",
    "replaying": "_runtime.context",
    "scope": "_runtime.context",
    "check": "_checks",
    "summarize": "_checks",
    "History": "_readings.history",
    "Tracker": "_steps.tracker",
    "Headroom": "_outlook.narrower",
    "headroom": "_outlook.narrower",
    "namespace": "_recorder.tracking",
    "track": "_recorder.tracking",
    "watch": "_steps.loaders",
}
_DOORS = ("lightning", "transformers")

__all__ = [
    "Allow",
    "AnomalyError",
    "AnynanWarning",
    "Capture",
    "Cause",
    "Comparison",
    "Event",
    "Headroom",
    "History",
    "LostRankError",
    "NonFiniteError",
    "Operation",
    "Policy",
    "Run",
    "Source",
    "Spread",
    "Summary",
    "Tracker",
    "Trial",
    "capture",
    "check",
    "compare",
    "expect",
    "headroom",
    "load",
    "namespace",
    "render",
    "replaying",
    "scope",
    "summarize",
    "track",
    "watch",
]

if TYPE_CHECKING:
    from anynan import cupy as cupy
    from anynan import jax as jax
    from anynan import keras as keras
    from anynan import lightning as lightning
    from anynan import tensorflow as tensorflow
    from anynan import torch as torch
    from anynan import transformers as transformers
    from anynan._arrays.summary import Summary
    from anynan._checks import check, summarize
    from anynan._compare.captures import Capture
    from anynan._compare.compare import capture, compare
    from anynan._compare.comparison import Comparison
    from anynan._jsonl.reading import load
    from anynan._outlook.narrower import Headroom, headroom
    from anynan._readings.history import History
    from anynan._readings.policy import Allow, Policy
    from anynan._recorder.tracking import namespace, track
    from anynan._reports.forms import render
    from anynan._reports.run import Run
    from anynan._runtime.context import expect, replaying, scope
    from anynan._steps.loaders import watch
    from anynan._steps.tracker import Tracker
    from anynan.errors import AnomalyError, AnynanWarning, LostRankError, NonFiniteError
    from anynan.events import Cause, Event, Operation, Source, Spread, Trial


def load_ipython_extension(shell: Any) -> None:
    """Answer ``%load_ext anynan``: magics, short tracebacks."""
    global _extension  # noqa: PLW0603  one process has one shell
    from anynan._notebooks.extension import Extension

    _extension = Extension(shell)
    _extension.load()


def unload_ipython_extension(shell: Any) -> None:  # noqa: ARG001  as IPython calls it
    """Answer ``%unload_ext anynan``."""
    if _extension is not None:
        _extension.unload()


_extension: Any = None


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"anynan.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if name in _ADAPTERS or name in _DOORS:
        return importlib.import_module(f"anynan.{name}")
    msg = f"module 'anynan' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_ADAPTERS, *_DOORS})
