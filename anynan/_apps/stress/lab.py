"""What only a framework can do for a hunt, and the watch that is kept over a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import numpy as np

from anynan._apps.stress.edges import Margin, Site, edges, place
from anynan._arrays.access import dtype_name
from anynan._diagnosis.lineage import PLACING
from anynan._reach import Holder
from anynan._trace.op import Observed, Observer, Op
from anynan._trace.target import Target
from anynan.tracker import Tracker

Array = np.ndarray
# An infinity that these make was written there.
_PLACING = PLACING | {"random"}


class Watch:
    """See every operation of a run: its distance from its edges, and what goes bad first.

    Args:
        target: Brings arrays to the host.
        wanted: The edge whose operands are kept, to be differentiated.

    Attributes:
        wanted: The same.
        margins: The smallest distance of each edge.
        kept: Operands of the edge that is wanted.
        bad: The first operation that made NaN or Inf of finite numbers, and where it is.
        raw: What the framework calls the operations that ran.
        phases: Which phases they are of.
        spoilt: Whether the last result is NaN or Inf.
    """

    def __init__(self, target: Target, wanted: Site | None = None) -> None:
        self._target, self.wanted = target, wanted
        self.margins: dict[Site, Margin] = {}
        self.kept: list[Any] = []
        self.bad: tuple[Any, ...] | None = None
        self.raw: set[str] = set()
        self.phases: set[str] = set()
        self.spoilt = False

    def __call__(self, op: Op) -> None:
        """See one operation."""
        self.raw.add(op.raw)
        self.phases.add(op.phase)
        for edge in edges(op):
            x = edge.array(op)
            if not self._target.is_array(x):
                continue
            numbers = edge.numbers(op, self._target.host(x))
            if not numbers.size:
                continue
            site = Site(op.name, edge, op.layer, op.source)
            distance = edge.distance(numbers)
            known = self.margins.get(site)
            if known is None or distance < known.distance:
                self.margins[site] = Margin(site, distance, edge.bits(distance, dtype_name(x)))
            if site == self.wanted:
                self.kept.append(x)
        floats = self._floats(op.outputs)
        if op.blank or not floats:  # blank: the numbers of memory that somebody else has used
            return
        self.spoilt = not all(np.isfinite(x).all() for x in floats)
        if self.spoilt and self.bad is None and self._makes_bad(op, floats):
            self.bad = op.name, place(op.source, op.layer)

    def _makes_bad(self, op: Op, results: Sequence[Array]) -> bool:
        nan = any(np.isnan(x).any() for x in results)
        given = self._floats(x for _, x in op.inputs)
        if nan and op.name != "copy":
            return not any(np.isnan(x).any() for x in given)
        return op.name not in _PLACING and all(np.isfinite(x).all() for x in given)

    def _floats(self, arrays: Iterable[Any]) -> list[Array]:
        return [x for x in map(self._target.numbers, arrays) if x is not None]


class Lab(Target):
    """Run a target of one framework on changed inputs.

    Attributes:
        door: The framework's ``track``.
        target: What is run.
        args: The example.
        parameters: What the target calls its arguments.
        deadly: Operations whose own code ends the process, and what of ``Trial.odd`` does it.
        trains: Whether a run changes what the next one finds, as a training step does.
        imports: What code that writes an array needs, a line each.
    """

    door: Callable[..., Any]
    trains = False
    deadly: Mapping[str, str] = MappingProxyType({})
    parameters: Sequence[str] = ()
    imports: tuple[str, ...] = ()

    def __init__(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(target, args, kwargs)
        self.target, self.args = target, args

    def changes(self, x: Any) -> bool:
        """Tell whether something is an array that a hunt may change."""
        return self.is_array(x)

    def code(self, x: Any) -> str:
        """Write ``like``: code with ``{}`` where the numbers go, as an array of NumPy's."""
        raise NotImplementedError

    def observe(self, program: Callable[..., Any], xs: Sequence[Any], watch: Observer) -> Observed:
        """Run a program once, and leave no trace."""
        return self.shows(program, tuple(xs), {}, watch)

    def phases(self) -> set[str]:
        """Run the example, and tell which phases it has."""
        found = set[str]()
        self.observe(self.target, self.args, lambda op: found.add(op.phase))
        return found

    def track(self, program: Callable[..., Any], **options: Any) -> Tracker:
        """Track a program as always, to record events."""
        tracker: Tracker = self.door(program, action="record", **options)
        return tracker

    def results(self, value: Any) -> Any:
        """Give what the target itself returned, of what a run did."""
        return value

    def held(self) -> list[Holder]:
        """Say where its code reaches data past its arguments."""
        return []

    def weights(self) -> list[Holder]:
        """Say where the weights are that a training step moves."""
        return []

    def slopes(
        self, program: Callable[..., Any], xs: Sequence[Any], watch: Watch
    ) -> list[Array | None]:
        """Run a program, and differentiate its smallest distance from an edge to its inputs.

        Args:
            program: What to run.
            xs: Its inputs.
            watch: Keeps the operands of the edge that is wanted.

        Returns:
            The slope of each input; None where there is none.
        """
        self.observe(program, xs, watch)
        return [None for _ in xs]

    def sloped(self, program: Callable[..., Any]) -> Callable[..., Any] | None:
        """Take the gradient of what a program gives, of 1 each, to its inputs, as a caller may."""
        del program
        return None

    def kept(self, program: Callable[..., Any]) -> AbstractContextManager[object]:
        """Put everything back that a program changes inside."""
        raise NotImplementedError

    def modes(self) -> Iterator[tuple[str, Callable[[], AbstractContextManager[object]]]]:
        """Give other ways to run it: in evaluation, under autocast."""
        return iter(())
