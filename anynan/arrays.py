"""Array code: the library that a tracked function records, as a namespace."""

from anynan._recorder.tracking import namespace

__all__ = ["namespace"]
