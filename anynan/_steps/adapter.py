"""The contract between the core and an adapter; ``adapters/README.md`` says it in prose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anynan._arrays.summary import Summary
from anynan._diagnosis.lineage import Replay
from anynan._steps.monitor import Reading


class ReplayError(RuntimeError):
    """Raise from ``Adapter.replay`` when a step cannot be run again; the text says why."""


@dataclass(frozen=True, slots=True)
class BadParameter:
    """Describe a weight or buffer that holds bad values now.

    Attributes:
        name: Its full name (``encoder.layers.0.attn.weight``).
        layer: Path of the layer that owns it.
        summary: What it holds.
        buffer: True for a buffer (running statistics), False for a weight.
        held: False for a weight that none of the optimizers at work holds.
        optimizer: True for a part of the optimizer's state, and no weight.
        gradient: What its gradient holds, if it has one.
        state: The optimizer's state for it.
    """

    name: str
    layer: str
    summary: Summary
    buffer: bool = False
    gradient: Summary | None = None
    state: Mapping[str, Summary] = field(default_factory=dict)
    held: bool = True
    optimizer: bool = False


class Adapter(Protocol):
    """Translate one framework's hooks into readings and operation records.

    Adapters never decide: they write rows into ``tracker.judge.rows()``, call ``tracker.judge.flag`` or
    ``tracker.judge`` when values are on the host, and ``tracker.judge.close_step`` at a boundary.
    """

    backend: str

    def attach(self) -> None:
        """Install the hooks; the adapter keeps its tracker."""

    def detach(self) -> None:
        """Undo everything; safe to call twice."""

    def watched(self) -> list[str]:
        """List the paths of the layers that ought to be read when they run."""

    def set_paused(self, paused: bool) -> None:
        """Stop or resume watching, at no cost while paused."""

    def read(self) -> None:
        """Bring unread rows to the host and have them judged now."""

    def finish(self) -> None:
        """End the open step, reading what is left; the hooks go right after."""

    def replay(self, reading: Reading) -> Replay:
        """Run the failing step again, operation by operation, leaving no trace."""

    def measure(self, value: Any) -> Summary:
        """Summarise one of the framework's arrays."""

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights and buffers that hold bad values now."""

    def describe_input(self, reading: Reading, value: Any) -> tuple[int, ...]:
        """List the rows of a bad input batch that are bad."""

    def loss_scale(self) -> float | None:
        """Give the loss scale in force, None without a loss scaler."""

    def rank(self) -> int | None:
        """Give the process rank in a distributed run."""

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one tracked step."""
