"""What a notebook shows as a picture of itself, put into words by the reports alone."""

from importlib import import_module


class Shown:
    """Be shown as static HTML by Jupyter; how is the reports' business, loaded only for it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        text: str = import_module("anynan._reports.shown").shown(self)
        return text
