"""Reports as text, HTML and numbers: what they are written from, and how."""

from anynan._readings.history import History
from anynan._reports.forms import render
from anynan._runs.narrower import Headroom, headroom
from anynan._runs.run import Run

__all__ = ["Headroom", "History", "Run", "headroom", "render"]
