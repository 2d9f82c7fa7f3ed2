"""Answer what Python code asks of tensors while it is traced: its first run had no graph."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from anynan._base.patches import Patches
from anynan._diagnosis.agreement import same_end
from anynan._reach import Exhausted
from anynan.errors import reason
from anynan.tensorflow.read.frames import here

EARLY = "the second run ended before the first did: {}"
# A part of the graph, with its inputs and what they hold, and one of its tensors -> its value.
Ask = Callable[[Any, list[tuple[Any, Any]], Any], Any]


class Answers:
    """Give the tensors of a graph that is traced their values, as an eager run would.

    Args:
        given: The arguments of the first run.
        ended: The exception that ended it.
        ask: Runs what there is of the graph.

    Attributes:
        taken: What the code took last before it ended so again: a tensor, or a node.
        notes: What is to be said of the run.
    """

    def __init__(self, given: Any, ended: BaseException | None, ask: Ask) -> None:
        self.taken: Any = None
        self.notes: list[str] = []
        self._given, self._ended, self._ask = given, ended, ask
        self._graph: Any = None
        self._inputs: list[tuple[Any, Any]] = []
        self._asked: tuple[Any, int] = None, -1

    def heard(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that is answered, and that ends early where the code raises."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._graph, self.taken, self.notes = here(), None, []
            pairs = zip(_flat((args, kwargs)), _flat(self._given), strict=True)
            self._inputs = [(p, x) for p, x in pairs if isinstance(p, tf.Tensor)]
            try:
                return fn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  what ran before it may show the fault
                self._stop(error)
                return None

        return functools.update_wrapper(run, fn, updated=())

    def _stop(self, error: Exception) -> None:
        """Note how the code ended: what there is up to then is run."""
        if self._ended is not None and same_end(self._ended, error):
            nodes = self._graph.get_operations()
            last, count = self._asked
            self.taken = last if count == len(nodes) else nodes[-1]
        elif isinstance(error, Exhausted):
            raise error
        else:
            self.notes = [EARLY.format(reason(error))]

    @contextmanager
    def given(self) -> Iterator[None]:
        """Answer what is asked meanwhile."""
        with tf.Graph().as_default():
            kind = type(tf.constant(0.0))
        with Patches() as patches:
            for name in ("numpy", "__array__"):
                patches.put(kind, name, lambda x, *args, **_: self._array(x, *args))
            for name, take in (("bool", bool), ("float", float), ("int", int), ("index", int)):
                patches.put(kind, f"__{name}__", lambda x, take=take: take(self._value(x)))
            patches.put(kind, "__iter__", lambda x: iter(tf.unstack(x)))
            patches.put(kind, "__len__", lambda x: x.shape[0])
            yield

    def _array(self, x: Any, dtype: Any = None) -> Any:
        value = self._value(x)
        return value if dtype is None else value.astype(dtype)

    def _value(self, x: Any) -> Any:
        if x.graph is not self._graph:
            msg = "a tensor of another graph has no value here"
            raise NotImplementedError(msg)
        self._asked = x, len(self._graph.get_operations())
        with tf.init_scope():
            return self._ask(self._graph, self._inputs, x)


def _flat(value: Any) -> list[Any]:
    return list(tf.nest.flatten(value, expand_composites=True))
