"""What the core asks of a framework."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anynan._base import context
from anynan._base.summary import Summary
from anynan._calls.collector import Collector, collecting
from anynan._diagnosis.evidence import BadParameter, Evidence, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import Reading
from anynan._steps.loaders import bad_rows
from anynan._steps.messages import UNMEASURED
from anynan.errors import reason
from anynan.events import Event
from anynan.options import Options


@dataclass(frozen=True)
class Escalation:
    """Say what is done in the steps after a fault that was not reproduced.

    Attributes:
        begins: What; ``{steps}`` is for how many.
        found: What named it then; ``{step}`` is since which.
        over: What ends where it did not come back.
        steps: In how many steps it is done.
    """

    begins: str
    found: str
    over: str
    steps: int


EVERY_OPERATION = Escalation(
    "every operation of the next {steps} steps is watched, which is slow",
    "every operation was watched from step {step} on",
    "their operations are no longer watched",
    20,  # each takes up to five times as long, so all of them add no more than a hundred
)


class Framework:
    """Answer what the core asks of one framework; ``BaseAdapter`` is what adapters make of it.

    What a framework has not, it need not say: the methods here are the defaults.

    Attributes:
        backend: Name of the framework, as events give it.
        options: What the user asked for.
        in_order: Whether gradients are read in the order in which they are made.
        sees_training: Whether what trains can be told from what does not.
        probes: Has ``measure`` for the framework's arrays: a module.
    """

    backend: str
    probes: Any = None
    in_order = False
    sees_training = True

    def __init__(self, options: Options) -> None:
        self.options = options

    # Life.

    def attach(self) -> None:
        """Install the hooks."""

    def detach(self) -> None:
        """Undo everything; safe to call twice."""

    def watched(self) -> list[str]:
        """List the paths of the layers that ought to be read when they run."""
        return []

    def set_paused(self, paused: bool) -> None:
        """Stop or resume watching, at no cost while paused."""
        if paused:
            self.read()

    def read(self) -> None:
        """Bring unread rows to the host and have them judged now."""

    def finish(self) -> None:
        """End the open step, reading what is left; the hooks go right after."""
        self.read()

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one tracked step."""
        return fn(*args, **kwargs)

    # What is asked when something is bad.

    def replay(self, reading: Reading) -> Replay:  # noqa: ARG002  an adapter's own looks at it
        """Run the failing step again, operation by operation, leaving no trace.

        Raises:
            ReplayError: If it cannot be run again.
        """
        msg = "this framework's steps cannot be run again: the report names no operation"
        raise ReplayError(msg)

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:  # noqa: ARG002
        """Run the failing step again to its end, with operations repaired, leaving no trace.

        Where several are of one operation, a later one stands for it inside of an earlier one.

        Returns:
            What was seen; None where it cannot be run so, or ran otherwise than the first time.
        """
        return None

    def escalation(self) -> Escalation | None:
        """Say what more can be done in the next steps, where this one's fault was not reproduced.

        The adapter does it while ``judge.level`` is ``"operation"``, which it asks at each step.
        None if there is nothing.
        """
        return None

    def replay_call(self, reading: Reading) -> Replay | None:  # noqa: ARG002  as ``replay``
        """Run only the model's own call inside the failing step again, as it was called.

        Asked for where a second run of the step did not show the fault; None where there is
        no such call.

        Raises:
            ReplayError: If it cannot be run again.
        """
        return None

    def made_before(self, event: Event, taken: Sequence[Summary]) -> Replay | None:  # noqa: ARG002
        """Run again what ran before the step, where one operation alone of it made NaN or Inf.

        Args:
            event: What was seen, of the kind that came into the step.
            taken: What held it there.

        Returns:
            None where that is not known, or where it made something else.
        """
        return None

    @property
    def dialect(self) -> str:
        """Name the framework whose calls a bundle's script makes."""
        return self.backend

    def capture(self, reading: Reading, into: Collector) -> None:
        """Run the failing step again for a bundle, which is asked for by name alone.

        The replays offer each record to the collector that is set, and hand over the whole
        operands of the one it wants. An adapter's own adds what else belongs to the call: its
        inputs, the layer's inputs and weights, random states.

        Raises:
            ReplayError: If it cannot be run again.
        """
        if reading.phase == "parameter":  # no call made it
            return
        with context.setting(collecting, into):
            self.replay(reading)
            if into.call is None:
                self.replay_call(reading)

    def evidence(self, reading: Reading, value: Any) -> Evidence:
        """Hand over what is known of a failure; what cannot be found out is noted.

        Args:
            reading: What is bad.
            value: The framework's array, None if it is gone.
        """
        notes: list[str] = []

        def ask(what: str, found: Callable[[], Any], otherwise: Any) -> Any:
            try:
                return found()
            except Exception as error:  # noqa: BLE001  what was found must not be lost
                notes.append(UNMEASURED(what=what, error=reason(error)))
                return otherwise

        summary, rows = None, ()
        if value is not None:
            failed = "the bad value could not be measured"
            summary = ask(failed, lambda: self.measure(value), None)
        if reading.phase == "input":
            failed = "the bad rows could not be listed"
            rows = ask(failed, lambda: self.bad_rows(value), ())
            notes += ask("what made it could not be read", lambda: self.computed(value), ())
        return Evidence(
            backend=self.backend,
            rank=self.rank(),
            scale=ask("the loss scale could not be read", self.loss_scale, None),
            summary=summary,
            rows=rows,
            weights=self.bad_weights,
            notes=tuple(notes),
        )

    def measure(self, value: Any) -> Summary:
        """Summarise one of the framework's arrays."""
        summary: Summary = self.probes.measure(value)
        return summary

    def memory(self, value: Any) -> Callable[[Any], bool] | None:
        """Give what tells whether another array lies in this one's memory; it keeps neither.

        None where that cannot be told.
        """
        try:
            ref = weakref.ref(value)
        except TypeError:
            return None
        return lambda other: other is ref()

    def bad_rows(self, value: Any) -> tuple[int, ...]:
        """List the rows of a bad input batch that are bad."""
        return bad_rows(value)

    def computed(self, value: Any) -> Sequence[str]:  # noqa: ARG002  an adapter's own looks at it
        """Say that an input is no data as it was loaded, where the array itself tells."""
        return ()

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights and buffers that hold bad values.

        Where a step fails these are what it began with: what the failing call itself wrote into
        a buffer is no cause of that call.
        """
        return []

    def is_bad(self, item: BadParameter) -> bool:
        """Tell whether a weight or buffer that was bad still is.

        Asked in every step while the program goes on with it: a look at this one alone is enough.
        """
        return any(item.name == other.name for other in self.bad_weights())

    def bad_weights(self) -> list[BadParameter]:
        """List of those the weights that the policy calls bad, and the buffers that may be."""
        spoils = self.options.policy.spoils
        return [
            item
            for item in self.bad_parameters()
            if spoils(item.summary.kind, item.layer, buffer=item.buffer)
        ]

    def loss_scale(self) -> float | None:
        """Give the loss scale in force, None without a loss scaler."""
        return None

    def rank(self) -> int | None:
        """Give the process rank in a distributed run."""
        return None
