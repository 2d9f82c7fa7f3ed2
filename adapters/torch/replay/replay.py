"""Run a failing call again under the operation watcher, and leave no trace of it."""

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from anynan._base.context import replay_context
from anynan._base.interrupts import Interrupts
from anynan._base.threads import busy_threads
from anynan._base.walks import walk
from anynan._calls.collector import collecting
from anynan._diagnosis.evidence import ReplayError
from anynan._diagnosis.lineage import Replay, Sink, trace
from anynan._diagnosis.messages import NOT_PUT_BACK
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._reach import Exhausted
from anynan._reach.messages import ANOTHER_THREAD, REPLAY_STOPPED, STATE_MISSED
from anynan._readings.readings import Reading, Site
from anynan._readings.step import Step
from anynan._steps.messages import MODEL_GONE
from anynan.torch.call import noted
from anynan.torch.call.discovery import find_state
from anynan.torch.call.models import Models
from anynan.torch.call.reached import Reached
from anynan.torch.call.rootcall import RootCall, cut
from anynan.torch.call.state import State, StopReplay
from anynan.torch.call.threads import Threads
from anynan.torch.graphs.compiler import eager
from anynan.torch.graphs.graphs import Graphs
from anynan.torch.messages import REPLAY_FROM_ONES, REPLAY_INPUT_CHANGED, REPLAY_UPDATED
from anynan.torch.private import (
    count_modes,
    forward_hooks_apart,
    hook_first,
    nodes_before,
    task,
    without_modes,
)
from anynan.torch.read.probes import nonfinite
from anynan.torch.read.tensors import tensors
from anynan.torch.replay.collectives import Sent, replaying
from anynan.torch.replay.fix_runner import FixRunner, norm_of
from anynan.torch.replay.kept import Kept
from anynan.torch.replay.recorder import StorageRecorder
from anynan.torch.replay.saving import Catcher
from anynan.torch.replay.scene import Scene, arrived
from anynan.torch.replay.seams import Seam
from anynan.torch.replay.tail import Tails, earlier
from anynan.torch.replay.watcher import Watcher
from anynan.torch.weights.scalers import Scalers

# Seconds to wait for another thread's second run, which may itself wait for this thread.
_PATIENCE = 10.0
# Of so many buffers that are bad at first it is noted what made them so.
_EARLIER = 8


# Those of all that is tracked.
_every: "weakref.WeakSet[Replays]" = weakref.WeakSet()


# Why there is no call to run again.
COMPILED = (
    "the model's own call is part of the compiled code, so there is no call to run again: track "
    "what torch.compile returned, or the step function, and the report names the operation"
)
APART = (
    "the backward pass ran outside of the tracked function, so there is no call to run again: "
    "call backward() inside it, or track the model instead"
)
PAST = (
    "the layer was called past the model (not through the tracked model's own call), so there is "
    "no call to run again: the report names no operation"
)


