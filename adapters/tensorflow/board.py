"""Variables that hold the rows of a compiled step until they are read."""

from typing import Any

import numpy as np
import tensorflow as tf

from anynan.tensorflow import probes
from anynan.tensorflow.probes import BLANK
from anynan.tensorflow.traces import SCOPE, Block, Spot

# No variable can be made while replicas are traced, so what they need is made before.
ROOM = 16


class Board:
    """Hand out rows, write them inside of graphs, read them outside."""

    def __init__(self, rows: int, *, grows: bool) -> None:
        self._size = max(64, rows)
        self._grows = grows
        self._parts: list[tuple[Any, list[Block]]] = []
        self._used = 0
        if not grows:
            self._add()

    def _add(self) -> None:
        made = tf.Variable(
            np.tile(BLANK, (self._size, 1)), trainable=False, dtype=tf.float64, name=SCOPE
        )
        self._parts.append((made, []))
        self._used = 0

    def open(self, spots: list[Spot], *, backward: bool) -> Block | None:
        """Reserve rows for these readings; None if there is no room."""
        if not self._parts or self._used + len(spots) > self._size:
            if not self._grows:
                return None
            self._size = max(self._size, len(spots))
            # A variable cannot be made inside of a graph: it belongs to the whole program.
            with tf.init_scope():
                self._add()
        block = Block(self._used, spots, backward)
        self._parts[-1][1].append(block)
        self._used += len(spots)
        return block

    def write(self, block: Block, rows: list[Any]) -> None:
        """Write a block's rows: one operation in the graph."""
        variable = next(v for v, blocks in self._parts if any(b is block for b in blocks))
        with tf.name_scope(SCOPE):
            made = probes.rows(rows)
            variable[block.start : block.start + len(rows)].assign(made)

    def read(self) -> list[tuple[Block, Any]]:
        """Bring every block that was written since the last read to the host."""
        found = []
        for variable, blocks in self._parts:
            values = variable.numpy()
            written = (values != BLANK).any(axis=1)
            if not written.any():
                continue
            variable.assign(np.tile(BLANK, (len(values), 1)))
            for block in blocks:
                rows = slice(block.start, block.start + len(block.spots))
                if written[rows].any():
                    found.append((block, values[rows]))
        return found


def boards(rows: int, replicas: int) -> list[Board]:
    """Make a board for each replica."""
    if replicas == 1:
        return [Board(rows, grows=True)]
    return [Board(ROOM * rows, grows=False) for _ in range(replicas)]


def replica() -> int:
    """Give the number of the replica that is traced."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    number = context.replica_id_in_sync_group
    return int(tf.get_static_value(number) if isinstance(number, tf.Tensor) else number)


def read_all(found: list[Board]) -> list[tuple[Block, Any]]:
    """Read every replica's board, and join what they read of the same tensors."""
    first, *others = [board.read() for board in found]
    for other in others:
        if len(other) != len(first):
            return [*first, *(item for rest in others for item in rest)]
        first = [
            (block, _join(one, two)) for (block, one), (_, two) in zip(first, other, strict=True)
        ]
    return first


def _join(one: Any, two: Any) -> Any:
    low = np.minimum(one[:, 0], two[:, 0])
    high = np.maximum(one[:, 1], two[:, 1])
    return np.stack([low, high, np.maximum(one[:, 2], two[:, 2])], axis=1)  # which keeps a NaN
