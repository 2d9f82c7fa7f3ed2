"""One tracked function: its programs, its steps, its reads."""

import atexit
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anynan._arrays.arguments import positional
from anynan._readings import step as core
from anynan._readings.moves import due, moved, stride
from anynan._readings.readings import ProbePoint
from anynan._steps.framework import Escalation
from anynan._steps.messages import NO_UPDATES
from anynan._steps.tracked import Tracked
from anynan.errors import AnomalyError, reason
from anynan.jax.graphs.versions import context
from anynan.jax.messages import (
    LAYER_UNNAMED,
    MODEL_BUILDS,
    OPERATION_OPAQUE,
    PROGRAM_UNWATCHED,
    SKIP_INSIDE,
)
from anynan.jax.program import signature
from anynan.jax.program.objects import Own, builds, refuse_cycles
from anynan.jax.program.program import Form, Program, Settings, form_of
from anynan.jax.program.trace import (
    ShutError,
    UntraceableError,
    UnwatchableError,
    staged,
    traced,
    tracing,
    under_way,
)
from anynan.jax.program.watch import Watches
from anynan.jax.read import donated, probes
from anynan.jax.read.places import fill, sites_of
from anynan.jax.read.readings import Path
from anynan.jax.replay.placed import place
from anynan.jax.replay.steps import Step, weakly
from anynan.jax.session.raising import OwnErrors
from anynan.jax.session.settlement import StepReader
from anynan.jax.session.taps import Taps
from anynan.jax.session.verdicts import ThresholdTable
from anynan.options import Options


class Sample:
    """Keep samples of the weights that a step takes, and then how far it moved them.

    Args:
        program: What will run.
        places: The results that are new weights, with the argument that each comes in as.
        arrays: Its arguments; they may be donated.
    """

    def __init__(self, program: Program, places: list[tuple[int, int]], arrays: list[Any]) -> None:
        self._places, old = places, [arrays[source] for _, source in places]
        owners = [program.owner(program.leaves[source]) for _, source in places]
        self._weights = [(owner, x.shape) for owner, x in zip(owners, old, strict=True)]
        self._held: Any = _samples(old)

    def after(self, outs: list[Any]) -> None:
        """Compare them with what came out."""
        self._held = _norms(self._held, [outs[i] for i, _ in self._places])

    def write(self, rows: core.Step) -> None:
        """Bring it to the host, and write it into the step."""
        moved(rows, self._weights, probes.on_host(self._held).tolist())


def sample(every: int | None, step: int, program: Program, arrays: list[Any]) -> Sample | None:
    """Keep samples if it is the step's turn, and it returns new weights."""
    places = weights_of(program) if due(every, step) else []
    return Sample(program, places, arrays) if places else None


def weights_of(program: Program) -> list[tuple[int, int]]:
    """List the results that are new weights, with the argument that each comes in as."""
    return [
        (i, program.back[i])
        for i, index, _ in program.weights()
        if probes.checkable(program.closed.out_avals[i])
        # What is handed on as it came is not updated.
        and program.graph.values[index].argument is None
    ]


@jax.jit
def _samples(arrays: list[Any]) -> list[Any]:
    return [_sample(x) for x in arrays]


@jax.jit
def _norms(old: list[Any], new: list[Any]) -> Any:
    pairs = []
    for before, x in zip(old, new, strict=True):
        kind = jnp.promote_types(before.dtype, jnp.float32)
        start, end = before.astype(kind), _sample(x).astype(kind)
        pairs.append(jnp.stack([jnp.linalg.norm(end - start), jnp.linalg.norm(start)]))
    return jnp.stack(pairs)


def _sample(x: Any) -> Any:
    return jnp.reshape(x, -1)[:: stride(x.shape)]


# Kept until they are read, also where the user forgets the tracker.
_waiting: "dict[int, PendingSteps]" = {}


