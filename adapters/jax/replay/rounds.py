"""Which operation wrote a bad value, and in which round of the loops around it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from anynan._base.walks import walk
from anynan._diagnosis.lineage import PLACING
from anynan.jax.graphs.bodies import backwards, rounds_of
from anynan.jax.graphs.graph import Graph, Node, Value
from anynan.jax.graphs.operations import Op, Operations
from anynan.jax.read import probes
from anynan.jax.read.readings import Path
from anynan.jax.replay.flags import Flag

# They read a part: what is bad may be outside of it.
_PARTS = frozenset({"slice", "dynamic_slice", "gather", "split"})
LoopIndex = tuple[int, ...]
# An operation in one round of each loop around it. Rounds have the number of their item: the
# first one of a reverse scan is the last.
OpInstance = tuple[Op, LoopIndex]


class LoopIterations:
    """Follow bad values back through loops, round by round.

    Args:
        graph: The program.
        operations: Its operations.
        found: What was read.
        looked: The one round that was looked at of each body, where there are loops in loops.
    """

    def __init__(
        self, graph: Graph, operations: Operations, found: dict[int, Flag],
        looked: Mapping[Path, LoopIndex] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.operations, self.found = graph, operations, found
        self.looked = looked or {}
        self._made: dict[int, list[Op]] = {}

    # What was read.

    def word(self, index: int, its: LoopIndex) -> int | None:
        """Give the worst kind of a value in a round, None if it was not read."""
        flag = self.found.get(index)
        if flag is None or flag.rounds is None:
            return None if flag is None else flag.word
        at = its[: flag.rounds.ndim]
        if any(i >= size for i, size in zip(at, flag.rounds.shape, strict=False)):
            return flag.word  # beyond the rounds that were kept
        return int(np.max(flag.rounds[at], initial=0))

    def first(self, index: int, least: int = probes.NEGINF) -> LoopIndex:
        """Give the first round in which a value was at least so bad."""
        flag = self.found[index]
        if flag.rounds is None or flag.word < least:
            return flag.its
        bad = np.argwhere(flag.rounds >= least)
        if not len(bad):
            return flag.its
        loops = self.loops(self.graph.values[index])
        return min((tuple(int(i) for i in row) for row in bad), key=lambda its: order(its, loops))

    def loops(self, value: Value) -> tuple[Any, ...]:
        """Give the loops around a value."""
        return self.graph.loops.get(value.path, ())

    def worst(self, op: Op, its: LoopIndex) -> int | None:
        """Choose the result of an operation that is worst in a round, None if all are finite."""
        mine = [(word, i) for i in op.outs if (word := self.word(i, self.at(i, its)))]
        return max(mine, key=lambda pair: pair[0])[1] if mine else None

    def at(self, index: int, its: LoopIndex) -> LoopIndex:
        """Give the rounds that a value has of its own."""
        return its[: self.graph.values[index].loops]

    def hidden(self, op: Op, word: Callable[[int], int | None]) -> tuple[str, ...] | None:
        """Name the forward operations where what came of a bad result is finite again.

        Args:
            op: The operation.
            word: Gives the worst kind of a value, None if it was not read.

        Returns:
            Their names, None where one of them was not read.
        """
        found: dict[str, None] = {}
        seen = set(op.outs)
        todo = [(i, False) for i in op.outs if word(i)]
        while todo:
            index, cut = todo.pop()
            for reader, other in self._forward_readers(index, op):
                outs = [i for i in (other or reader).outs if i is not None]
                if other is not None:
                    words = [kind for i in outs if (kind := word(i)) is not None]
                    if outs and not words:
                        return None
                    if not any(words):
                        found.setdefault("getitem" if cut else other.name)
                        continue
                part = other is None and (cut or reader.name in _PARTS)
                new = [i for i in outs if i not in seen and (other is None or word(i))]
                seen.update(new)
                todo += [(i, part) for i in new]
        return tuple(found)

    def _forward_readers(self, index: int, op: Op) -> Iterator[tuple[Node, Op | None]]:
        """Walk what takes a value in the forward pass, with its operation, but for one's own."""
        for reader in self.graph.readers(index):
            if reader is not None and not reader.backward:
                other = self.operations.of.get(reader.index)
                if other is not op:
                    yield reader, other

    # Who wrote it.

    def writers(self, index: int, its: LoopIndex) -> list[OpInstance]:
        """List who wrote a value that is seen in a round: operations with bad results."""
        found: dict[tuple[int, LoopIndex], OpInstance] = {}
        outer = self.graph.values[index].loops

        def more(item: tuple[int, LoopIndex, bool]) -> Iterable[tuple[int, LoopIndex, bool]]:
            value, later = self.graph.values[item[0]], item[2]
            rounds = self._looked_at(value, item[1])
            if value.writer is None:
                fed = self._fed(value, rounds)
                return self._left(value, rounds) if later else ((*each, False) for each in fed)
            node = self.graph.nodes[value.writer]
            op = self.operations.of.get(node.index)
            if op is None and not later:
                return [(i, self.at(i, rounds), False) for i in node.ins]
            if op is not None and not later and self.worst(op, rounds) is not None:
                found[op.index, rounds] = op, rounds
                return ()
            if not self.looked or value.loops <= outer:
                return ()
            # It turned bad in a later round than the one looked at, by what that one left.
            ins = map(self.graph.values.__getitem__, (op or node).ins)
            return [(x.index, self._inside(x, rounds), True) for x in ins if x.loops > outer]

        list(walk([(index, self._inside(self.graph.values[index], its), False)], more))
        return list(found.values())

    def _looked_at(self, value: Value, its: LoopIndex) -> LoopIndex:
        """Give the round of a value that was looked at, where it is only one."""
        for length in range(len(value.path), 0, -1) if self.looked else ():
            known = self.looked.get(value.path[:length])
            if known is not None and len(known) == value.loops:
                return known
        return its

    def _inside(self, value: Value, its: LoopIndex) -> LoopIndex:
        """Choose the rounds of a value that is looked at from outside of its loops."""
        its = its[: value.loops]
        for loop in self.loops(value)[len(its) :]:
            its = (*its, self._last(loop, [value.index], its))
        return its

    def _fed(self, value: Value, its: LoopIndex) -> Iterator[tuple[int, LoopIndex]]:
        """Walk the values that one with no writer of its own may be, each in its round."""
        outside = [self.graph.values[i].loops < value.loops for i in value.feeds]
        for i, out in zip(value.feeds, outside, strict=True):
            if self.graph.values[i].loops > value.loops:  # what a loop gives
                yield from self._out_of(value, i, its)
            elif out:  # what goes into one: a constant, an item, a first carry
                if len(outside) == 1 or its[-1] == _first(self.loops(value)[-1]):
                    yield i, its[:-1]
            elif any(outside):  # what the round before left; the one looked at is the first bad one
                before = None if self.looked else self._before(value, i, its)
                if before is not None:
                    yield i, before
            else:
                yield i, its

    def _left(self, value: Value, its: LoopIndex) -> Iterator[tuple[int, LoopIndex, bool]]:
        """Walk what the round that was looked at left to the next, through a value given to it."""
        feeds = [self.graph.values[i] for i in value.feeds]
        carry = len(feeds) > 1 and any(x.loops < value.loops for x in feeds)
        for x in feeds:
            if x.loops:
                yield x.index, self._inside(x, its), not (carry and x.loops == value.loops)

    def _out_of(self, value: Value, index: int, its: LoopIndex) -> Iterator[tuple[int, LoopIndex]]:
        """Walk the rounds of a loop whose results are seen after it."""
        loop = self.loops(self.graph.values[index])[-1]
        if len(value.feeds) == 2:  # a carry is what the last round left, if there was one
            length = rounds_of(loop)
            ran = self._bad_rounds([value.feeds[0]], its) if length is None else length
            if index == value.feeds[0 if ran else 1]:
                yield index, (*its, self._last(loop, [index], its))
            return
        bad = self._bad_rounds([index], its)
        chosen = (
            (max(bad) if backwards(loop) else min(bad)) if bad else self._last(loop, [index], its)
        )
        yield index, (*its, chosen)

    def _last(self, loop: Any, indices: list[int], its: LoopIndex) -> int:
        """Give the last round of a loop."""
        length = rounds_of(loop)
        if length is not None:
            return 0 if backwards(loop) else max(length - 1, 0)
        return max(self._bad_rounds(indices, its), default=0)

    def _before(self, value: Value, index: int, its: LoopIndex) -> LoopIndex | None:
        """Go back to the round in which a carry turned bad, None from the first round.

        What is bad in a row of rounds is taken to be handed from each to the next, up to one in
        which more was made.
        """
        loop = self.loops(value)[-1]
        step = 1 if backwards(loop) else -1
        at = its[-1] + step
        last = _first(loop)
        if its[-1] == last:
            return None
        bad = self._bad_rounds([index], its[:-1])
        while (
            at in bad and at != last and at + step in bad and not self._makes(loop, (*its[:-1], at))
        ):
            at += step
        return (*its[:-1], at)

    def _makes(self, loop: Any, its: LoopIndex) -> bool:
        """Tell whether an operation of a loop made something bad of finite operands in a round."""
        return any(
            self.worst(op, its) is not None
            and not any(self.word(i, self.at(i, its)) for i in op.ins)
            for op in self._makers(loop)
        )

    def _makers(self, loop: Any) -> list[Op]:
        """List a loop's operations with bad results, but for those that place what is bad."""
        if id(loop) not in self._made:
            self._made[id(loop)] = [
                op
                for op in self.operations.ops
                if op.name not in PLACING
                and any(i in self.found and self.found[i].word for i in op.outs)
                and self.loops(self.graph.values[op.outs[0]])[-1:] == (loop,)
            ]
        return self._made[id(loop)]

    def _bad_rounds(self, indices: list[int], its: LoopIndex) -> set[int]:
        """Give the rounds of a value's innermost loop in which one of its writers was bad."""
        found: set[int] = set()
        depth = len(its)
        for index in indices:
            for op in self.operations.writers(index):
                for out in op.outs:
                    flag = self.found.get(out)
                    if flag is None or not flag.word or len(flag.its) <= depth:
                        continue
                    if flag.rounds is None:  # of all rounds only the first of the worst is known
                        found.update(flag.its[depth : depth + 1] if flag.its[:depth] == its else ())
                        continue
                    if any(i >= n for i, n in zip(its, flag.rounds.shape, strict=False)):
                        continue
                    if flag.its[:depth] == its and flag.its[depth] >= flag.rounds.shape[depth]:
                        found.add(flag.its[depth])  # beyond the rounds that were kept
                    here = flag.rounds[its]
                    rest = tuple(range(1, here.ndim))
                    found.update(int(i) for i in np.flatnonzero(np.max(here, rest, initial=0)))
        return found


def order(its: LoopIndex, loops: tuple[Any, ...]) -> tuple[int, ...]:
    """Turn rounds into the order in which they ran."""
    return tuple(-it if backwards(loop) else it for it, loop in zip(its, loops, strict=False))


def _first(loop: Any) -> int:
    """Give the round that runs first."""
    return max((rounds_of(loop) or 1) - 1, 0) if backwards(loop) else 0