class Replays:
    """Run calls of what is tracked a second time.

    Args:
        models: What is watched.
        threads: The threads that run it.
        graphs: What of it is compiled.
        scalers: The loss scalers.

    Attributes:
        reached: What the code of a call reaches, None where nothing is run again.
        scene: What a watcher is told.
        lock: Held while calls are run again.
    """

    def __init__(self, models: Models, threads: Threads, graphs: Graphs, scalers: Scalers) -> None:
        self._models, self._threads = models, threads
        self._graphs, self._scalers = graphs, scalers
        self.reached = Reached(models.fn) if models.options.replay else None
        self.scene = Scene(models)
        self.tails = Tails(models.parameters, models.buffers)
        self.lock = threading.Lock()
        self._told: list[weakref.ref[torch.Tensor]] = []  # weights that were bad at the start
        self._strangers: list[weakref.ref[torch.Tensor]] = []  # of the last second run
        _every.add(self)

    def handed(self) -> list[tuple[str, torch.Tensor]]:
        """Give what the last second run was handed that others computed, and forget it."""
        refs = [*self.scene.handed, *self.tails.handed]
        self.scene.handed.clear()
        self.tails.handed.clear()
        return [(name, x) for name, ref in refs if (x := ref()) is not None]

    def let_pass(self, state: State) -> None:
        """Wait while another thread runs a step again: both would write the same buffers."""
        if state.idle or task() != -1:
            return
        if self.lock.acquire(timeout=_PATIENCE):
            self.lock.release()

    def _asked(self, state: State, reading: Reading) -> Replay | None:
        """Run the models again for a gradient that the program asked for, as it last came to them.

        Raises:
            ReplayError: If they cannot be run again.
        """
        called = [root.ended() for root in state.living_roots() if root.fn is not None]
        roots = [root for root in called if root.gradients]
        return self.again(state, reading, roots, handed=True) if roots else None

    def run(self, state: State, reading: Reading) -> Replay:
        """Run the call behind a reading again, operation by operation.

        Args:
            state: The thread's open step.
            reading: The bad reading.

        Raises:
            ReplayError: If the call is not known or its inputs were changed.
        """
        if state.rows is not None and state.rows.number != reading.step:
            msg = (
                f"step {reading.step} was over when it was read, so it cannot be run again: the "
                "report names no operation"
            )
            raise ReplayError(msg)
        self.tails.models = None if state.in_step else functools.partial(self._asked, state)
        if reading.phase == "loss" and not state.in_step:
            return self._before_loss(state, reading)
        roots = self._known(state, reading)
        behind = None
        if reading.phase == "backward" and not state.in_step:  # what is behind the models is first
            behind = self.tails.replay(state.thread.ident, reading, None)
            if behind is not None and behind.made:
                return behind
        remade: dict[int, torch.Tensor] = {}
        try:
            result = self.again(state, reading, roots, remade=remade)
        except ReplayError:
            if behind is None:
                raise
            return behind
        if not (result.sinks or result.notes or state.in_step):
            behind = behind or self.tails.changed(state.thread.ident, reading, remade)
        if behind is not None and not result.made:
            return behind
        self.tails.forget()
        before = None
        if reading.phase in ("forward", "backward"):
            before = self._before_call(state, reading, roots, result)
        return before or self._behind_parts(state, reading, result)

    def _known(self, state: State, reading: Reading) -> list[RootCall]:
        """List the calls that a reading may come from.

        Raises:
            ReplayError: If there are none, or the model of one is gone.
        """
        roots = _roots(state, reading)
        if not roots:
            if self._graphs.ran():
                raise ReplayError(COMPILED)
            apart = self._models.fn is not None and reading.phase == "backward"
            raise ReplayError(APART if apart else PAST)
        if any(root.fn is None for root in roots):
            raise ReplayError(MODEL_GONE())
        return roots

    def _before_call(
        self, state: State, reading: Reading, roots: list[RootCall], result: Replay
    ) -> Replay | None:
        """Find what the program made bad before it called the model; None if it did not.

        Raises:
            ReplayError: If what it was called with was written to since.
        """
        made = result.made
        if not state.in_step:
            if reading.kind == "posinf":
                prior = self._before_module(state, reading, roots)
                if prior is not None:
                    return prior
            given = roots[0].living()
            if made and not _hands_on(result):
                # A metric that leaves NaN losses out divides by their number: the loss is to blame.
                given = [x for x in given if x.numel() == 1]
            else:
                given = given + self._used(result)
            found = self.tails.before(state.thread.ident, reading, given)
            if found is not None and (found.made or not made):
                return found
        written = (x for root in roots if root.changed() for x in root.living())
        if not made and any(map(nonfinite, written)):
            raise ReplayError(REPLAY_INPUT_CHANGED())  # bad as it is now, by the call itself
        return None

    def _behind_parts(self, state: State, reading: Reading, result: Replay) -> Replay:
        """Look into what took what this part gave: what came in bad may be made there."""
        if reading.phase != "backward" or not result.incoming or result.sinks:
            return result
        beyond = self._beyond(state) if self._models.parts else []
        found = self.again(state, reading, beyond, handed=True) if beyond else result
        if found.sinks:
            return found
        notes = noted.of(state.thread.ident)
        for last in list(notes.passes)[-1:] if notes else ():
            bad = {id(ref) for ref, _, x in last.between if x is None or nonfinite(x)}
            others = (each._spoilt(reading, bad) for each in list(_every) if each is not self)
            return next(filter(None, others), result)
        return result

    def _spoilt(self, reading: Reading, bad: set[int]) -> Replay | None:
        """Run those calls again that gave bad gradients, for what is tracked apart from this.

        Args:
            reading: What was read of that.
            bad: The ids of the weak references to what has a bad gradient.
        """
        state = self._threads.state()
        roots = [
            root for root in self._beyond(state) if any(id(x) in bad for x, _ in root.versions)
        ]
        found = self.again(state, reading, roots, handed=True) if roots else None
        if found is None or not found.made:
            return None
        found.passed, (_, model) = [], next(self._models.living())
        name = type(model).__name__  # its layers are another model's
        for record in found.records:
            record.layer = f"{name}.{record.layer}" if record.layer else name
        return found

    def written(self, reading: Reading, weights: list[torch.Tensor]) -> Replay | None:
        """Compute again what the program wrote into weights before they were watched."""
        self._told += map(weakref.ref, weights)
        return self.tails.before(None, reading, weights[:1])

    def begin(self, buffers: list[torch.Tensor]) -> None:
        """Note what made buffers bad, while that is known: they may be used much later."""
        for x in buffers[:_EARLIER]:
            found = self.tails.before(None, _reading(0, 0), [x])
            if found is not None and found.made:
                earlier[x] = found

    def _used(self, result: Replay) -> list[torch.Tensor]:
        """List the weights, buffers and other tensors that bad values came from, small ones first.

        The program may have computed a buffer, or written to a weight by hand. Of small ones that
        were written to copies are held.
        """
        used = {operand.label for record in result.records for operand in record.operands}
        named = [*self._models.parameters(), *self._models.buffers()]
        told = [ref() for ref in self._told]
        new = (x for name, x in named if name in used and all(x is not other for other in told))
        others = (x for ref in self._strangers if (x := ref()) is not None)
        return sorted([*new, *others], key=torch.numel)

    def _beyond(self, state: State) -> list[RootCall]:
        """List the calls into which no bad gradient came."""
        return [
            root
            for root in state.living_roots()
            if root.fn is not None
            and root.gradients
            and not any(grad is None or nonfinite(grad) for grad in root.gradients.values())
        ]

    def _before_loss(self, state: State, reading: Reading) -> Replay:
        """Run the model's call again where it gave -Inf: the loss is made outside of it.

        That of a compiled function which runs the model may make the loss itself.
        """
        root = state.root_of(reading.order)
        if root is not None and root.of_function:
            result = self.again(state, reading, [root])
            if result.made:
                self.tails.forget()
                return result
        gave = _gave(state, reading)
        roots = [] if gave is None else _roots(state, gave)
        prior = None
        if gave is not None and roots and all(root.fn is not None for root in roots):
            prior = self.again(state, gave, roots)
            prior.incoming = True
        found = self.tails.replay(state.thread.ident, reading, prior)
        if prior is not None and not prior.made and not (found and found.made):
            given = roots[0].living() + self._used(prior)
            found = self.tails.before(state.thread.ident, reading, given) or found
        return found or prior or Replay(incoming=True)

    def _before_module(
        self, state: State, reading: Reading, roots: list[RootCall]
    ) -> Replay | None:
        """Run the model's call again whose -Inf a loss module made +Inf of; None for a mask."""
        gave = _gave(state, reading)
        if gave is None or gave.kind != "neginf" or not any(map(nonfinite, roots[0].living())):
            return None
        before = [root for root in _roots(state, gave) if root.fn is not None]
        if not before or before == roots:
            return None
        prior = self.again(state, gave, before)
        prior.incoming = True
        return prior if trace(prior.records, prior.sinks, neginf=True).origin else None

    def attempt(self, state: State, reading: Reading, chosen: Sequence[Repair]) -> Attempt | None:
        """Run the call behind a reading again, to its end, with operations repaired.

        Args:
            state: The thread's open step.
            reading: The bad reading.
            chosen: The repairs.

        Returns:
            What was seen; None where that is not what the first run would have come to.
        """
        before = reading.phase == "loss" and not state.in_step
        gave = _gave(state, reading) if before else None
        with suppress(LookupError):
            found = self.tails.attempt(reading, chosen)
            if found is not None or gave is None:
                return found
        reading = gave or reading  # what is repaired is the model's
        roots = _roots(state, reading)
        if not roots or any(root.fn is None for root in roots) or state.updated:
            return None
        runner = FixRunner(chosen)
        try:
            replay = self.again(state, reading, roots, runner=runner)
        except ReplayError:
            return None
        told = replay.notes or replay.incoming or replay.substituted
        if told or not runner.whole or self._goes_on(state, roots):
            return None
        found = Attempt(replay, "forward" if reading.phase != "backward" else "both", runner.bad)
        if state.in_step:
            found.extent = "step" if self._models.refs else "call"
            # A scaler's losses and gradients are not the program's own numbers.
            if self._scalers.used is None:
                found.loss, found.gradient_norm = runner.loss, runner.gradient_norm
        return found

    def _goes_on(self, state: State, roots: list[RootCall]) -> bool:
        """Tell whether a step has more updates than the first, at which a second run ends."""
        if not state.in_step:
            return False
        reached = [item for root in roots for item in find_state(root.fn).values()]
        found = {id(item) for item in reached if isinstance(item, torch.optim.Optimizer)}
        return len(found | {id(item) for item in self._models.stepped}) > 1

    def run_inner(self, state: State, reading: Reading) -> Replay | None:
        """Run the models' own calls inside a step again that a reading may come from.

        Args:
            state: The thread's open step.
            reading: The bad reading.

        Returns:
            What was seen; None where no such call is known.

        Raises:
            ReplayError: If they cannot be run again.
        """
        now = state.rows is not None and state.rows.number == reading.step
        if not state.in_step or not now or reading.phase not in ("forward", "backward"):
            return None
        roots = [root for root in state.inner_roots(reading) if root.fn is not None]
        if not roots:
            return None
        result = self.again(state, reading, roots)
        result.inner = True
        return result

    def up_to(self, state: State, rows: Step) -> Replay | None:
        """Run the call that an exception has just ended again, up to there.

        Raises:
            ReplayError: If it cannot be run again.
        """
        root = state.root
        if root is None or root.fn is None:
            return None
        reading = _reading(rows.number, len(rows.lo))
        result = self.again(state, reading, [root], ending=True)
        if result.sinks and not (result.made or state.in_step):  # what it was given was bad
            before = self.tails.before(state.thread.ident, reading, root.living())
            if before is not None and before.made:
                before.raised, before.passed = result.raised, result.passed
                return before
        return result

    def again(
        self, state: State, reading: Reading, roots: list[RootCall], *, together: bool = False,
        ending: bool = False, handed: bool = False, runner: FixRunner | None = None,
        remade: dict[int, torch.Tensor] | None = None,
    ) -> Replay:  # fmt: skip
        """Run calls again, and leave no trace; where all ranks do so, none stops early.

        Args:
            state: The thread's open step.
            reading: The bad reading, or one of its phase where another rank has it.
            roots: The calls.
            together: Whether all ranks run theirs at this moment.
            runner: What repairs operations on the way, in a run that goes to its end.
            ending: Whether an exception of the program's is what they are run for.
            handed: Whether the gradients of what other parts handed to them are looked at.
            remade: Gets the gradients of the weights, by the identity of these.

        Raises:
            ReplayError: If they cannot be run on this rank alone.
        """
        result = Replay(uncompiled=self._graphs.ran())
        self._alone(roots)
        weights = (p for _, p in self._models.parameters())
        with (
            Interrupts() as interrupts,
            self.lock,
            replaying(weights, together=together),
            ExitStack() as stack,
        ):
            kept = Kept()
            try:
                # A gradient hook may have begun this, and in a thread that is not the step's.
                states = {self._threads.state(), state}
                kept.note(self._models, states, roots, self._scalers.used)
                if self._models.fn is not None:
                    self._scalers.give_back(state.rows)
                stack.enter_context(replay_context())
                stack.enter_context(noted.apart())
                stack.enter_context(disabled_modes())
                for root in roots:
                    if root.changed():
                        result.notes.append(REPLAY_INPUT_CHANGED())
                    seen = self._run(
                        root, reading, result, kept, interrupts,
                        whole=root is state.root and state.in_step, together=together,
                        ending=ending, handed=handed, runner=runner,
                    )  # fmt: skip
                    if not result.sinks:
                        result.records, result.sinks = seen.records, seen.sinks
                    result.passed += seen.passed
                    result.notes += seen.notes
                    if seen.sinks and not together:
                        break
                if remade is not None:
                    remade.update((id(p), p.grad) for _, p in self._models.with_gradient())
            finally:
                interrupts.end()
                kept.restore()
        result.notes += [NOT_PUT_BACK(who="the second run", what=what) for what in kept.lost]
        if result.uncompiled:  # what compiled code calls several times has one reading
            result.passed = []
        elif state.updated and state.in_step:
            result.passed = [place.unmeasured() for place in result.passed]
            result.notes.append(REPLAY_UPDATED())
        elif result.substituted:
            result.passed = [place for place in result.passed if place.phase != "backward"]
        return result

    def _alone(self, roots: list[RootCall]) -> None:
        """Refuse a second run that another thread would notice.

        Raises:
            ReplayError: If another thread uses the model, or would draw the same random numbers.
        """
        busy = busy_threads()
        if not busy:
            return
        users = {state.thread.ident for state in self._threads.states if state.used}
        ours = next((name for number, name in busy.items() if number in users), None)
        if ours is not None:
            msg = (
                f"another thread ({ours}) runs what is tracked, too, and would have met the "
                "second run in it: the step was not run again, and the report names no operation"
            )
            raise ReplayError(msg)
        if not all(root.random.is_now() for root in roots):
            name = next(iter(busy.values()))
            msg = (
                f"the step drew random numbers, and another thread ({name}) would have drawn the "
                "same ones during a second run: the step was not run again, and the report names "
                "no operation"
            )
            raise ReplayError(msg)

    def _run(
        self, root: RootCall, reading: Reading, result: Replay, kept: Kept,
        interrupts: Interrupts, *, whole: bool, together: bool, ending: bool, handed: bool,
        runner: FixRunner | None,
    ) -> StorageRecorder:  # fmt: skip
        self.scene.look_at(root)
        root = replace(root, args=cut(root.args), kwargs=cut(root.kwargs))
        root.random.restore()
        if kept.apart is not None:
            result.notes.append(ANOTHER_THREAD(name=kept.apart))
        elif root.began is not None:
            result.notes += [STATE_MISSED(what=what) for what in root.began.put_back()]
        watcher = Watcher(self.scene.outside(root))
        watcher.originals, seen = {}, watcher.recorder
        watcher.runner = runner
        saving = collecting.get()
        if not together and runner is None:
            seen.stop = functools.partial(_matches, reading)
        watcher.within, watcher.called = Replays._run.__code__, root.source()
        with ExitStack() as stack:
            stack.callback(watcher.restore)
            if root.reached is not None:
                stack.enter_context(root.reached.again())
            stack.enter_context(root.modes())
            stack.enter_context(eager())
            stack.enter_context(forward_hooks_apart(model for _, model in self._models.living()))
            stack.enter_context(self.scene.layers(watcher, root.calls))
            if saving is not None:
                catcher = watcher.catcher = Catcher(saving)
                seen.offer = catcher.recorded
                stack.enter_context(catcher.within(self._models, root))
            if handed:
                _look_behind(root, watcher, reading)
            stack.enter_context(Seam(watcher, leaf=kept.gradient))
            stack.enter_context(_to_its_end(result, seen, ending=ending))
            if together:
                stack.enter_context(Sent(seen))
            with watcher:
                try:
                    interrupts.begin()
                    root.send()
                    out = root.fn(*root.args, **root.kwargs)
                    if whole or (root.of_function and reading.phase != "backward"):
                        _results(watcher, out)
                    elif reading.phase == "backward":
                        _backward(root, out, result, together=together)
                finally:  # inside: PyTorch leaves a mode in several steps
                    interrupts.end()
        self._strangers = seen.strangers
        if not any(sink.phase == reading.phase for sink in seen.sinks):
            self.scene.gradients(watcher)
        if runner is not None:
            grads = [p.grad for _, p in self._models.with_gradient()]
            runner.gradient_norm = norm_of(grads)
        return seen