class PendingSteps:
    """Hold a session's steps in the order in which they ran.

    Args:
        at_exit: Reads what is left when the program ends.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self.at_exit = at_exit
        self._steps: list[Step] = []
        self._lock = threading.RLock()

    @property
    def last(self) -> Step | None:
        """Give the newest step, None if all are read."""
        return self._steps[-1] if self._steps else None

    def add(self, step: Step) -> None:
        """Hold one more."""
        self._steps.append(step)

    def take(self, but: int) -> Step | None:
        """Give the oldest step, None if no more than so many are left."""
        with self._lock:  # two threads may read at once, as at the end of a program
            return self._steps.pop(0) if len(self._steps) > but else None

    def note(self) -> None:
        """Have what waits read at the end of the program, and only that."""
        if self._steps:
            _waiting[id(self)] = self
        else:
            _waiting.pop(id(self), None)


@atexit.register
def _at_exit() -> None:
    for unread in list(_waiting.values()):
        unread.at_exit()


KEPT = Escalation(
    "what the next {steps} steps donate is kept, which takes memory",
    "what the steps donate was kept from step {step} on",
    "what they donate is no longer kept",
    100,
)
NO_WEIGHTS = (
    "this function returns no argument's new value; track a "
    "training step that takes and returns its weights"
)


class Session(StepReader):
    """Watch one function for one tracker."""

    backend = "jax"
    probes = probes

    def __init__(
        self, fn: Callable[..., Any], tracker: Tracked, options: Options | None = None
    ) -> None:
        super().__init__(tracker, options)
        options = self.options
        lag: int | None = options.lag
        if lag is None:  # where nothing depends on the answer nobody has to wait for it
            lag = int(options.only_watches and options.read == "auto")
        self.lag = lag
        # Without a replay a step that is read late is not worth keeping alive.
        self.light = bool(lag) and not options.replay and options.level != "operation"
        self._programs: dict[Hashable, Watches] = {}
        self._blind: set[Hashable] = set()
        # What could not be rebuilt of each program, and why.
        self._shut: dict[Hashable, dict[Path, str]] = {}
        self._kept: list[Any] = []
        self._lock = threading.RLock()
        self.unread = PendingSteps(tracker.remove)
        self._static: set[Hashable] | None = None
        self._once = False
        self._layers: dict[str, None] = {}
        policy = options.policy
        self.verdicts = ThresholdTable(tracker.judge.monitor)
        sizes = options.sizes
        # A gradient norm is judged by what it was before.
        guarded = policy.spike is not None or policy.vanishing is not None
        self.settings = Settings(
            names=positional(fn),
            layers=options.level != "step",
            backward=options.backward,
            gradients=options.backward and (sizes or guarded or not options.replay),
            ends=sizes or guarded,
            extra=options.extra if not guarded else (*options.extra, "norm"),
            parameters=options.parameters,
            donate=not options.keep_inputs,
            drops=options.action == "skip" or options.patience > 0,
            raises=options.action == "raise",
            plain=type(fn).__module__.startswith("equinox"),
        )
        if options.replay and not self.settings.raises:
            context()  # here, and not in the middle of a run that goes on after a report

    # Life.

    def detach(self) -> None:
        """Forget the programs."""
        self._programs.clear()
        self._blind.clear()
        self._shut.clear()
        self._kept.clear()

    def watched(self) -> list[str]:
        """List the layers that were found in the traced programs."""
        return list(self._layers)

    def size(self) -> int:
        """Count the bytes of the arrays that the programs hold."""
        graphs = (watches.program.graph for watches in self._programs.values())
        held = {id(v.constant): v.constant for graph in graphs for v in graph.values}
        return sum(getattr(x, "nbytes", 0) for x in held.values())

    def read(self) -> None:
        """Read and judge the steps not read yet."""
        self._read()

    def _read(self, but: int = 0) -> None:
        """Read and judge the steps not read yet, but for so many of the last."""
        try:
            while (step := self.unread.take(but)) is not None:
                self.settle(step)
        finally:
            self.unread.note()

    # One step.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one step, read it and judge it."""
        if tracing():  # inside another tracked function, which sees all of this
            return fn(*args, **kwargs)
        with OwnErrors(fn):
            return self._called(fn, args, kwargs)

    def _called(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        key: Hashable = None
        failed: Exception | None = None
        try:
            form = self._form(fn, args, kwargs)
            key = form.key
        except Exception as error:  # noqa: BLE001  the function's own comes again when it is run
            failed = error
        if failed is None and key not in self._blind:
            try:
                if key not in self._programs and builds(fn, args, kwargs):
                    self.tracker.judge.say(MODEL_BUILDS(name=self.tracker.name))
                    return fn(*args, **kwargs)
                watches = self.watches(form)
                if traced(form.flat.arrays) or traced(watches.program.closed.consts) or staged():
                    return self._inside(watches.program, form.flat.arrays)
                ran = self._run(fn, form, watches)
            except UntraceableError as error:
                raise TypeError(str(error)) from error.__cause__
            except UnwatchableError as error:
                failed = error
        if failed is not None or key in self._blind:
            return self._unwatched(key, failed, fn, (args, kwargs))
        outs = ran.outs
        if self.light:
            ran.arrays, ran.outs = weakly(ran.arrays), weakly(outs)
        self.unread.add(ran)
        every = self.options.read
        if isinstance(every, int) and (ran.rows.number + 1) % every:
            self.unread.note()
        else:
            try:
                self._read(self.lag)
            except AnomalyError as error:
                # The user's stack is what matters, not the way through the core.
                raise error.with_traceback(None) from error.__cause__
        out = watches.program.joined(outs)
        if form.objects is None:
            return out
        out, states = out
        if not self._once:
            form.objects.update(states)
        fixed = watches.program.out.fixed
        return form.objects.given_back(out) if any(isinstance(x, Own) for _, x in fixed) else out

    def _form(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """Take a call apart; what it raises the function itself raises again."""
        if self._static is None:
            refuse_cycles((args, kwargs))
            with under_way():
                self._static = signature.static_arguments(fn, args, kwargs)
        # What ran by itself had its plain numbers as they are, and may have branched by them.
        plain = self.settings.plain or self._once
        return form_of(fn, args, kwargs, self._static, plain=plain)

    def _inside(self, program: Program, arrays: list[Any]) -> Any:
        """Run a program inside the caller's own."""
        self._refuse_inside()
        taps = Taps(program, self.verdicts.bad_words, self.told, self.tracker.judge.say)
        return taps.run(arrays, backward=self.options.backward)

    def _run(self, fn: Callable[..., Any], form: Form, watches: Watches) -> Step:
        """Run a program, and give the step that it was.

        Raises:
            UnwatchableError: If it cannot be watched.
        """
        judge, arrays, program = self.tracker.judge, form.flat.arrays, watches.program
        watch, rows = watches.get(self.verdicts.exact(watches)), judge.rows()
        step = Step(watch, list(arrays), [], None, rows, since=judge.steps.since)
        little = bool(program.donated) and self.tracker.found and watches.is_little(arrays)
        keeps = little or not self.settings.donate or self.has_risen(step)
        if keeps and not self.light:
            step.copies = donated.copies([arrays[i] for i in program.donated])
        kept = sample(self.options.updates, rows.number, program, arrays)
        try:
            outs, words = watch(self.verdicts.table(watch), arrays)
            if self.settings.plain:  # equinox itself waits here
                jax.block_until_ready(words)
        except UnwatchableError:
            raise
        except Exception as error:
            if little and "RESOURCE_EXHAUSTED" in str(error):  # it was more than there is
                watches.little = False
                flat = replace(form.flat, arrays=list(map(donated.alive, arrays)))
                return self._run(fn, form._replace(flat=flat), watches)
            judge.close_step()
            self.broken(step, error, self.verdicts.table(watch))
            raise
        step.outs, step.words = list(outs), words
        for i in program.empty:
            place(step.outs[i])
        judge.close_step()
        if kept is not None:
            kept.after(outs)
            step.moved = kept
        if self.options.replay and not self.light:
            step.traced = fn, form._replace(flat=replace(form.flat, arrays=[]))
        return step

    @property
    def compiled(self) -> int:
        """Count the programs that run here with their readings."""
        return len(self._programs)

    def again(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make a call that ran by itself once more, as a step; nothing is kept of it."""
        self._once, self._static = True, None
        try:
            self.call(fn, args, kwargs)
            self._read()
        finally:
            self._once = False
            self.detach()

    def _unwatched(
        self, key: Hashable, error: Exception | None, fn: Callable[..., Any], given: Any
    ) -> Any:
        """Run a function whose program cannot be watched: without those of its equations, or bare.

        From now on, that is.
        """
        if isinstance(error, ShutError):
            shut = self._shut.setdefault(key, {})
            if not error.paths.keys() <= shut.keys():
                shut.update(error.paths)
                self._programs.pop(key, None)
                return self._called(fn, *given)
        out = fn(*given[0], **given[1])
        if error is not None:
            if key is not None:
                self._blind.add(key)
            why = str(error) if isinstance(error, UnwatchableError) else reason(error)
            self.tracker.judge.say(PROGRAM_UNWATCHED(name=self.tracker.name, why=why))
        return out

    def watches(self, form: Form) -> Watches:
        """Give what runs a function for this kind of arguments; traced when first asked for.

        Raises:
            UntraceableError: If the function cannot be traced, by its own nature.
            UnwatchableError: If it cannot be watched.
        """
        key = form.key
        found = self._programs.get(key)
        if found is None:
            with self._lock:
                try:
                    program = form.program(self.settings)
                    if key in self._shut:
                        program = program.without(self._shut[key])
                except (UntraceableError, UnwatchableError):
                    raise
                except Exception as error:
                    raise UnwatchableError(reason(error)) from error
                program.pick(
                    self.options.layers, self.options.exclude, self.options.policy.overrides
                )
                self._refuse(program)
                self._say(program)
                found = Watches(program)
                # What it closes over may be of a trace that is over before the program is.
                if not traced(program.closed.consts):
                    self._programs[key] = found
                self._kept.append(form.flat.fixed)
                self._layers.update(dict.fromkeys(program.chosen or ()))
        return found

    def _say(self, program: Program) -> None:
        for name, why in program.graph.strange.items():
            reason_ = f" ({why})" if why else ""
            self.tracker.judge.say(OPERATION_OPAQUE(name=name, why=reason_))
        unnamed = program.roots and not program.layers.names()
        if unnamed and not self._once:  # else nobody could have tracked it before
            names = ", ".join(sorted(program.roots))
            self.tracker.judge.say(LAYER_UNNAMED(names=names))

    def _refuse(self, program: Program) -> None:
        if self.options.updates is not None and not weights_of(program):
            self.tracker.judge.say(NO_UPDATES(option="Advanced(updates=)", why=NO_WEIGHTS))
        found = self.tracker.found  # among much else: what has no state is warned about
        if self.options.action == "skip" and not program.restorable and not found:
            msg = (
                "action='skip' gives a bad step's old state back, but this function returns no "
                "argument's new value: track a training step that takes and returns its weights "
                "and optimizer state, or choose another action"
            )
            raise ValueError(msg)

    # Inside the caller's own program.

    def _refuse_inside(self) -> None:
        """Refuse to drop updates of which the caller's program, or another replica, has others."""
        if self.options.action == "skip":
            raise ValueError(SKIP_INSIDE(option="action='skip'"))
        if self.options.patience:
            self.tracker.judge.say(
                SKIP_INSIDE(option=f"Advanced(patience={self.options.patience})")
            )

    def told(self, points: list[ProbePoint], avals: list[Any], words: Any) -> None:
        """Judge readings that the caller's program sent because one of them is bad."""
        with self._lock:
            rows = self.tracker.judge.rows()
            filled = np.empty((len(words), 3))
            filled[:, 0], filled[:, 1:] = words, probes.UNREAD
            fill(rows, sites_of(points, avals, self.tracker.judge.monitor), points, filled)
            self.tracker.judge.close_step()
            self.tracker.judge.settle(rows)

    # What the core asks for.

    def escalation(self) -> Escalation | None:
        """Keep what the next steps donate, if this one could not be run again without it."""
        step = self.step
        kept = step is None or step.copies or not step.program.donated
        return None if kept else KEPT

    def rank(self) -> int | None:
        """Give the process in a run over several."""
        return int(jax.process_index()) if jax.process_count() > 1 else None
