"""The program that runs every step: the function itself, and a few numbers more."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anynan._readings.readings import Site
from anynan.errors import reason
from anynan.jax.graphs.versions import is_nan_check
from anynan.jax.program.program import Program
from anynan.jax.program.trace import UnwatchableError
from anynan.jax.read import probes
from anynan.jax.read.readings import TOTALS, Emission, Plan

# Arrays up to this size are put side by side and read in one pass: a pass of its own for each
# costs more than the copy.
SMALL = 4096
# What a step donates is kept if it is no more than one of so many parts of the free memory.
SHARE = 16


@dataclass(frozen=True, slots=True)
class State:
    """Say what one reading of an update is of.

    Attributes:
        at: Its place among the readings.
        weight: Number of the result that is the new weight, None if it is optimizer state.
        rest: Numbers of the results that are optimizer state.
        source: Number of the argument it comes in as.
        buffer: True for what is carried along and not trained.
    """

    at: int
    weight: int | None
    rest: list[int]
    source: int
    buffer: bool


@dataclass
class Known:
    """Hold what was found out of a program's values.

    Attributes:
        exact: Values whose kind a total might not tell: they are read exactly.
        sure: Values whose NaN was seen to be one.
        masks: How many masks were known when ``exact`` was last asked for, -1 before.
    """

    exact: set[int] = field(default_factory=set)
    sure: set[int] = field(default_factory=set)
    masks: int = -1


class Watches:
    """Give what runs a program at every step: made again where more must be read exactly.

    Args:
        program: What is watched.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known = Known()
        self._latest: Watch | None = None
        # Whether what it donates is little enough to be kept; None before that was asked.
        self.little: bool | None = None

    def is_little(self, arrays: list[Any]) -> bool:
        """Tell whether what the program donates takes a small share of the memory that is free.

        Args:
            arrays: Its arguments.
        """
        if self.little is None:
            donated = [arrays[i] for i in self.program.donated]
            size = sum(x.nbytes for x in donated if isinstance(x, jax.Array))
            self.little = size * SHARE <= probes.free_memory(donated[0])
        return self.little

    def get(self, exact: set[int]) -> "Watch":
        """Give a watch that reads these values exactly.

        Args:
            exact: Their numbers.

        Raises:
            UnwatchableError: If it cannot be made.
        """
        latest = self._latest
        if latest is None or not latest.exact.issuperset(exact):
            try:
                latest = self._latest = Watch(self.program, exact, self.known)
            except Exception as error:
                raise UnwatchableError(reason(error)) from error
        return latest


