"""What an adapter knows of a failure, handed over once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anynan._base.messages import slug_of
from anynan._base.summary import Summary
from anynan._diagnosis.messages import NO_SECOND_RUN


class ReplayError(RuntimeError):
    """Raise from ``BaseAdapter.replay`` when a step cannot be run again; the text says why."""

    @property
    def note(self) -> str:
        """Return the reason as a message: its own, where it is one."""
        why = str(self)
        return why if slug_of(why) else NO_SECOND_RUN(why=why)


@dataclass(frozen=True, slots=True)
class BadParameter:
    """Describe a weight or buffer that holds bad values now.

    Attributes:
        name: Its full name (``encoder.layers.0.attn.weight``).
        layer: Path of the layer that owns it.
        summary: What it holds.
        buffer: True for a buffer (running statistics), False for a weight.
        held: False for a weight that none of the optimizers at work holds.
        lost: True where an optimizer that may have written it is gone, with its state.
        optimizer: True for a part of the optimizer's state, and no weight.
        before: False for a buffer that the failing call itself may have written.
        after: True for what the failing step's own update wrote.
        gradient: What its gradient holds, if it has one.
        state: The optimizer's state for it.
        settings: The numbers its optimizer works with (``lr``, ``eps``).
    """

    name: str
    layer: str
    summary: Summary
    buffer: bool = False
    gradient: Summary | None = None
    state: Mapping[str, Summary] = field(default_factory=dict)
    held: bool = True
    lost: bool = False
    optimizer: bool = False
    before: bool = True
    after: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Hold what an adapter knows of a failure, beside the readings and a replay.

    Attributes:
        backend: Name of the framework.
        rank: Process rank in a distributed run.
        scale: The loss scale in force, None without a loss scaler.
        summary: What the bad array holds, where it is at hand.
        rows: Rows of a bad batch that are bad.
        weights: List the weights and buffers that are bad; asked only where one may be to blame.
        notes: What could not be found out, and why.
    """

    backend: str
    rank: int | None = None
    scale: float | None = None
    summary: Summary | None = None
    rows: tuple[int, ...] = ()
    weights: Callable[[], list[BadParameter]] = list
    notes: tuple[str, ...] = ()
