"""``%load_ext anynan``: the magics, and how anomalies are shown."""

import sys
from collections.abc import Callable
from typing import Any

from anynan._base.tracebacks import shorten
from anynan._everywhere import Found, watch_everything
from anynan.errors import AnomalyError
from anynan.options import Options


class Extension:
    """Hold what one shell was given.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._found = Found()
        self._end: Callable[[], None] | None = None

    def load(self) -> None:
        """Register the magics, and show anomalies in short."""
        self._shell.register_magic_function(self.anynan, "line_cell", "anynan")
        self._shell.set_custom_exc((AnomalyError,), _show)

    def unload(self) -> None:
        """Watch no longer."""
        self._stop()

    def anynan(self, line: str, cell: str | None = None) -> None:
        """Watch every model: ``%anynan on``, ``off``, or ``%%anynan`` for one cell.

        ``on`` and ``%%anynan`` take an action: raise (the default), warn, record or skip. Without
        a word ``%anynan`` says what was seen so far.
        """
        words = line.split()
        if cell is not None:
            self._start(*words)
            try:
                self._shell.run_cell(cell)
            finally:
                self._stop()
        elif words[:1] == ["on"]:
            self._start(*words[1:])
        elif words == ["off"]:
            self._stop()
        elif words:
            print(f"anynan: {line!r} is unknown: say on, on warn, off, or nothing")  # noqa: T201
        else:
            self._tell()

    def _start(self, action: str = "raise") -> None:
        try:
            options = Options(action=action)  # type: ignore[arg-type]
        except ValueError as error:
            refused = sys.modules["IPython.core.error"].UsageError  # the core imports no shell
            raise refused(str(error)) from None  # shown as one line, without anynan's frames
        if self._end is not None:
            self._end()
        self._found = Found()
        self._end = watch_everything(options, self._found)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None
            self._tell()

    def _tell(self) -> None:
        lines = self._found.lines(10) or ["anynan: no model was seen running"]
        print(*lines, sep="\n")  # noqa: T201  a magic's result


def _show(shell: Any, kind: Any, error: Any, _trace: Any, tb_offset: Any = None) -> None:
    """Show an anomaly with the user's own frames: its report says the rest."""
    shorten(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)