def _reading(step: int, order: int) -> Reading:
    """Stand for what was read, where nothing was."""
    return Reading(step, order, 0, Site(-1, None, "value", "", "", None, 0.0), 0.0, 0.0)


@contextmanager
def _to_its_end(result: Replay, seen: StorageRecorder, *, ending: bool) -> Iterator[None]:
    """Note why a second run ended, where something ended it: it may fail as the step did.

    Args:
        result: What it gives.
        seen: What it has recorded.
        ending: Whether an exception of the program's is what it is run for.
    """
    try:
        yield
    except StopReplay:
        return
    except ReplayError as error:
        result.notes.append(str(error))
    except Exhausted as error:
        result.notes.append(REPLAY_STOPPED(where=f"where {error}"))
    except Exception as error:  # noqa: BLE001
        result.raised = error
        if not ending:
            said = f": {str(error).splitlines()[0][:120]}" if str(error) else ""
            result.notes.append(REPLAY_STOPPED(where=f"at {type(error).__name__}{said}"))
        elif seen.taken is not None:
            seen.sinks.append(seen.taken)


def _hands_on(result: Replay) -> bool:
    """Tell whether the operation to blame gave Inf because it took Inf."""
    origin = trace(result.records, result.sinks).origin
    if origin is None or origin.output is None or origin.output.nan:
        return False
    taken = (x.summary for x in origin.operands if x.summary is not None)
    return any(x.posinf or x.neginf for x in taken)


