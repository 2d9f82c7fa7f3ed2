"""How a test has a whole program watched."""

from anynan._everywhere import Found, watch_everything
from anynan.options import Options


def watched(run):
    """Give what is found while something runs."""
    found = Found()
    end = watch_everything(Options(action="record"), found)
    try:
        run()
    finally:
        end()
    return found
