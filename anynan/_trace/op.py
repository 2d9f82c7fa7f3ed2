"""One operation of a run, as every framework can tell it, and the run that shows them.

An adapter gives an ``Observe``: it runs a target once, shows each operation to an observer as it
runs, and leaves no trace. What wants to see every operation, whatever became of it, is written on
these and knows no framework.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anynan._base.context import expectations
from anynan.events import Phase, Source


class Op:
    """Tell of one operation.

    An adapter derives from it; what costs something to find out is a property there. Ask while it
    is shown: afterwards the frames are gone, and the program may have written over its arrays.

    Attributes:
        number: Its place in the run, from 0.
        name: What it is called in the vocabulary of ``anynan._diagnosis.vocabulary``.
        kernel: What computes it, in the same words: of a backward operation, where it is known.
        raw: What the framework calls it.
        layer: Path of the layer whose code it is in; None outside of every layer.
        call: Which call of that layer, from 0.
        phase: ``forward``, ``loss`` (in no layer), ``backward`` or ``optimizer`` (in an update).
        source: The user's line; None where it is not known.
        inputs: The arrays of numbers with a fraction it works on, by the names of its operands;
            as they were before it ran, if it wrote to one.
        outputs: What it gave: arrays of any dtype, in order.
        params: Plain arguments that a rule may ask for: ``dim``, ``eps``, ...
        forward: For a backward operation, the number of the forward one it belongs to.
        written: Whether it wrote into an array that was there before, and made no new one.
        expected: Reason by kind, where it ran inside ``anynan.expect``.
    """

    number: int
    name: str
    kernel: str
    raw: str
    layer: str | None
    call: int
    phase: Phase
    forward: int | None = None
    written: bool = False
    expected: Mapping[str, str] | None = None

    @property
    def source(self) -> Source | None:
        """Give the user's line."""
        raise NotImplementedError

    @property
    def inputs(self) -> Sequence[tuple[str, Any]]:
        """Give the arrays it works on, by name."""
        raise NotImplementedError

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        raise NotImplementedError

    @property
    def params(self) -> Mapping[str, Any]:
        """Give its plain arguments."""
        raise NotImplementedError

    @property
    def blank(self) -> bool:
        """Tell whether it only takes memory, with whatever numbers are in it."""
        return "empty" in self.kernel

    def rerun(
        self, inputs: Mapping[str, Any] | None = None, dtype: str | None = None
    ) -> Sequence[Any]:
        """Run it once more, in nobody's sight, and give what it makes then.

        Args:
            inputs: Others in the place of some of its operands, by name.
            dtype: Cast every operand with a fraction to it first, and have it compute in that.

        Raises:
            RerunError: If it cannot be run so: the framework has no such kernel, for one.
        """
        raise NotImplementedError


# By what a run knows a value: the number of the operation that made it and which of its results it
# is, or ``"weight"`` and its name, or anything else that stands for an array that was there.
Key = tuple[Any, Any]
# Layer, which call of it, phase and line.
Place = tuple[str | None, int, Phase, Source | None]


class LinkedOp(Op):
    """Tell of an operation also what made its operands, so that records can be made of it.

    Attributes:
        given: What it works on, by the names of its operands: arrays, and Python's numbers.
        operands: By what each of those arrays is known.
        results: By what its results are known; of a gradient, see ``of``.
        grown: By what those operands are known that a gradient may reach.
        of: For a gradient, the forward operation; it gives one result for each of its ``grown``,
            and its incoming gradients are ``given`` as ``grad``, ``grad1``, ...
        chain: What made its first operand, and the first operand of that.
        made: What it made, while it is shown.
    """

    def __init__(
        self, number: int, name: str, raw: str, place: Place, given: Sequence[tuple[str, Any]],
        params: Mapping[str, Any], of: "LinkedOp | None" = None,
    ) -> None:  # fmt: skip
        self.number, self.raw, self.of = number, raw, of
        self.name = self.kernel = name
        self.layer, self.call, self.phase, self._source = place
        self.given, self._params = given, params
        self.forward = None if of is None else of.number
        self.expected = expectations() if of is None else of.expected
        self.operands: Mapping[str, Key] = {}
        self.results: Sequence[Key] = ()
        self.grown: Sequence[Key] = ()
        self.chain: Sequence[str] = ()
        self.made: Sequence[Any] = ()

    @property
    def source(self) -> Source | None:
        """Give the user's line."""
        return self._source

    @property
    def outputs(self) -> Sequence[Any]:
        """Give what it made."""
        return self.made

    @property
    def params(self) -> Mapping[str, Any]:
        """Give its plain arguments."""
        return self._params

    def over(self) -> None:
        """Keep no array of it: it was shown."""
        self.made = ()
        self.given = [(label, x) for label, x in self.given if not hasattr(x, "dtype")]


class RerunError(Exception):
    """Say why an operation could not be run once more."""


# What sees the operations of a run. What it returns takes the place of the results; None keeps
# them. TensorFlow takes no others: there, returning some is a TypeError. The arrays of an operation
# are the program's own: look at them, and keep none.
Observer = Callable[[Op], Sequence[Any] | None]


@dataclass(slots=True)
class Observed:
    """Hold what a run came to.

    Attributes:
        value: What the target returned.
        error: The exception that ended it; None if none did.
        notes: What was not seen, in sentences.
    """

    value: Any = None
    error: BaseException | None = None
    notes: list[str] = field(default_factory=list)


class Observe(Protocol):
    """Run a target once and show each operation: every adapter has one in its ``observe.py``.

    Weights, buffers, gradients, optimizer and random states, modes and the arguments are
    afterwards what they were, bit for bit, whatever happens.
    """

    def __call__(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], observer: Observer
    ) -> Observed:
        """Run it.

        Args:
            target: A model, a training step, or any function of the framework's.
            args: What it is called with.
            kwargs: By name.
            observer: Sees each operation, right after it ran.

        Raises:
            TypeError: If the target is not of this framework.
        """
        ...
