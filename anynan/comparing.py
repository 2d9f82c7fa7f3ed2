"""What ``anynan.compare`` returns, and a capture to compare across machines."""

from anynan._apps.compare.captures import Capture
from anynan._apps.compare.compare import capture
from anynan._apps.compare.comparison import Comparison, Parting, Row, Turn

__all__ = ["Capture", "Comparison", "Parting", "Row", "Turn", "capture"]
