"""What happens to a step that ran: its readings go to the host, and are judged."""

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from typing import Any

import jax

from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import ProbePoint, Reading
from anynan._steps import producers
from anynan._steps.adapter import BaseAdapter
from anynan._steps.inputs import ANYTHING
from anynan._steps.tracked import Tracked
from anynan.events import CARRIED, STATE
from anynan.jax.messages import CRASH_UNREAD, PART_UNREAD
from anynan.jax.program import signature
from anynan.jax.program.signature import Leaf
from anynan.jax.program.trace import ShutError
from anynan.jax.program.watch import State, Watch
from anynan.jax.read import probes
from anynan.jax.read.donated import alive, strong
from anynan.jax.read.places import fill, sites_of
from anynan.jax.replay.ending import up_to
from anynan.jax.replay.flags import flags
from anynan.jax.replay.placed import Fate, fates, is_nan, is_placed, place
from anynan.jax.replay.replay import everything, replay
from anynan.jax.replay.steps import Step
from anynan.jax.replay.trial import attempt
from anynan.options import Options

# In so many steps what came in as NaN is looked into: each runs three times more.
USES = 8


class StepReader(BaseAdapter):
    """Read steps and have them judged; answer what the core asks of the one that is judged."""

    def __init__(self, tracker: Tracked, options: Options | None) -> None:
        super().__init__(tracker, options)
        self._local = threading.local()
        # Is given what a bad step was given, and the bad weights; tells of what made them outside.
        self.outside: Callable[[list[Any], list[Any]], None] | None = None
        # Tells whether NaN in an array may be meant, if nothing reads it; in how many steps
        # something did. Notes a call that placed some.
        self.may_be_meant: Callable[[Any], bool] = is_placed
        self._used = 0
        self.placed: Callable[..., None] | None = None
        # Whether NaN that a function's own code places is passed over: what is computed of it is
        # seen where the whole program is watched, and only there.
        self.excuses = False
        # What made the weights bad that the last steps were given.
        self._maker: producers.Producer | None = None
        # The weights that the last step spoilt, by argument, and which of them are bad.
        self._spoilt: dict[int, weakref.ref[Any]] = {}
        self._listed: list[BadParameter] | None = None

    @property
    def step(self) -> Step | None:
        """Give the step that this thread has judged at this moment."""
        return getattr(self._local, "step", None)

    def has_risen(self, step: Step) -> bool:
        """Tell whether a step that begins is to keep what it donates.

        The core looks at the weights for that, and only the step has them.
        """
        if self.options.level == "operation":
            return False
        self._local.step = step
        try:
            return self.tracker.judge.level == "operation"
        finally:
            self._local.step = None

    def settle(self, step: Step) -> None:
        """Bring a step's readings to the host: one read; have them judged."""
        rows = step.rows
        try:
            words = probes.on_host(step.words)
        except Exception as error:
            self.broken(step, error)
            raise
        fine = self.options.level != "operation" and self._is_fine(step, words)
        if not fine:
            self._fill(step, words)
        self._local.step = step
        try:
            if self.options.level == "operation" and not step.handed_on:
                self.tracker.judge.operations(rows, lambda: self._seen(step, everything))
            if fine or not step.read[:, 0].any():
                self._maker = None
            elif not step.handed_on:
                self._look_back(step)
            self.tracker.judge.settle(rows)
        finally:
            self._local.step = None
            self._spoilt = {} if fine or rows.failed is None else self._spoils(step)
            if rows.failed is not None or self._maker is not None:  # it or what came in was told
                self.remember(step.outs, rows.number)
        if rows.failed is None:
            self.tracker.judge.known_clean(rows.number + 1)
        else:
            self.tracker.judge.applied_bad_update(rows)

    def _is_fine(self, step: Step, words: Any) -> bool:
        """Write a step of which a glance shows that nothing is bad, as in most."""
        rows, readings = step.rows, None if self._spoilt else step.watch.glance(words)
        if readings is None:
            return False
        rows.extend(*readings)
        rows.mark_judged()
        if step.moved is not None:
            step.moved.write(rows)
        self._listed = None
        return True

    def _spoils(self, step: Step) -> "dict[int, weakref.ref[Any]]":
        """Give what came out of a step bad and goes into the next, by the argument it is."""
        found: dict[int, weakref.ref[Any]] = {}
        for state in step.watch.states if step.outs else ():
            if state.buffer or not step.read[state.at, 0] or state.at in step.meant:
                continue
            # What is meant so is not looked for in a step that is only counted.
            known = not step.handed_on or state.source in self._spoilt
            if not known and step.read[state.at, 0] != probes.NAN:
                continue
            out = step.outs[state.rest[0] if state.weight is None else state.weight]
            found[state.source] = out if isinstance(out, weakref.ref) else weakref.ref(out)
        return found

    def _handed_on(self, step: Step) -> bool:
        """Tell whether a step began with weights that the one before it is known to have spoilt."""
        given = step.arrays
        mine = [(ref, given[i]) for i, ref in self._spoilt.items() if i < len(given)]
        return any(x is ref or x is ref() for ref, x in mine)

    def _fill(self, step: Step, words: Any) -> None:
        """Write what was read of a step into the core's rows."""
        watch, rows = step.watch, step.rows
        step.read = watch.rows(words)
        graph = step.program.graph
        if watch.sites is None:
            avals = [graph.values[point.value].aval for point in watch.points]
            watch.sites = sites_of(watch.points, avals, self.tracker.judge.monitor)
        if step.program.expected:
            for order, point in enumerate(watch.points):
                allowed = step.program.excused(point.value)
                if allowed:
                    rows.expect([order], allowed)
        step.handed_on = self._handed_on(step)
        if not step.handed_on:
            self._listed = None
            if self.options.replay and (step.read[:, 0] == probes.NAN).any():
                self._pass_placed(step)
                self._sure(step)
            step.meant |= self._meant(step)
        read = step.read[watch.order]
        fill(rows, watch.sites, watch.points, read)
        if read[:, 0].any() and not step.handed_on:
            self._live(step, watch)
            self._suspect(step, watch, read)
        self._guard(step, read)
        if step.moved is not None and not (watch.restored and read[:, 0].any()):
            step.moved.write(rows)  # else the old state may have been given back

    def _fates(self, step: Step, outs: list[Any]) -> dict[int, Fate]:
        """Tell where NaN in results is from, and whether what was placed did harm."""
        program, found = step.program, dict[int, Fate]()
        meant = self.may_be_meant if self._used < USES else is_placed
        given = tuple(is_nan(x) and meant(strong(x)) for x in step.arrays)
        runs = program.replays.setdefault("placed", {})
        known: Any = {"back": program.back, "literals": self.excuses, "given": given}
        with suppress(Exception):  # what cannot be run so is judged as it is
            found = fates(program.closed, step.arrays, outs, runs, **known)
        if "made" in found.values():  # what was made of placed NaN beside it is no news
            found = {i: "placed" if fate == "used" else fate for i, fate in found.items()}
        step.harmed = "used" in found.values()
        self._used += step.harmed
        for x in compress(step.arrays, given if found and not step.harmed else ()):
            place(strong(x))
        return found

    def _pass_placed(self, step: Step) -> None:
        """Take for fine what is NaN as the code wrote it, and is handed on as it is."""
        graph, watch = step.program.graph, step.watch
        # In the place of a state that is bad the old one may have been put.
        outs = [None if i in watch.restored else alive(x) for i, x in enumerate(step.outs)]
        found = self._fates(step, outs)
        losses = {point.value for point in watch.points if point.phase == "loss"}
        new = {i for i, x in found.items() if x == "placed" and graph.results[i] not in losses}
        for i in new:
            place(outs[i])
        fine = {graph.results[i] for i in new}
        spoilt = {graph.results[i] for i, x in enumerate(outs) if is_nan(x)} - fine
        if not step.harmed:
            pairs = zip(graph.arguments, step.arrays, strict=True)
            fine.update(index for index, x in pairs if is_placed(x))
        for index, at in watch.at.items():
            members = watch.members(index)
            if not fine.isdisjoint(members) and spoilt.isdisjoint(members):
                step.read[at, :3] = probes.FINE, *probes.UNREAD
                step.meant.add(at)
        if new and self.placed is not None and step.traced is not None:
            mine = [x if i in new else 0 for i, x in enumerate(outs)]
            fn, form = step.traced
            self.placed(fn, *form.flat.arguments(step.arrays), mine, watched=True)

    def remember(self, outs: Iterable[Any], number: int) -> None:
        """Remember what a reported step gave: what another is given of it, is told already."""
        producers.note(self.tracker, number, producers.among(outs), own=True)

    def _look_back(self, step: Step) -> None:
        """Find whether a reported step of another function made what this one was given."""
        program, arrays = step.program, list(map(strong, step.arrays))
        closed = [value.constant for value in program.graph.values if value.known]
        given = enumerate(zip(arrays, program.leaves, strict=True))
        pairs = [
            (x, leaf) for i, (x, leaf) in given
            if (step.harmed or not is_placed(x))
            and not (_is_bad(x) and not program.computes(i, nan=is_nan(x)))
        ]  # fmt: skip
        arrays = [x for x, _ in pairs]
        kept = [x for x, leaf in pairs if leaf.role != "input" and _is_bad(x)]
        if self.outside is not None:
            self.outside([*arrays, *closed], kept)
        # What was made of that is not known by itself; a batch has its own story.
        maker = self.maker([*arrays, *closed]) or self.maker(kept, step.since)
        self._maker = maker = maker or (self._maker if kept else None)
        if maker is not None:
            step.rows.came_from(ANYTHING, maker)
            return
        for x, leaf in pairs:
            if leaf.role == "input" and (maker := self.maker([x], step.since)) is not None:
                step.rows.came_from(leaf.name, maker)

    def maker(self, arrays: list[Any], since: int | None = None) -> "producers.Producer | None":
        """Give what is known of the origin of bad values among arrays, if that was told.

        Args:
            arrays: What a function was given.
            since: What was remembered before; what came after it may be what the arrays are made
                of. None: only the very arrays count.
        """
        before = math.inf if since is None else since
        for x in arrays:
            if isinstance(x, jax.Array) and _is_bad(x):
                found = producers.producer(self.tracker, x, before)
                if found is not None and not found.itself:
                    return found
        return None

    def broken(self, step: Step, error: BaseException, table: Any = None) -> None:
        """Judge a step that an exception ended.

        Args:
            step: What is known of it; of its readings there are none.
            error: The exception.
            table: Which words of which reading make a step bad, where it can be run once more.

        Raises:
            AnomalyError: Of what was found, as the action says.
        """
        judge = self.tracker.judge
        self._local.step = step
        step.outs = []  # JAX hands the exception on to whoever asks for one
        try:
            with judge.carried_by(error, step.rows):
                try:
                    if isinstance(error, FloatingPointError) and table is not None:
                        self._unchecked(step, table)
                    else:
                        judge.raised(step.rows, error, lambda: self._up_to(step, error))
                finally:
                    judge.settle(step.rows)
        finally:
            self._local.step = None

    def _up_to(self, step: Step, error: BaseException) -> Replay | None:
        """Run a step again up to an exception; on it is noted where that cannot be."""
        try:
            return self._seen(step, lambda step: up_to(step, error))
        except ReplayError as why:
            names = [
                leaf.name
                for leaf, array in zip(step.program.leaves, step.arrays, strict=True)
                if _is_bad(array)
            ]
            more = f"; of what the step was given, bad values are in {', '.join(names)}"
            error.add_note(CRASH_UNREAD(why=why, more=more if names else ""))
            return None

    def _unchecked(self, step: Step, table: Any) -> None:
        """Read a step that ``jax_debug_nans`` or ``jax_debug_infs`` ended."""
        with jax.debug_nans(False), jax.debug_infs(False):
            try:
                step.outs, step.words = step.watch(table, step.arrays)
                self._fill(step, probes.on_host(step.words))
            except Exception:  # noqa: BLE001  the program's own exception is the news
                return
            self.tracker.judge.review(step.rows)

    def _meant(self, step: Step) -> set[int]:
        """Give the readings of an update that are Inf and may be meant so."""
        watch = step.watch
        bad = [state for state in watch.states if step.read[state.at, 0]]
        if not bad:
            return set()
        if watch.restored:
            flags = probes.on_host(step.words)[len(watch.values) :, 0]
            return {state.at for state in bad if flags[state.at]}
        outs, arrays = list(map(alive, step.outs)), list(map(alive, step.arrays))
        bad = [s for s in bad if all(outs[i] is not None for i in (*s.rest, s.weight or 0))]
        if not bad:
            return set()
        flags = watch.meant(bad, outs, arrays, probes.worst)
        return {state.at for state, flag in zip(bad, flags, strict=True) if flag}

    def _suspect(self, step: Step, watch: Watch, read: Any) -> None:
        """Note which Infs may be meant, and name the part of an update that is bad."""
        rows, graph = step.rows, step.program.graph
        states = {state.at: state for state in watch.states}
        for order, point in enumerate(watch.points):
            at = watch.at[point.value]
            if not read[order, 0]:
                continue
            state = states.get(at)
            if state is None or point.phase != "optimizer":
                continue
            if at in step.meant:
                rows.mark_intended(order)
            part = self._part(step, state)
            named = None
            if part is not None:
                leaf = step.program.leaves[step.program.results[part].source or 0]
                named = ProbePoint(point.value, point.layer, "optimizer", STATE, 0, leaf.name)
                rows.keep(order, functools.partial(alive, step.outs[part]))
            elif at in step.meant and state.weight is not None:
                named = replace(point, phase="parameter", tensor=CARRIED)
            if named is not None:
                aval = graph.values[point.value].aval
                rows.rename(order, sites_of([named], [aval], self.tracker.judge.monitor)[0])

    def _part(self, step: Step, state: State) -> int | None:
        """Find the optimizer state that is bad where the weight itself is not."""
        outs = [alive(step.outs[i]) for i in (state.weight, *state.rest) if i is not None]
        if state.weight is None or any(x is None for x in outs):
            return None
        words = list(map(probes.worst, outs))
        worst = max(words[1:], default=0)
        return None if words[0] or not worst else state.rest[words[1:].index(worst)]

    def _sure(self, step: Step) -> None:
        """Look once more at the first values that read as NaN: they may be Infs of both signs.

        A sum cannot tell them apart. What is one is read exactly from now on.
        """
        program, watch = step.program, step.watch
        known = watch.known
        for index in dict.fromkeys(point.value for point in watch.points):
            at = watch.at[index]
            if step.read[at, 0] != probes.NAN:
                continue
            if index in watch.exact or index in known.sure:
                return
            members = watch.members(index)
            held = [step.held(i) for i in members]
            try:  # a second run is compiled, which takes long
                if any(x is None for x in held):
                    found = flags(program, step.inputs(), dict.fromkeys(members, "code"))
                    word = max(found[i].word for i in members)
                else:
                    word = max(map(probes.worst, held))
            except Exception:  # noqa: BLE001  the reading stays as it is, and is judged
                return
            if word != probes.POSINF:  # or it did not happen again
                known.sure.add(index)
                return
            step.read[at, :3] = word, *probes.UNREAD
            known.exact.add(index)

    def _guard(self, step: Step, words: Any) -> None:
        """Have the norm of all gradients of weights judged, where the policy asks for it."""
        policy = self.options.policy
        if policy.spike is None and policy.vanishing is None:
            return
        norms = [
            float(row[-1])
            for point, row in zip(step.watch.points, words, strict=True)
            if point.phase == "backward" and point.parameter is not None
        ]
        if norms:
            self.tracker.judge.guard(step.rows, math.hypot(*norms))

    def _live(self, step: Step, watch: Watch) -> None:
        """Let the core look at what is still there of a bad step."""
        graph = step.program.graph
        held = dict(zip(graph.results, step.outs, strict=True))
        if not watch.restored:
            held.update(zip(graph.arguments, step.arrays, strict=True))
        for order, point in enumerate(watch.points):
            if point.value in held:
                step.rows.keep(order, functools.partial(alive, held[point.value]))

    def replay(self, reading: Reading) -> Replay:
        """Run the failing step again, operation by operation."""
        step = self.step
        if step is None or step.rows.number != reading.step:
            msg = (
                "the function ran inside the caller's own jit, grad or vmap, where there is no "
                "step to run again: track the outermost function, and the report names the "
                "operation"
            )
            raise ReplayError(msg)
        point = step.watch.points[reading.order]
        found = self._seen(
            step, lambda s: replay(s, s.order(point) if s.partial else reading.order, reading)
        )
        assert found is not None
        return found

    def _seen(self, step: Step, look: Callable[[Step], Replay | None]) -> Replay | None:
        """Run a step again; once more without the equations that cannot be rebuilt."""
        try:
            return look(step)
        except ShutError as error:
            self._local.step = again = step.without(error.paths)
            seen = look(again)
            if seen is not None:
                seen.notes.append(PART_UNREAD(error=error))
            return seen

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Run the failing step again, with operations repaired."""
        step = self.step
        if step is None or step.rows.number != reading.step:
            return None
        return attempt(step, repairs, self.tracker.judge.say)

    def is_bad(self, item: BadParameter) -> bool:
        """Look at one weight, and at all where it alone does not tell."""
        step = self.step
        known = step is None or (step.handed_on and self._listed is not None)
        pairs = () if step is None or known else zip(step.program.leaves, step.arrays, strict=True)
        if any(leaf.name == item.name and _is_bad(array) for leaf, array in pairs):
            return True
        return any(item.name == other.name for other in self.bad_parameters())

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights that are bad, before the step or after it."""
        step = self.step
        if step is None:
            return []
        if step.handed_on and self._listed is not None:
            return self._listed
        program = step.program
        found = []
        pairs = zip(program.leaves, step.arrays, strict=True)
        kept = ("parameter", "buffer")

        def spoilt(leaf: Leaf, x: Any) -> bool:
            return leaf.role in kept and _is_bad(x) and (step.harmed or not is_placed(x))

        # What a solver begins with (its error is Inf) and nothing is computed of does no harm.
        for i, (leaf, array) in enumerate(pairs):
            if not (spoilt(leaf, array) and program.computes(i, nan=is_nan(array))):
                continue
            summary, buffer = probes.measure(alive(array)), leaf.role == "buffer"
            found.append(BadParameter(leaf.name, program.owner(leaf), summary, buffer))
        if step.handed_on:
            self._listed = found = found or [
                BadParameter(leaf.name, program.owner(leaf), Summary((), "", "", 1, nan=1))
                for i, leaf in enumerate(program.leaves)
                if i in self._spoilt  # and it is gone
            ]
        return found or step.spoilt


def _is_bad(x: Any) -> bool:
    x = alive(x)
    if x is None or not probes.checkable(signature.aval(x)):
        return False
    return probes.worst(x) > probes.FINE
