"""Hand an operation's call over to a bundle, with whole operands."""

import random
from typing import TYPE_CHECKING, Any

from anynan._arrays.containers import leaves
from anynan._base.context import setting
from anynan._bundle.collector import Collector, collecting
from anynan._bundle.generators import take as take_generators
from anynan._diagnosis.evidence import ReplayError
from anynan.arrays.bundle import host
from anynan.arrays.live import LiveTape
from anynan.arrays.tape import given
from anynan.arrays.trackable import is_array
from anynan.arrays.trials import Call, run_again

if TYPE_CHECKING:
    from anynan.arrays.session import ArraySession


def inputs(into: Collector, args: Any, kwargs: Any, drawn: Any) -> None:
    """Take what the call was given, and the global random states as it found them.

    Args:
        into: The collector.
        args: Of the call.
        kwargs: Of the call.
        drawn: NumPy's state, None where it was not kept; Python's has been put back.
    """
    take_generators(into, drawn, random.getstate())
    named = [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]
    for name, value in named:
        for label, x in leaves(value, name):
            if is_array(x):
                into.add("call", label, x, host)


def again(session: "ArraySession", call: Call, into: Collector) -> None:
    """Run a call that is under way once more.

    Raises:
        ReplayError: If its arguments are not as they were.
    """
    tape = call.tape
    if tape.overwritten or tape.given != given(call.args, call.kwargs):
        msg = "the call wrote into its own arguments, so it was not run again"
        raise ReplayError(msg)
    second = LiveTape(session, None)
    closed, tape.closed = tape.closed, True
    try:
        with (
            setting(collecting, into),
            session.start_of(call.fn).again(session.tracker.judge.say, second),
        ):
            inputs(into, call.args, call.kwargs, session.random)
            began = call.began.copy()
            began.run(collecting.set, into)
            began.run(run_again, session, second, call.fn, call.args, call.kwargs)
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001  the function may fail as it did
        into.notes.append(f"the second run ended with {type(error).__name__}")
    finally:
        tape.closed = closed