def _gave(state: State, reading: Reading) -> Reading | None:
    """Find what a model gave that was bad, before its loss was."""
    rows = state.rows
    past = [] if rows is None else map(rows.reading, range(reading.order))
    return next((r for r in past if r.phase == "forward" and r.kind is not None), None)


def _roots(state: State, reading: Reading) -> list[RootCall]:
    """List the calls that a reading may come from."""
    if state.in_step:
        return [state.root] if state.root is not None else []
    if reading.phase == "backward":
        known = state.roots.get(reading.order)
        return [known] if known is not None else state.living_roots()
    root = state.root_of(reading.order)
    return [root] if root is not None else []


def _matches(reading: Reading, sink: Sink) -> bool:
    """Stop the replay where the reading went bad, unless only a mask is there."""
    if sink.masks or sink.phase != reading.phase or sink.layer != reading.layer:
        return False
    return reading.site.parameter is None


def _look_behind(root: RootCall, watcher: Watcher, reading: Reading) -> None:
    """Show the watcher the gradients of what other calls handed to this one."""
    for name, x in tensors((root.args, root.kwargs), "input", objects=True):
        if x.requires_grad:
            x.register_hook(
                functools.partial(arrived, weakref.ref(watcher), reading.layer, name, None)
            )


def _backward(root: RootCall, out: Any, result: Replay, *, together: bool) -> None:
    """Run the backward pass from the kept gradients of the outputs."""
    outputs, gradients = [], []
    found = list(tensors(out, "output", objects=True))
    inside = _used_inside([x for _, x in found])
    for i, (_, x) in enumerate(found):
        if not x.requires_grad:
            continue
        grad = root.gradients.get(i)
        if x.grad_fn in inside:
            # What arrived at it came from the model's own use of it as well, which runs again:
            # the sum is put in the place of what that use alone gives.
            if grad is not None and not nonfinite(grad):
                hook_first(x, functools.partial(_first, grad))
                outputs.append(x)
                gradients.append(torch.zeros_like(x))
            continue
        if i in root.gradients and grad is None:
            result.notes.append(REPLAY_FROM_ONES())
            grad = torch.ones_like(x)
            result.substituted = True
        if grad is None:
            continue
        if nonfinite(grad):
            result.incoming = True
            if not together:
                return
        outputs.append(x)
        gradients.append(grad)
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _first(known: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return known


def _used_inside(outputs: list[torch.Tensor]) -> set[Any]:
    """Give the graph's nodes behind the last ones: an output among them is used for another."""
    ends = [x.grad_fn for x in outputs if x.grad_fn is not None]
    return {before for node in walk(ends, nodes_before) for before in nodes_before(node)}


def _results(watcher: Watcher, out: Any) -> None:
    for name, x in tensors(out, "result", objects=True):
        one = x.numel() == 1
        label = "loss" if one and name == "result" else name
        watcher.check_sink("loss" if one else "forward", None, label, x, call=0)


@contextmanager
def disabled_modes() -> Iterator[None]:
    """Leave the program's own dispatch modes: what counts operations must not count these."""
    if not count_modes():
        yield
        return
    with without_modes():
        yield
