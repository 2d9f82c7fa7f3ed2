"""What a report is written from, whether of a tracker that lives or of a file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from anynan._readings.history import History
from anynan._readings.step import Step
from anynan.events import Event


@dataclass(frozen=True, slots=True)
class Record:
    """Hold what was seen of a tracked run; ``Run`` says what each field is."""

    name: str
    history: History
    layers: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    counts: Mapping[str, int] = field(default_factory=Counter)
    allowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    open: Step | None = None
    step: int = 0
    evaluated: int = 0
    harms: tuple[str, ...] = ()
    target: str = ""
    backend: str | None = None
