"""Variables that hold the rows of a compiled step until they are read."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from anynan._readings.readings import ProbePoint
from anynan.tensorflow.read import readings
from anynan.tensorflow.read.frames import Frame
from anynan.tensorflow.read.places import Places
from anynan.tensorflow.read.probes import SCOPE
from anynan.tensorflow.read.readings import BLANK, SCALE

_BLANK = np.array(BLANK)
# No variable can be made while replicas are traced, so what they need is made before.
ROOM = 16


@dataclass(slots=True)
class Block:
    """Hold the rows that one write fills.

    Attributes:
        start: The first row on the buffer.
        points: What each row reads, in execution order.
        order: All of them, and what only a replay looks at.
        backward: True for what a gradient call wrote.
        updates: True if its graph updates weights; None before that was asked.
        places: What the core knows the points by, once they were read.
        confirmed: Spots whose NaN was seen to be one.
    """

    start: int
    points: list[ProbePoint]
    order: list[ProbePoint]
    backward: bool = False
    updates: bool | None = None
    places: Places | None = None
    confirmed: set[int] = field(default_factory=set)


@dataclass
class Part:
    """Hold some of a buffer's rows.

    Attributes:
        rows: The variable that is written and read.
        blank: Rows that nobody wrote.
        blocks: What writes them.
    """

    rows: Any
    blank: Any
    blocks: list[Block] = field(default_factory=list)


class DeviceBuffer:
    """Hand out rows, write them inside of graphs, read them outside.

    Attributes:
        parts: What holds the rows.
        scaling: The variable that scales sums, None before it is wanted.
    """

    def __init__(self, count: int, *, grows: bool) -> None:
        self._size = max(64, count)
        self._grows = grows
        self.parts: list[Part] = []
        self._used = 0
        self.scaling: Any = None
        if not grows:
            self._add()

    def scale(self) -> Any:
        """Give what scales the sums that XLA makes, as a tensor."""
        if not self.parts:
            self._add()
        return tf.identity(self.scaling)

    def _add(self) -> None:
        # A thread of its own traces nothing. Else a variable would be the traced function's, which
        # may make some in its first trace alone.
        with ThreadPoolExecutor(1) as thread:
            self.parts.append(thread.submit(self._made).result())
        self._used = 0

    def _made(self) -> Part:
        blank = tf.constant(np.tile(BLANK, (self._size, 1)))
        if self.scaling is None:
            self.scaling = tf.Variable(SCALE, trainable=False, name=SCOPE)
        return Part(tf.Variable(blank, trainable=False, name=SCOPE), blank)

    def open(
        self, points: list[ProbePoint], order: list[ProbePoint], *, backward: bool
    ) -> Block | None:
        """Reserve a row for each point; None if there is no room."""
        if not self.parts or self._used + len(points) > self._size:
            if not self._grows:
                return None
            self._size = max(self._size, len(points))
            self._add()
        block = Block(self._used, points, order, backward)
        self.parts[-1].blocks.append(block)
        self._used += len(points)
        return block

    def write(self, block: Block, made: Any) -> None:
        """Write a block's rows: one operation in the graph."""
        part = next(part for part in self.parts if any(b is block for b in part.blocks))
        part.rows[_where(block)].assign(made)

    def read(self) -> list[tuple[Block, Any]]:
        """Bring every block that was written since the last read to the host."""
        found = []
        for part in self.parts:
            # The plain operations: this happens after every step.
            handle = part.rows.handle
            values = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy()
            held = [(block, values[_where(block)]) for block in part.blocks]
            held = [(block, rows) for block, rows in held if (rows != _BLANK).any()]
            if held:
                tf.raw_ops.AssignVariableOp(resource=handle, value=part.blank)
                found += held
        return found


def _where(block: Block) -> slice:
    return slice(block.start, block.start + len(block.points))


class DeviceBuffers:
    """Hold a buffer for each replica.

    Args:
        count: Rows that one trace of everything takes.
        replicas: How many there are.
        sizes: True to read under XLA, too, how large the values are.
    """

    def __init__(self, count: int, replicas: int, *, sizes: bool) -> None:
        self._sizes, self._rows = sizes, ROOM * count
        self._lock = threading.RLock()
        self.alone = replicas == 1
        if self.alone:
            self.held = [DeviceBuffer(count, grows=True)]
        else:
            self.held = [DeviceBuffer(self._rows, grows=False) for _ in range(replicas)]

    def look(self, tensors: list[Any], *, xla: bool) -> Any:
        """Read tensors in a graph; under XLA how large they are only where that is asked for."""
        if xla and not self._sizes:
            return readings.scaled(tensors, self.held[0].scale())
        return readings.exact(tensors, xla=xla)

    def write(self, frame: Frame, *, backward: bool) -> Block | None:
        """Write what a frame collected into its graph; None if there is no room."""
        with self._lock:
            number = replica()
            while number >= len(self.held):  # its weights did not tell that there are several
                self.held.append(DeviceBuffer(self._rows, grows=False))
            buffer = self.held[number]
            block = buffer.open(frame.points, frame.order, backward=backward)
        if block is not None:
            with tf.name_scope(SCOPE):
                frame.rows = self.look(frame.tensors, xla=frame.xla)
                buffer.write(block, frame.rows)
        return block

    def variables(self) -> list[Any]:
        """List what graphs that are watched refer to."""
        found = [part.rows for buffer in self.held for part in buffer.parts]
        return found + [buffer.scaling for buffer in self.held if buffer.scaling is not None]

    def read(self) -> list[tuple[Block, Any]]:
        """Bring what was written to the host, and join what replicas read of the same tensors."""
        first, *others = [buffer.read() for buffer in self.held]
        for other in others:
            if len(other) != len(first):
                return [*first, *(item for rest in others for item in rest)]
            first = [
                (block, _join(one, two))
                for (block, one), (_, two) in zip(first, other, strict=True)
            ]
        return first


def replica() -> int:
    """Give the number of the replica that is traced."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    number = context.replica_id_in_sync_group
    return int(tf.get_static_value(number) if isinstance(number, tf.Tensor) else number)


def _join(one: Any, two: Any) -> Any:
    low = np.minimum(one[:, 0], two[:, 0])
    high = np.maximum(one[:, 1], two[:, 1])
    return np.stack([low, high, np.maximum(one[:, 2], two[:, 2])], axis=1)  # which keeps a NaN
