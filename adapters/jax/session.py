"""One tracked function: its programs, its steps, its reads."""

import functools
import inspect
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from anynan._arrays.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay
from anynan._readings.readings import Reading, Rows, Site
from anynan._steps.adapter import BaseAdapter
from anynan.errors import AnomalyError
from anynan.events import CARRIED, STATE
from anynan.jax import probes, signature, taps
from anynan.jax.layers import Spot
from anynan.jax.objects import Objects, objects_of
from anynan.jax.program import Program, Settings, UnwatchableError, tracing
from anynan.jax.steps import Step, alive, unread, weakly
from anynan.jax.taps import traced
from anynan.jax.watching import State, Watch
from anynan.options import Options


class Session(BaseAdapter):
    """Watch one function for one tracker."""

    backend = "jax"

    def __init__(
        self, fn: Callable[..., Any], options: Options, *, keep_inputs: bool, lag: int | None
    ) -> None:
        super().__init__(options)
        if lag is None:  # where nothing depends on the answer nobody has to wait for it
            lag = int(options.only_watches and options.read == "auto")
        self.lag = lag
        # Without a replay a step that is read late is not worth keeping alive.
        self.light = bool(lag) and not options.replay and options.level == "layer"
        self._programs: dict[Hashable, Program] = {}
        self._blind: set[Hashable] = set()
        self._kept: list[Any] = []
        self._lock = threading.RLock()
        self._local = threading.local()
        self._unread: list[Step] = []
        self._static: set[Hashable] | None = None
        self._layers: dict[str, None] = {}
        policy = options.policy
        sizes = options.sizes
        # A gradient norm is judged by what it was before.
        guarded = policy.spike is not None or policy.vanishing is not None
        self.settings = Settings(
            names=signature.argument_names(fn),
            backward=options.backward,
            gradients=options.backward and (sizes or guarded or not options.replay),
            ends=sizes or guarded,
            extra=options.extra if not guarded else (*options.extra, "norm"),
            parameters=options.parameters,
            donate=not keep_inputs,
            drops=options.action == "skip" or options.patience > 0,
            raises=options.action == "raise",
            plain=type(fn).__module__.startswith("equinox"),
        )

    # Life.

    def detach(self) -> None:
        """Forget the programs."""
        self._programs.clear()
        self._blind.clear()
        self._kept.clear()

    def watched(self) -> list[str]:
        """List the layers that were found in the traced programs."""
        return list(self._layers)

    def read(self) -> None:
        """Read and judge the steps not read yet."""
        self._read()

    def _read(self, but: int = 0) -> None:
        """Read and judge the steps not read yet, but for so many of the last."""
        try:
            # Two threads may read at once, as at the end of a program.
            while (step := self._next(but)) is not None:
                self._settle(step)
        finally:
            unread(self, bool(self._unread))

    def _next(self, but: int) -> Step | None:
        with self._lock:
            return self._unread.pop(0) if len(self._unread) > but else None

    # One step.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step, read it and judge it."""
        if tracing() is not None:  # inside another tracked function, which sees all of this
            return fn(*args, **kwargs)
        if self._static is None:
            self._static = signature.static_arguments(fn, args, kwargs)
        given = args, kwargs
        objects = objects_of(args, kwargs)
        made, inner = fn, None if inspect.isfunction(fn) else getattr(fn, "__wrapped__", None)
        if objects is not None:
            args, kwargs = objects.swapped(args, kwargs)
            made, inner = objects.pure(fn), None if inner is None else objects.pure(inner)
        flat = signature.flatten(args, kwargs, self._static, plain=self.settings.plain)
        key = _key(flat, objects)
        if key in self._blind:
            return fn(*given[0], **given[1])
        try:
            program = self._program(made, inner, flat, objects)
            if traced(flat.arrays) or traced(program.closed.consts):
                return taps.run(self, program, flat.arrays)
            watch = program.watch(self._exact(program))
            rows = self.tracker.judge.rows()
            outs, words = watch(self._table(watch), flat.arrays)
        except UnwatchableError as error:
            self._blind.add(key)
            self.tracker.judge.say(
                f"{self.tracker.name} runs unwatched: its program could not be taken apart "
                f"({error})"
            )
            return fn(*given[0], **given[1])
        self.tracker.judge.close_step()
        hold = weakly if self.light else list
        self._unread.append(Step(program, watch, hold(flat.arrays), hold(outs), words, rows))
        every = self.options.read
        if isinstance(every, int) and (rows.step + 1) % every:
            unread(self, True)
        else:
            try:
                self._read(self.lag)
            except AnomalyError as error:
                # The user's stack is what matters, not the way through the core.
                raise error.with_traceback(None) from None
        out = program.joined(outs)
        if objects is None:
            return out
        out, states = out
        objects.update(states)
        return out

    def _program(
        self,
        fn: Callable[..., Any],
        inner: Callable[..., Any] | None,
        flat: signature.Flat,
        objects: Objects | None,
    ) -> Program:
        key = _key(flat, objects)
        found = self._programs.get(key)
        if found is None:
            with self._lock:
                found = Program(fn, flat, self.settings, objects, inner)
                found.pick(self.options.layers, self.options.exclude)
                self._refuse(found)
                self._say(found)
                if not traced(found.closed.consts):  # theirs would outlive the trace they are of
                    self._programs[key] = found
                self._kept.append(flat.fixed)
                self._layers.update(dict.fromkeys(found.chosen or ()))
        return found

    def _say(self, program: Program) -> None:
        for name in program.graph.strange:
            self.tracker.judge.say(
                f"{name} is run as it is: its inside is not watched, only what comes out of it"
            )
        unnamed = program.roots and not program.layers.names()
        if unnamed:
            self.tracker.judge.say(
                f"no layer of {', '.join(sorted(program.roots))} was named: a jitted function "
                "inside was traced before it was tracked; track it before its first call"
            )

    def _refuse(self, program: Program) -> None:
        if self.options.action == "skip" and not program.restorable:
            msg = (
                "action='skip' gives a bad step's old state back, but this function returns no "
                "argument's new value: track a training step that takes and returns its weights "
                "and optimizer state, or choose another action"
            )
            raise ValueError(msg)

    def _table(self, watch: Watch) -> Any:
        """Say of each value which words make a step bad."""
        if not watch.restored:
            return np.zeros((1, 4), bool)
        known = len(self.tracker.judge.monitor.downgraded)
        if watch.table is None or watch.table[0] != known:
            table = np.zeros((len(watch.values), 4), bool)
            for spot in watch.spots:
                table[watch.at[spot.value]] |= self.bad_words(spot)
            watch.table = known, table
        return watch.table[1]

    def _exact(self, program: Program) -> set[int]:
        """List the values where a NaN and Infs of both signs are judged differently."""
        known = len(self.tracker.judge.monitor.downgraded)
        if program.exact is None or program.exact[0] != known:
            # What only an operation says is expected is known to the rows, not to the policy.
            spots = program.inputs() + program.spots(backward=self.settings.gradients)
            found = set() if program.exact is None else program.exact[1]
            for spot in spots:
                bad = self.bad_words(spot)
                if bad[probes.NAN] != bad[probes.POSINF] or program.excused(spot.value):
                    found.add(spot.value)
            program.exact = known, found
        return program.exact[1]

    def bad_words(self, spot: Spot) -> Any:
        """Say which words of a reading are bad."""
        found = np.zeros(4, bool)
        policy = self.options.policy
        for word in (probes.NEGINF, probes.POSINF, probes.NAN):
            kind = probes.KINDS[word]
            judged = policy.weigh(kind, spot.phase, spot.layer)
            excused = policy.allowed(kind, spot.phase, spot.layer)
            mask = (spot.layer, spot.phase, kind) in self.tracker.judge.monitor.downgraded
            mask = mask or spot.phase == "input"  # data may hold them, until harm comes of it
            found[word] = judged is not None and judged[1] == "bad" and not excused and not mask
        return found

    # Inside the caller's own program.

    def told(self, spots: list[Spot], avals: list[Any], words: Any) -> None:
        """Judge readings that the caller's program sent because one of them is bad."""
        with self._lock:
            rows = self.tracker.judge.rows()
            filled = np.empty((len(words), 3))
            filled[:, 0], filled[:, 1:] = words, probes.UNREAD
            self._write(rows, self._sites(spots, avals), spots, filled)
            self.tracker.judge.close_step()
            self.tracker.judge.settle(rows)

    def _settle(self, step: Step) -> None:
        """Bring a step's readings to the host: one read; have them judged."""
        watch, rows = step.watch, step.rows
        step.read = watch.rows(probes.on_host(step.words))
        graph = step.program.graph
        if watch.sites is None:
            avals = [graph.values[spot.value].aval for spot in watch.spots]
            watch.sites = self._sites(watch.spots, avals)
        if step.program.expected:
            for order, spot in enumerate(watch.spots):
                allowed = step.program.excused(spot.value)
                if allowed:
                    rows.expected[order] = allowed
        if self.options.replay and (step.read[:, 0] == probes.NAN).any():
            self._sure(step)
        step.meant = self._meant(step)
        read = step.read[watch.order]
        self._write(rows, watch.sites, watch.spots, read)
        if read[:, 0].any():
            self._live(step, watch)
            self._suspect(step, watch, read)
        self._guard(step, read)
        self._local.step = step
        try:
            if self.options.level == "operation":
                self._every_operation(step)
            self.tracker.judge.settle(rows)
        finally:
            self._local.step = None
        if rows.failed is None:
            self.tracker.judge.known_clean(rows.step + 1)
        else:
            self.tracker.judge.went_through(rows)

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
        flags = np.asarray(watch.meant(bad, outs, arrays))
        return {state.at for state, flag in zip(bad, flags, strict=True) if flag}

    def _suspect(self, step: Step, watch: Watch, read: Any) -> None:
        """Note which Infs may be meant, and name the part of an update that is bad."""
        rows, graph = step.rows, step.program.graph
        states = {state.at: state for state in watch.states}
        for order, spot in enumerate(watch.spots):
            at = watch.at[spot.value]
            if not read[order, 0]:
                continue
            state = states.get(at)
            if state is None or spot.phase != "optimizer":
                continue
            if at in step.meant:
                rows.suspect.add(order)
            part = self._part(step, state)
            named = None
            if part is not None:
                leaf = step.program.leaves[step.program.results[part].source or 0]
                named = Spot(spot.value, spot.layer, "optimizer", STATE, 0, leaf.name)
                rows.live[order] = functools.partial(alive, step.outs[part])
            elif at in step.meant and state.weight is not None:
                named = replace(spot, phase="parameter", tensor=CARRIED)
            if named is not None:
                aval = graph.values[spot.value].aval
                rows.sites[order] = self._sites([named], [aval])[0]

    def _part(self, step: Step, state: State) -> int | None:
        """Find the optimizer state that is bad where the weight itself is not."""
        outs = [alive(step.outs[i]) for i in (state.weight, *state.rest) if i is not None]
        if state.weight is None or any(x is None for x in outs):
            return None
        words = [int(probes.code(x)) for x in outs]
        worst = max(words[1:], default=0)
        return None if words[0] or not worst else state.rest[words[1:].index(worst)]

    def _sure(self, step: Step) -> None:
        """Look once more at the first values that read as NaN: they may be Infs of both signs.

        A sum cannot tell them apart. What is one is read exactly from now on.
        """
        from anynan.jax.replay import flags

        program, watch = step.program, step.watch
        for index in dict.fromkeys(spot.value for spot in watch.spots):
            at = watch.at[index]
            if step.read[at, 0] != probes.NAN:
                continue
            if index in watch.exact or index in program.sure:
                return
            members = watch.members(index)
            try:
                found = flags(program, step.inputs(), dict.fromkeys(members, "code"))
            except Exception:  # noqa: BLE001  the reading stays as it is, and is judged
                return
            word = max(found[i].word for i in members)
            if word != probes.POSINF:  # or it did not happen again
                program.sure.add(index)
                return
            step.read[at, :3] = word, *probes.UNREAD
            if program.exact is not None:
                program.exact[1].add(index)

    def _write(self, rows: Rows, sites: list[Site], spots: list[Spot], words: Any) -> None:
        """Write readings into a step's rows."""
        rows.sites.extend(sites)
        rows.calls.extend(spot.call for spot in spots)
        low, high = words[:, 1].astype(float), words[:, 2].astype(float)
        for order in np.flatnonzero(words[:, 0]):
            low[order], high[order] = probes.read(words[order])
        if words.shape[1] > 3:
            first = len(rows.lo)
            rows.stats.update(
                (first + i, tuple(row)) for i, row in enumerate(words[:, 3:].tolist())
            )
        rows.lo.extend(low.tolist())
        rows.hi.extend(high.tolist())

    def _guard(self, step: Step, words: Any) -> None:
        """Have the norm of all gradients of weights judged, where the policy asks for it."""
        policy = self.options.policy
        if policy.spike is None and policy.vanishing is None:
            return
        norms = [
            float(row[-1])
            for spot, row in zip(step.watch.spots, words, strict=True)
            if spot.phase == "backward" and spot.parameter is not None
        ]
        if norms:
            self.tracker.judge.guard(step.rows, math.hypot(*norms))

    def _sites(self, spots: list[Spot], avals: list[Any]) -> list[Site]:
        site = self.tracker.judge.monitor.site
        return [
            site(
                spot.layer, spot.phase, spot.tensor, probes.dtype_name(aval),
                probes.dtype_max(aval), parameter=spot.parameter,
            )
            for spot, aval in zip(spots, avals, strict=True)
        ]  # fmt: skip

    def _every_operation(self, step: Step) -> None:
        """Look at every operation of a step."""
        from anynan.jax.replay import everything

        try:
            seen = everything(step)
        except Exception as error:  # noqa: BLE001  the readings are judged all the same
            self.tracker.judge.say(
                f"level='operation' could not look at a step: {type(error).__name__} {error}"
            )
            return
        if seen is not None:
            self.tracker.judge.operations(step.rows, seen)

    def _live(self, step: Step, watch: Watch) -> None:
        """Let the core look at what is still there of a bad step."""
        graph = step.program.graph
        held = dict(zip(graph.results, step.outs, strict=True))
        if not watch.restored:
            held.update(zip(graph.arguments, step.arrays, strict=True))
        for order, spot in enumerate(watch.spots):
            if spot.value in held:
                step.rows.live[order] = functools.partial(alive, held[spot.value])

    # What the core asks for.

    def replay(self, reading: Reading) -> Replay:
        """Run the failing step again, operation by operation."""
        from anynan.jax.replay import replay

        step: Step | None = getattr(self._local, "step", None)
        if step is None or step.rows.step != reading.step:
            msg = (
                "the function ran inside the caller's own jit, grad or vmap, where there is no "
                "step to run again: track the outermost function, and the operation is named"
            )
            raise ReplayError(msg)
        return replay(self, step, reading.order, reading)

    def measure(self, value: Any) -> Summary:
        """Summarise an array."""
        return probes.measure(value)

    def bad_parameters(self) -> list[BadParameter]:
        """List the weights that are bad, before the step or after it."""
        step: Step | None = getattr(self._local, "step", None)
        if step is None:
            return []
        program = step.program
        found = []
        for leaf, array in zip(program.leaves, step.arrays, strict=True):
            if leaf.role in ("parameter", "buffer") and _is_bad(array):
                summary = probes.measure(alive(array))
                found.append(
                    BadParameter(leaf.name, program.owner(leaf), summary, leaf.role == "buffer")
                )
        return found or step.spoilt

    def bad_rows(self, value: Any) -> tuple[int, ...]:
        """List the rows of a batch that hold bad values."""
        return probes.bad_rows(value)

    def rank(self) -> int | None:
        """Give the process in a run over several."""
        return int(jax.process_index()) if jax.process_count() > 1 else None


def _key(flat: signature.Flat, objects: Objects | None) -> Hashable:
    """Say what a program is made for."""
    return flat.key(), None if objects is None else objects.definition


def _is_bad(x: Any) -> bool:
    x = alive(x)
    if x is None or not probes.checkable(signature.aval(x)):
        return False
    return bool(probes.code(jax.numpy.asarray(x)) > 0)
