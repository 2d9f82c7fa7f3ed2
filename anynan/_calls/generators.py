"""The states of random generators as tensors: NumPy's and Python's, and how they are put back.

``numpy_words``, ``numpy_at`` and ``numpy_gauss`` are what ``numpy.random.set_state`` takes after
``"MT19937"``; ``python_words`` and ``python_gauss`` what ``random.setstate`` takes after 3, with
no number for None.
"""

from typing import Any

import numpy as np

from anynan._calls.collector import Collector
from anynan._calls.tensors import HostTensor


def take(into: Collector, numpy: Any, python: Any) -> None:
    """Take the states of the global generators.

    Args:
        into: The collector.
        numpy: What ``numpy.random.get_state`` gave; None where it is not known.
        python: What ``random.getstate`` gave, likewise.
    """
    if isinstance(numpy, tuple) and numpy[0] == "MT19937":
        _, words, at, has_gauss, gauss = numpy
        _put(into, "numpy_words", words, np.uint32)
        _put(into, "numpy_at", [at, has_gauss], np.int64)
        _put(into, "numpy_gauss", [gauss], np.float64)
    if python is not None:
        _, words, gauss = python
        _put(into, "python_words", words, np.uint32)
        _put(into, "python_gauss", [] if gauss is None else [gauss], np.float64)


def _put(into: Collector, name: str, values: Any, dtype: Any) -> None:
    array = np.asarray(values, dtype)
    into.put("random", name, HostTensor.of(array.dtype.name, array))