class Watch:
    """Run a program with its readings as one more result.

    Args:
        program: What is watched.
        exact: Values whose kind a total might not tell.
        known: What was found out of its values.
    """

    def __init__(self, program: Program, exact: Iterable[int], known: Known) -> None:
        settings = program.settings
        self.program, self.known = program, known
        self.exact = frozenset(exact)
        self.points = program.every_step()
        self.groups = {} if settings.ends else self._groups()
        inside = {i for group in self.groups.values() for i in group[1:]}
        hidden = {program.graph.results[i] for i in inside}
        self.points = [point for point in self.points if point.value not in hidden]
        self.values = list(dict.fromkeys(point.value for point in self.points))
        self.plan = Plan(extra=settings.extra)
        chosen = program.choices()
        choices = {point.value for point in self.points if point in chosen}
        for number, index in enumerate(self.values):
            if index in self.groups:
                continue
            what = "span" if settings.ends else "sum"
            if index in choices:
                what = "nan"
            elif index in self.exact:
                what = "ends" if settings.ends else "code"
            program.want(self.plan, index, what, number=number)
        self.at = {index: i for i, index in enumerate(self.values)}
        self.order = [self.at[point.value] for point in self.points]
        self.width = 3 + len(settings.extra) if settings.ends else 1
        avals = [program.graph.values[index].aval for index in self.values]
        self.single = np.array([probes.single(aval) for aval in avals], bool)
        self.factors = self._factors(avals)
        # Where each reading is in what the program gives, and whether it is a word already.
        self.place = np.zeros(len(self.values), int)
        self.word = np.zeros(len(self.values), bool)
        self.ran = False
        self.sites: list[Site] | None = None
        self.calls = [point.call for point in self.points]
        self.numbers = [order for order, at in enumerate(self.order) if self.single[at]]
        self.table: tuple[int, Any] | None = None
        self.restored = program.restorable if settings.restores(program.donated) else {}
        self.states = self._states()
        self.run = jax.jit(self._run, donate_argnums=tuple(i + 2 for i in program.donated))

    def _factors(self, avals: list[Any]) -> Any:
        """Give what totals are scaled by: of each reading, then of those read side by side."""
        factors, device = probes.scales(2 * len(self.values)), self.program.device
        if device is None:  # over several devices each number would be sent on its own
            return factors
        read = [None if one else x.dtype for x, one in zip(avals, self.single, strict=True)]
        kinds = dict.fromkeys(
            (len(group) * avals[self.at[i]].size, avals[self.at[i]].dtype)
            for i, group in self.groups.items()
            if i not in self.exact and avals[self.at[i]].size <= SMALL
        )
        return probes.handed(factors, [*read, *(dtype for _, dtype in kinds)], device)

    def _groups(self) -> dict[int, list[int]]:
        """Put a new weight and its optimizer state together, to be read in one pass."""
        program, found = self.program, {}
        shapes = [(v.shape, v.dtype) for v in program.closed.out_avals]
        wanted = {point.value for point in self.points}
        for i, index, leaf in program.weights():
            if index in wanted and shapes[i][0]:
                moments = [j for j, _ in program.moments(leaf) if shapes[j] == shapes[i]]
                found[index] = [i, *moments]
        return found

    def _states(self) -> list[State]:
        """List the readings of what an update writes, and what is known of each."""
        program, found = self.program, []
        for i, source in program.back.items():
            index, role = program.graph.results[i], program.leaves[source].role
            weight = i if role != "state" else None
            rest = [j for j in self.groups.get(index, [i]) if j != weight]
            if index in self.at:
                found.append(State(self.at[index], weight, rest, source, role == "buffer"))
        return found

    def meant(
        self, states: list[State], outs: Any, arrays: Any, code: Callable[[Any], Any] = probes.code
    ) -> list[Any]:
        """Tell which of these readings may be meant as they are.

        An Inf in optimizer state does no harm by itself, and what comes in Inf and goes out so
        was not written by this step. Nor was a NaN in what is not trained.

        Args:
            states: The readings.
            outs: What the program gave.
            arrays: What it was given.
            code: Gives the worst kind in an array.
        """
        found = []
        for state in states:
            fine: Any = True
            for i in state.rest:
                fine = fine & (code(outs[i]) < probes.NAN)
            if state.weight is not None:
                own = code(outs[state.weight])
                old = arrays[state.source]
                came = probes.FINE if old is None else code(jnp.asarray(old))
                kept = (own <= came) if state.buffer else (own < probes.NAN) & (came > probes.FINE)
                fine = fine & ((own == probes.FINE) | kept)
            found.append(fine)
        return found

    def members(self, index: int) -> list[int]:
        """Give the values that one reading is of."""
        results = self.program.graph.results
        return [results[i] for i in self.groups[index]] if index in self.groups else [index]

    def __call__(self, table: Any, arrays: list[Any]) -> tuple[list[Any], Any]:
        """Run the program.

        Args:
            table: Which words of which reading make a step bad.
            arrays: The arguments.

        Returns:
            What it returns, and the readings, on the device.

        Raises:
            UnwatchableError: If the program with its readings cannot be built.
        """
        try:
            out: tuple[list[Any], Any] = self.run(table, self.factors, *arrays)
        except UnwatchableError:
            raise
        except Exception as error:
            if not self.ran:
                self._prove(table, arrays)
            if is_nan_check(error):
                raise FloatingPointError(*error.args) from None
            raise
        self.ran = True
        return out

    def _prove(self, table: Any, arrays: list[Any]) -> None:
        """Tell a program that cannot be built, which is our doing, from one that fails."""
        try:
            jax.eval_shape(self._run, table, self.factors, *arrays)
        except Exception as error:
            raise UnwatchableError(reason(error)) from error

    def _run(self, table: Any, factors: Any, *arrays: Any) -> tuple[list[Any], Any]:
        self.plan.factors = factors
        try:
            outs, found = self.program.evaluate(self.plan, arrays)
        finally:
            self.plan.factors = None  # traced numbers, which JAX may look for after the trace
        rows = {item.probe.key: self._row(item) for item in found}
        beside: dict[Any, dict[int, list[Any]]] = {}
        for index, group in self.groups.items():
            members = [outs[i] for i in group]
            if index in self.exact:
                rows[index] = jnp.max(jnp.stack([probes.code(x) for x in members]))[None]
                self.word[self.at[index]] = True
            elif self.program.alone and members[0].size <= SMALL:
                flat = [jnp.ravel(x) for x in members]
                kind = flat[0].size * len(flat), flat[0].dtype
                beside.setdefault(kind, {})[index] = flat
            else:
                rows[index] = probes.total(members, factors, self.at[index])[None]
        if not self.values:
            return outs, jnp.zeros((0, self.width), probes.wide())
        order = [*rows, *(index for many in beside.values() for index in many)]
        self.place[[self.at[index] for index in order]] = np.arange(len(order))
        columns = [jnp.stack([row.astype(probes.wide()) for row in rows.values()])] if rows else []
        for number, ((size, _), many) in enumerate(beside.items(), len(self.values)):
            joined = jnp.concatenate([x for flat in many.values() for x in flat])
            columns.append(probes.totals(joined.reshape(len(many), size), factors, number)[:, None])
        words = jnp.concatenate(columns)
        if self.restored:
            meant = self._restore(outs, arrays, words, table)
            words = jnp.concatenate([words, meant])
        return outs, words

    def _row(self, item: Emission) -> Any:
        """Give a reading as one row, out of all shards."""
        data = item.data if item.wide else item.data[..., None]
        self.word[self.at[item.probe.key]] = bool(item.its) or item.probe.what not in TOTALS
        if not item.shards:
            return data
        self.word[self.at[item.probe.key]] = True
        found = [jnp.max(item.word)]
        if item.wide:
            found += [jnp.min(data[:, 1]), jnp.max(data[:, 2]), *jnp.max(data[:, 3:], 0)]
        return jnp.stack([x.astype(probes.wide()) for x in found])

    def _restore(self, outs: list[Any], arrays: tuple[Any, ...], words: Any, table: Any) -> Any:
        """Give the old state back where a reading is bad; tell which ones may be meant."""
        first = words[self.place, 0]
        kinds = jnp.where(self.word, first, probes.words(first)).astype(jnp.int32)
        bad = jnp.take_along_axis(table, kinds[:, None], axis=1)[:, 0]
        meant = jnp.zeros(len(self.values), bool)
        if self.states:
            at = np.array([state.at for state in self.states])
            meant = meant.at[at].set(
                lax.cond(
                    jnp.any(bad[at]),
                    lambda outs, arrays: jnp.stack(
                        [jnp.asarray(x) for x in self.meant(self.states, outs, arrays)]
                    ),
                    lambda *_: jnp.zeros(len(at), bool),
                    outs, list(arrays),
                )
            )  # fmt: skip
        bad = jnp.any(bad & ~meant)
        new = [outs[i] for i in self.restored]
        old = [arrays[source] for source in self.restored.values()]
        kept = lax.cond(bad, lambda a, _: a, lambda _, b: b, old, new)
        for i, x in zip(self.restored, kept, strict=True):
            outs[i] = x
        flags = meant.astype(words.dtype)[:, None]
        return jnp.broadcast_to(flags, (len(self.values), words.shape[1]))

    def glance(self, read: Any) -> tuple[list[Site], list[int], list[float], list[float]] | None:
        """Give a step's readings as ``extend`` takes them, if all of them are fine.

        Returns:
            None where one may not be, or where more than totals is read.
        """
        if self.sites is None or self.width > 1 or self.word.any():
            return None
        column = read[self.place[self.order], 0]
        if not np.isfinite(column).all():
            return None
        low, high = ([end] * len(column) for end in probes.UNREAD)
        for order in self.numbers:
            low[order] = high[order] = x = float(column[order])
            if abs(x) > self.sites[order].limit:
                return None
        return self.sites, self.calls, low, high

    def rows(self, read: Any) -> Any:
        """Turn what was read into word, smallest, largest and statistics of each value."""
        read = read[self.place]
        found = np.empty((len(read), max(self.width, 3)))
        found[:, 0] = np.where(self.word, read[:, 0], probes.words(read[:, 0], np))
        if self.width > 1:
            found[:, 1:] = read[:, 1:]
            return found
        found[:, 1:] = probes.UNREAD
        known = self.single & ~self.word & (found[:, 0] == probes.FINE)
        found[known, 1:] = read[known]
        return found
