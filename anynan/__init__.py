"""Name the layer, operation, line, cause and fix when a number goes bad.

``anynan.check`` looks at any array; ``anynan.torch.track`` watches a model or a training
step. Importing this package loads no framework: an adapter is loaded when it is first
named.

``anynan run -m pytest`` has it imported before pytest does, which warns of that but for a
word: PYTEST_DONT_REWRITE.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anynan._base import shown as _shown
from anynan._base.about import ADAPTERS as _ADAPTERS
from anynan._base.about import __version__ as __version__

_WHERE = {
    "AnomalyError": "errors",
    "AnynanWarning": "errors",
    "NonFiniteError": "errors",
    "Event": "events",
    "Advanced": "options",
    "Allow": "options",
    "Policy": "options",
    "Summary": "_base.summary",
    "Tracker": "tracker",
    "check": "_checks",
    "compare": "_apps.compare.compare",
    "expect": "_base.context",
    "load": "_apps.runfile.reading",
    "precision": "_apps.precision.precision",
    "replaying": "_base.context",
    "scope": "_base.context",
    "stress": "_apps.stress.hunt",
    "summarize": "_checks",
    "track": "arrays.tracking",
    "untrack": "tracker",
    "watch": "_steps.loaders",
}
# Names of 0.1 that have moved; each warns, and goes with 0.2.
_MOVED = {
    "Capture": "comparing",
    "Cause": "events",
    "Comparison": "comparing",
    "Headroom": "reports",
    "History": "reports",
    "LostRankError": "errors",
    "Operation": "events",
    "Run": "reports",
    "Source": "events",
    "Spread": "events",
    "Trial": "events",
    "capture": "comparing",
    "headroom": "reports",
    "namespace": "arrays",
    "render": "reports",
}
_ROOMS = ("arrays", "comparing", "errors", "events", "options", "reports")
_DOORS = ("lightning", "transformers")

__all__ = [
    "Advanced",
    "Allow",
    "AnomalyError",
    "AnynanWarning",
    "Event",
    "NonFiniteError",
    "Policy",
    "Summary",
    "Tracker",
    "check",
    "compare",
    "expect",
    "load",
    "precision",
    "replaying",
    "scope",
    "stress",
    "summarize",
    "track",
    "untrack",
    "watch",
]

if TYPE_CHECKING:
    from anynan import arrays as arrays
    from anynan import comparing as comparing
    from anynan import cupy as cupy
    from anynan import errors as errors
    from anynan import events as events
    from anynan import jax as jax
    from anynan import keras as keras
    from anynan import lightning as lightning
    from anynan import mlx as mlx
    from anynan import options as options
    from anynan import reports as reports
    from anynan import tensorflow as tensorflow
    from anynan import torch as torch
    from anynan import transformers as transformers
    from anynan._apps.compare.compare import compare
    from anynan._apps.precision.precision import precision
    from anynan._apps.runfile.reading import load
    from anynan._apps.stress.hunt import stress
    from anynan._base.context import expect, replaying, scope
    from anynan._base.summary import Summary
    from anynan._checks import check, summarize
    from anynan._steps.loaders import watch
    from anynan.arrays.tracking import track
    from anynan.errors import AnomalyError, AnynanWarning, NonFiniteError
    from anynan.events import Event
    from anynan.options import Advanced, Allow, Policy
    from anynan.tracker import Tracker, untrack


def _as_html(thing: Any) -> str:
    html: str = importlib.import_module("anynan._runs.shown").shown(thing)
    return html


def _as_text(event: Any) -> str:
    text: str = importlib.import_module("anynan._reports.report").render(event)
    return text


_shown.as_html, _shown.as_text = _as_html, _as_text


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
    if name in _MOVED:
        from anynan._base.notices import warn
        from anynan._reports.messages import RENAMED

        now = f"anynan.{_MOVED[name]}.{name}"
        warn(RENAMED(old=f"anynan.{name}", new=now), DeprecationWarning)
        return getattr(importlib.import_module(f"anynan.{_MOVED[name]}"), name)
    if name in _ADAPTERS or name in _DOORS or name in _ROOMS:
        return importlib.import_module(f"anynan.{name}")
    msg = f"module 'anynan' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_ADAPTERS, *_DOORS, *_ROOMS})
