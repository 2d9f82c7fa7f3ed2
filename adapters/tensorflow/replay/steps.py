"""A step: how to run it again, and what its thread knows while it runs."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from anynan._diagnosis.evidence import ReplayError
from anynan._steps.messages import MODEL_GONE
from anynan._steps.tracked import Tracked
from anynan.tensorflow.graphs.traces import Traces
from anynan.tensorflow.read.buffers import DeviceBuffers
from anynan.tensorflow.read.frames import Frame
from anynan.tensorflow.read.layers import Layers
from anynan.tensorflow.replay.reached import Began
from anynan.tensorflow.replay.taped import Differentiated


@dataclass
class Step:
    """Know how to run a step again.

    Attributes:
        target: A compiled function, or a function that can be compiled; a layer weakly.
        args: Its arguments.
        kwargs: Likewise.
        kept: Variables as they were before the step.
        layer: True where it is a layer that was called outside of every graph.
        began: What its code could reach, as it was before the step; None if it was compiled.
        ended: The exception that ended it.
        opened: How its fault showed: what was unrolled; None where a loop was parted.
        compiled: Whether it showed only under XLA.
        taped: What ran under the tape, where that is what is run again.
        gives: Whether what the function of a model gave was read.
        made: Gives the graph that ran, where a session of TensorFlow 1 ran one.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    layer: bool = False
    began: Began | None = None
    ended: BaseException | None = None
    opened: dict[str, bool] | None = field(default_factory=lambda: {"unrolled": False})
    compiled: bool = False
    taped: Differentiated | None = None
    made: Callable[[], Any] | None = None
    gives: bool = False

    def __post_init__(self) -> None:
        # The last step of a model that the program drops is never over.
        if self.layer:
            self.target = weakref.ref(self.target)

    @property
    def fn(self) -> Any:
        """Give what ran.

        Raises:
            ReplayError: If it was a model, and is gone.
        """
        found = self.target() if self.layer else self.target
        if found is None and self.layer:
            raise ReplayError(MODEL_GONE())
        return found

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Have Python's iterators keep what this step takes from them."""
        if self.began is None:
            yield
            return
        with self.began.lending(self.args, self.kwargs) as (self.args, self.kwargs):
            yield


@dataclass(frozen=True)
class Held:
    """Hold what every part of a session works on.

    Attributes:
        tracker: Judges, and is told what cannot be read.
        layers: What is watched.
        traces: The graphs known.
        buffers: Hold what graphs write.
        state: What this thread knows.
        norms: True to keep the norms of weights' gradients.
        sizes: True where it is read under XLA, too, how large values are.
        gated: True where bad gradients are not to change a weight.
        dropped: True where no bad update goes through.
        inner: True to read the gradients of layers' outputs in graphs, too.
    """

    tracker: Tracked
    layers: Layers
    traces: Traces
    buffers: DeviceBuffers
    state: "State"
    norms: bool
    sizes: bool
    gated: bool
    dropped: bool
    inner: bool


class Part:
    """Be a part of a session.

    Args:
        held: What all of them work on.
    """

    def __init__(self, held: Held) -> None:
        self._held, self._tracker, self._options = held, held.tracker, held.tracker.judge.options
        self._layers, self._traces, self._buffers = held.layers, held.traces, held.buffers
        self._state = held.state


@dataclass
class State(threading.local):
    """Hold what belongs to one thread."""

    frame: Frame | None = None
    arguments: Frame | None = None
    tapes: int = 0
    vectorised: bool = False
    scaling: int = 0
    applying: int = 0
    own: bool = False  # whether what is applied is an optimizer of the program's own
    replaying: bool = False
    backward: bool = False
    step: Step | None = None
    depth: int = 0
    outputs: list[tuple[Any, Any, str, str]] = field(default_factory=list)
    gradients: Frame | None = None
    slopes: list[Any] = field(default_factory=list)  # what a tape gave outside of graphs
    losses: list[Any] = field(default_factory=list)  # what it was asked for, and was read so
    taken: Frame = field(default_factory=lambda: Frame(None))  # what weights were written with
    open: bool = False
    held: bool = False
    fits: bool = False  # whether a compiled function of Keras's runs batches of its model
    has_loss: bool = False  # whether Keras computed one in the step that it evaluates
    updated: bool = False
    written: set[str | None] = field(default_factory=set)  # weights that the step wrote by hand
    by_hand: set[str | None] = field(default_factory=set)  # weights that were written between steps
    after: bool = False
    inline: bool = False
    asked: bool = False  # whether loops and branches run by values, as outside of graphs
    xla: bool = False
    incoming: Any = None
    broken: Frame | None = None
    # What a step called outside of graphs, and its path.
    roots: list[tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    seen: dict[Any, int] = field(default_factory=dict)
    # Whether a layer was built in the call that runs, and what variables of now began with.
    building: bool = False
    grown: list[tuple[Any, Any]] = field(default_factory=list)

    def collect(self, graph: Any) -> Frame:
        """Begin to collect readings."""
        return Frame(graph, self.replaying, xla=self.xla)
