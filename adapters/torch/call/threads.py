"""The threads that run what is tracked, each with a step of its own."""

import threading

from anynan.torch.call.models import Models
from anynan.torch.call.state import State
from anynan.torch.private import task
from anynan.torch.read.slots import DeferredSlots, ImmediateSlots, Slots


class _Own(threading.local):
    """Hold the state of each thread."""

    state: State | None = None


class _Rest:
    """Stand in for it while hooks have to stay, but not to look."""

    def __init__(self) -> None:
        self.state: State | None = State(ImmediateSlots(()))
        self.state.idle = True


class Threads:
    """Give each thread its state.

    Args:
        models: What is watched; its options and devices say where readings land.

    Attributes:
        own: Holds this thread's state, None until it ran something.
        states: All of them. Held strongly: what an ended thread left unread is still read at
            the end.
    """

    def __init__(self, models: Models) -> None:
        self.models = models
        self.own: _Own | _Rest = _Own()
        self.states: set[State] = set()
        self._awake: _Own | _Rest | None = None

    def state(self) -> State:
        """Return this thread's state."""
        state = self.own.state
        if state is None:
            extra = self.models.options.extra
            slots: Slots = ImmediateSlots(extra) if self._immediate() else DeferredSlots(extra)
            state = self.own.state = State(slots)
            state.in_step = self.models.fn is not None
            self.states -= {other for other in self.states if other.spent}
            self.states.add(state)
        return state

    def owner(self, state: State | None = None) -> State:
        """Return the state of the step whose backward pass runs, maybe in a thread of its own."""
        state = state or self.state()
        if state.rows is None and task() != -1:
            open_ = [other for other in self.states if other.rows is not None]
            for other in open_:
                if other.saw_backward or len(open_) == 1:
                    return other
        return state

    def sleep(self) -> None:
        """Have the hooks find an idle state, in every thread."""
        self._awake, self.own = self.own, _Rest()

    def wake(self) -> bool:
        """Give the states back; tell whether they had been taken."""
        if self._awake is None:
            return False
        self.own, self._awake = self._awake, None
        return True

    def _immediate(self) -> bool:
        read = self.models.options.read
        if read != "auto":
            return read == "immediate"
        return all(p.device.type == "cpu" for _, p in self.models.parameters())
