"""How a test has a whole program watched."""

from anynan._everywhere import Found, watch_everything
from anynan.options import Options


def watched(run):
    found = Found()
    end = watch_everything(Options(action="record"), found)
    try:
        run()
    finally:
        end()
    return found
