"""Run what the program computed behind its models once more, from what was noted of it.

No code of the program's runs: the same functions of PyTorch are called again, with the values that
are there still, in a graph of their own. The watcher of a second run looks on, so that a loss that
no step owns is told like any other.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import Any

import torch

from anynan._base.context import but, replay_context
from anynan._base.identity import ByIdentity
from anynan._base.sources import is_library, user_source
from anynan._base.walks import walk
from anynan._diagnosis.lineage import External, Replay, Sink
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._readings.readings import Reading
from anynan.events import Extent, Phase, Source
from anynan.torch.call import noted
from anynan.torch.call.note import Note, Noted, Transformed, as_weight, is_trained
from anynan.torch.call.noted import SMALL, Pass
from anynan.torch.call.randomstate import RandomState
from anynan.torch.call.reached import reached_by
from anynan.torch.graphs.compiler import eager
from anynan.torch.messages import WRITTEN_INTO
from anynan.torch.private import (
    data_of,
    give_saved_tensors_hooks,
    is_transformed,
    sets_data,
    storage_number,
    take_saved_tensors_hooks,
    task,
    unseen,
    writes,
)
from anynan.torch.read.probes import measure, nonfinite
from anynan.torch.replay.fix_runner import FixRunner, norm_of
from anynan.torch.replay.names import canonical
from anynan.torch.replay.scene import Handed, arrived
from anynan.torch.replay.seams import Seam
from anynan.torch.replay.watcher import Watcher

# So many other gradients are looked at for what was done to one of them by hand.
ALIKE = 4
# They would hand on what is not known; "copy" is no operation that makes anything.
_COPIES = frozenset({"copy_", "__setitem__", "__set__"})
# What made weights and buffers bad before a model was watched: that may be used much later.
earlier: ByIdentity[torch.Tensor, Replay] = ByIdentity()
Named = Callable[[torch.Tensor], tuple[External, str] | None]


class Lost(Exception):  # noqa: N818  it is no error of the program's
    """Raise where a value is not there any more."""


class TailWatcher(Watcher):
    """Watch what runs again: its lines are those that were noted.

    Attributes:
        before: The records of the models' own calls that the bad ones of their outputs came of.
    """

    before: tuple[int, ...] = ()

    def hand(self, x: torch.Tensor) -> None:
        """Take up what a model gave."""
        with but(self, busy=True):
            bad = bool(self.before) and nonfinite(x)
        for index in self.before if bad else ():
            self.recorder.mark(x, index, fresh=False)

    def line(self, frame: FrameType | None = None) -> Source | None:
        """Give the line of what runs."""
        at = frame or sys._getframe(1)
        if all(each.f_code is not self.within for each, _ in walk_stack(at)):
            return self.called
        return user_source(at, framework="torch", stop=self.within, fallback=self.called)


@dataclass(slots=True)
class Tail:
    """Hold the operations that led to some tensors, and what went in from outside.

    Args:
        before: What was noted.
        roots: The tensors: weakly, with how often they had been written to.
        named: Says where a tensor from outside came from.
        remade: What gradients were as the backward pass ended, from a second run of it: by the
            identity of the weak references to those that were written to since.

    Attributes:
        outside: What came from outside: its name, it weakly, and what stands for it in this run.
        handed: What of it is no weight, weakly: a model may have given it.
    """

    before: Noted
    roots: list[tuple[Any, int]]
    named: Named
    remade: dict[int, torch.Tensor] = field(default_factory=dict)
    outside: list[tuple[str, Any, torch.Tensor]] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    _made: dict[int, list[int]] = field(default_factory=dict)
    _beside: dict[int, list[int]] = field(default_factory=dict)
    # By a tensor's ``data``, or a view of it: the tensor.
    _owners: dict[int, Any] = field(default_factory=dict)
    # By a tensor's ``data``: how often the tensor had been written to, which that does not count.
    _asked: dict[int, int] = field(default_factory=dict)
    _steps: list[int] = field(default_factory=list)
    # Of results that are lost and were made of something bad: the records of what made that so.
    _tainted: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = self._made
        for i, note in enumerate(self.before.operations):
            if note.func == sets_data and note.args[0] is note.args[1]:
                continue  # a model that was moved to where it is
            for ref, _ in note.made:
                made.setdefault(id(ref), []).append(i)
        self._note_views()
        last = self._makers(self.roots, len(self.before.operations))
        needed = walk(last, self._led_to)
        self._steps = sorted(needed)

    def _note_views(self) -> None:
        """Find what was written to tensors through their ``data`` or a view, and take it for them.

        What shares its memory with a tensor that is still there is a view of it.
        """
        self.roots = [*self.roots]  # the pass goes on with its own
        owners, held = self._owners, {}
        for ref, _ in self.roots:
            if (x := ref()) is not None and x.layout is torch.strided:
                held[storage_number(x)] = ref
        for i, note in enumerate(self.before.operations):
            if note.func == data_of:
                owners[id(note.out)] = note.args[0]
                self._asked[id(note.out)] = note.versions[0]
            elif note.memory is not None and note.in_place:
                owner = owners.get(id(note.out)) or held.get(note.memory.storage, note.out)
                if owner is not note.out:
                    owners[id(note.out)] = owner
                    self._beside.setdefault(id(owner), []).append(i)
        for k, (ref, version) in enumerate(self.roots):
            written, operations = [*self._beside.get(id(ref), ())], self.before.operations
            maker = self._maker(ref, version, len(operations))
            if not written or (maker is not None and maker > written[-1]):
                continue
            # What found it bad already did not make it so; an older write was told before.
            while len(written) > 1 and written[-2] >= self.before.since:
                copy = operations[written[-1]].copy
                if copy is None or not nonfinite(copy):
                    break
                del written[-1]
            self.roots[k] = operations[written[-1]].out, operations[written[-1]].version

    def _led_to(self, i: int) -> list[int]:
        """List the operations that one took the results of."""
        prior = self._wrote(i, before=True)[-1:]
        return self._makers(_operands(self.before.operations[i]), i) + prior

    def _wrote(self, i: int, *, before: bool) -> list[int]:
        """List what wrote to a tensor before or after its ``data`` was asked for; none of others.

        Of what came before, it is what wrote through its ``data``, too, with nothing else since.
        """
        note, operations = self.before.operations[i], self.before.operations
        if note.func != data_of:
            return []
        beside = self._beside.get(id(note.args[0]), [])
        if before:
            count, asked = note.versions[0], self._asked
            return [j for j in beside if j < i and asked.get(id(operations[j].out)) == count]
        direct = [j for j in self._made.get(id(note.args[0]), ()) if operations[j].in_place]
        return sorted(j for j in {*beside, *direct} if j > i)

    def _data(
        self, i: int, watcher: TailWatcher, values: dict[tuple[int, int], torch.Tensor]
    ) -> torch.Tensor | None:
        """Give what stands for the ``data`` of a tensor that was written to; None for others.

        Raises:
            Lost: If what was written over is not held.
        """
        note, operations = self.before.operations[i], self.before.operations
        for j in self._wrote(i, before=True)[-1:]:
            if (x := values.get((id(operations[j].out), operations[j].version))) is not None:
                return x
        written = [operations[j] for j in self._wrote(i, before=False)]
        if not written or self._maker(note.args[0], note.versions[0], i) is not None:
            return None  # what it is of runs again, too
        owner = note.args[0]()
        if owner is None or any(each.copy is None for each in written):
            raise Lost
        watcher.busy = True
        found = owner.detach().clone()
        for each in reversed(written):
            assert each.memory is not None
            _, size, stride, offset = each.memory
            found.as_strided(size, stride, offset - owner.storage_offset()).copy_(each.copy)
        watcher.busy = False
        return self._stand(watcher, note.out, found, grad=False)

    @property
    def empty(self) -> bool:
        """Tell whether no operation is known."""
        return not self._steps

    def _makers(self, used: Iterable[tuple[Any, int]], before: int) -> list[int]:
        found = (self._maker(ref, version, before) for ref, version in used)
        return [i for i in found if i is not None]

    def _maker(self, ref: Any, version: int, before: int) -> int | None:
        """Find the operation that gave a tensor as it was used; None for one from outside."""
        operations = self.before.operations
        for i in reversed(self._made.get(id(ref), ())):
            if i < before:
                note = operations[i]
                return i if isinstance(note.out, list) or note.version == version else None
        return None

    def run(self, watcher: TailWatcher) -> list[torch.Tensor]:
        """Call the functions again, in their order.

        Raises:
            Lost: If what they were called with is not there any more.
        """
        values: dict[tuple[int, int], torch.Tensor] = {}
        operations = self.before.operations
        # What is put in the place of a tensor's memory counts for no version.
        lost = {(id(x.args[0]), x.versions[0]) for x in operations if x.func == sets_data}
        steps = [operations[i] for i in self._steps]
        written = {(id(x.args[0]), x.versions[0]) for x in steps if x.in_place}
        copies = {(id(x.args[0]), x.versions[0]): x.copy for x in operations if x.copy is not None}

        def value(ref: Any, version: int) -> torch.Tensor:
            key = (id(ref), version)
            if key in values:
                return values[key]
            if key in copies:
                found = self._stand(watcher, ref, copies[key], grad=_requires(ref), copied=True)
            elif key in lost:
                raise Lost
            else:
                found = self._from_outside(watcher, ref, version, copied=key in written)
            return values.setdefault(key, found)

        for i, note in zip(self._steps, steps, strict=True):
            try:
                versions = iter(note.versions)
                args, kwargs = _given(note, lambda ref: value(ref, next(versions)))  # noqa: B023
                data = self._data(i, watcher, values)
            except Lost:
                # What is there now was written through its ``data`` later.
                owner = self._owners.get(id(note.out), note.out)
                later = any(j > i for j in self._beside.get(id(owner), ()))
                if not later and (x := self._overwritten(note, value, watcher)) is not None:
                    values[id(note.out), note.version] = x
                    continue
                for ref, version in note.made:
                    x = None if ref is None or later else self._kept(ref, version)
                    if x is None:
                        lost.add((id(ref), version))
                        if (marks := self._taint(note, value, watcher)) is not None:
                            self._tainted[id(ref), version] = marks
                        continue
                    values[id(ref), version] = self._stand(
                        watcher, ref, x.detach(), grad=note.grad, lost=True
                    )
                continue
            watcher.called = note.source()
            with _modes(note, args), _kept_as_is(note.func):
                out = note.func(*args, **kwargs) if data is None else data
            if note.func is as_weight or (not note.in_place and is_trained(out)):
                out = self._stand(watcher, note.out, out, grad=note.grad)
            gave = out if isinstance(note.out, list) else [args[0] if note.in_place else out]
            values.update(zip([(id(ref), n) for ref, n in note.made], gave, strict=True))
        watcher.called = None
        return [value(ref, version) for ref, version in self.roots]

    def _overwritten(
        self, note: Note, value: Callable[[Any, int], torch.Tensor], watcher: TailWatcher
    ) -> torch.Tensor | None:
        """Run a write again whose old values are gone, if what it left is bad; else give None.

        Finite numbers stand for the old values, and are not reported.
        """
        target = note.args[0] if note.args else None
        if not note.in_place or type(target) is not weakref.ReferenceType:
            return None
        owner = self._owners.get(id(note.out))
        now = self._kept(note.out, note.version) if owner is None else owner()
        if now is None or not now.is_floating_point():
            return None
        watcher.busy = True
        now = now.detach()
        if owner is not None and note.memory is not None:  # of a view's, what it is a view of
            now = now.as_strided(*note.memory[1:])
        bad = nonfinite(now)
        stand = torch.nan_to_num(now, nan=1.0, posinf=1.0, neginf=-1.0)
        watcher.busy = False
        if not bad:
            return None
        versions = iter(note.versions)

        def take(ref: Any, version: int | None = None) -> torch.Tensor:
            version = next(versions) if version is None else version
            return stand if ref is target else value(ref, version)

        seen, watcher.called = watcher.recorder.records, note.source()
        before = len(seen)
        try:
            args, kwargs = _given(note, take)
            with _modes(note, args), _kept_as_is(note.func):
                note.func(*args, **kwargs)
        except Lost:
            marks = self._taint(note, take, watcher)
            watcher.busy = marks is not None
            stand.copy_(now)
            watcher.busy = False
            if marks is not None:
                self._hand_on(marks, note, stand, watcher)
                return stand
            for record in seen[before:]:  # all that is known is who wrote, and where
                record.raw, record.operands = note.func.__name__, ()
                record.name = "assign" if record.raw in _COPIES else canonical(record.raw)
        for record in seen[before:]:
            record.operands = tuple(
                replace(x, summary=None, value=None) if x.name == "self" else x
                for x in record.operands
            )
        return stand if len(seen) > before else None

    def _hand_on(
        self, marks: set[int], note: Note, stand: torch.Tensor, watcher: TailWatcher
    ) -> None:
        """Say of what was written which records made that bad."""
        recorder, known = watcher.recorder, self._known(note.out)
        for index in marks:
            recorder.mark(stand, index, fresh=False)
        if marks and known is not None and known[0] == "parameter":
            layer, kind = known[1].rpartition(".")[0], measure(stand).kind or "nan"
            recorder.sink(Sink("parameter", layer, known[1], tuple(sorted(marks)), kind))

    def _taint(
        self, note: Note, value: Callable[..., torch.Tensor], watcher: TailWatcher
    ) -> set[int] | None:
        """Give the records by which an operand of a lost result is bad; None where none is."""
        found: set[int] | None = None
        for ref, version in _operands(note):
            marks = self._tainted.get((id(ref), version))
            if marks is None and note.func != data_of:  # what that was is written over by now
                try:
                    x = value(ref, version)
                except Lost:
                    continue
                watcher.busy = True
                bad = x.is_floating_point() and nonfinite(x)
                watcher.busy = False
                marks = set(watcher.recorder.parents(x)) if bad else None
            if marks is not None:
                found = marks | (found or set())
        return found

    def _kept(self, ref: Any, version: int) -> torch.Tensor | None:
        """Give what an operation gave, where that is still there as it was."""
        held = self.before.held.get(id(ref))
        if held is not None and held.version == version:
            return held.value
        x: torch.Tensor | None = ref()
        return x if x is not None and writes(x) == version else None

    def _from_outside(
        self, watcher: TailWatcher, ref: Any, version: int, *, copied: bool
    ) -> torch.Tensor:
        x: torch.Tensor | None
        held = self.before.held.get(id(ref))
        if held is not None and held.version == version:
            x, grad = held.value, held.grad
        else:
            x = ref()
            grad = x is not None and x.requires_grad
        if x is not None and writes(x) != version:
            # The first that is asked for: what was written to it since is noted.
            x, copied = self.remade.pop(id(ref), None), True
        if x is None or is_transformed(x):
            raise Lost
        # A normalisation writes its statistics, and counts that nowhere.
        copied = copied or (not grad and x.nbytes <= SMALL)
        return self._stand(watcher, ref, x, grad=grad, copied=copied)

    def _known(self, ref: Any) -> tuple[External, str] | None:
        """Say where a tensor came from; the ``data`` of a weight is the weight."""
        real = self._owners.get(id(ref), ref)()
        return None if real is None else self.named(real)

    def _stand(
        self, watcher: TailWatcher, ref: Any, x: torch.Tensor, *, grad: bool, copied: bool = False,
        lost: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Give what stands for a tensor from outside: the same values, a graph of its own.

        One that an operation made, of what is not there any more, is not said to have come in.
        """
        with but(watcher, busy=True):  # it is no operation of the program's
            stand = x.detach().clone() if copied else x.detach()
        if grad and (x.is_floating_point() or x.is_complex()):
            stand.requires_grad_()
        known = None if lost else self._known(ref)
        kind, name = known or ("handed" if grad else "unknown", "input")
        if kind != "parameter":
            self.handed.append((name, weakref.ref(x)))
        if stand.layout is torch.strided and not stand.is_meta:
            watcher.recorder.outside.setdefault(storage_number(stand), (kind, name))
            if kind == "handed":
                watcher.hand(stand)
        self.outside.append((name, ref, stand))
        if copied and stand.requires_grad:
            with torch.enable_grad():  # a leaf could not be written to in place
                return stand.clone()
        return stand


class Tails:
    """Compute again what a thread's backward passes began with.

    Args:
        weights: Lists the weights by name.
        buffers: Lists the buffers by name.
        last: Only the last pass is meant.

    Attributes:
        handed: What came in, weakly, by name: another model may have given it.
        models: Runs the models again for a gradient of a backward pass that went through them.
    """

    def __init__(
        self, weights: Callable[[], list[tuple[str, Any]]],
        buffers: Callable[[], Iterable[tuple[str, Any]]], *, last: bool = False,
    ) -> None:  # fmt: skip
        self._weights, self._buffers, self._only_last = weights, buffers, last
        self.handed: list[Handed] = []
        self.models: Callable[[Reading], Replay | None] | None = None
        self._last: tuple[tuple[int, int, str], Pass, Extent] | None = None

    def replay(self, thread: int | None, reading: Reading, prior: Replay | None) -> Replay | None:
        """Compute the loss, or its gradients, again; None where that shows nothing bad.

        Args:
            thread: Number of the thread whose passes they are.
            reading: What is bad.
            prior: What a second run of the models showed that the loss is made of.
        """
        notes = noted.of(thread)
        backward = reading.phase == "backward"
        passes = [] if notes is None else list(notes.passes)
        if self._only_last or not backward or task() != -1:  # it is the one that runs
            passes = passes[-1:]
        changed = self.changed(thread, reading, {}) if backward else None
        if changed is not None:
            return changed
        best, self._last = None, None
        extent: Extent = "gradients" if backward else "loss"
        for found in passes:
            replay = self._again(reading, found, extent, prior=prior)
            # One that only passes on what came in bad, as another pass gave it, is the next best.
            if replay is not None and (best is None or replay.made):
                best, self._last = replay, (_key(reading), found, extent)
                if replay.made:
                    break
        if backward and (best is None or not best.made):
            made = (self._between(reading, found) for found in passes)
            best = next(filter(None, made), best)
        if best is not None and not best.made:
            used = {each.label for record in best.records for each in record.operands}
            given = [b for name, b in self._buffers() if name in used and b in earlier]
            best = self.before(thread, reading, given) or best
        return best

    def _between(self, reading: Reading, found: Pass) -> Replay | None:
        """Compute again the gradients of what came before the models of a pass, and between them.

        Each such part goes on from a finite gradient that came to what a model was called with.
        """
        for ref, version, gradient in found.between:
            if gradient is not None and not nonfinite(gradient):
                part = found.at(ref, version, gradient)
                replay = self._again(reading, part, "gradients")
                if replay is not None and replay.made:
                    self._last = _key(reading), part, "gradients"
                    return replay
        return None

    def before(
        self, thread: int | None, reading: Reading, given: list[torch.Tensor]
    ) -> Replay | None:
        """Compute again what the program handed to a model, where that is bad."""
        notes, self._last = noted.of(thread), None
        if notes is None:
            return None
        for x in filter(nonfinite, given):
            found, known = self._again(reading, notes.begin(x), "forward"), earlier.get(x)
            replay = known if known is not None and not (found and found.made) else found
            if replay is None:
                continue
            # The harm is what the model made of it.
            replay.sinks = [_as_read(sink, reading) for sink in replay.sinks]
            # What is in a weight is no mask: the code wrote it.
            operands = [each for record in replay.records for each in record.operands]
            placed = all(each.source in (None, "constant") for each in operands)
            weight = next((name for name, p in self._weights() if p is x), None)
            if replay.made or (placed and weight):  # not tried: the model would have to go on
                if weight:
                    replay.notes.append(WRITTEN_INTO(name=weight))
                return replay
        return None

    def forget(self) -> None:
        """Leave what was told to a second run of the models."""
        self._last = None

    def changed(
        self, thread: int | None, reading: Reading, remade: dict[int, torch.Tensor]
    ) -> Replay | None:
        """Compute again what the program made of a weight's gradient after the backward pass.

        Args:
            thread: Number of the thread whose backward pass it was.
            reading: What is bad.
            remade: Gradients as the backward pass left them, by the identity of their weights.
        """
        notes = noted.of(thread)
        if notes is None or not reading.site.parameter or task() != -1:
            return None
        weights = [(name, p) for name, p in self._weights() if p.is_leaf and p.grad is not None]
        ended = {id(weakref.ref(p.grad)): remade[id(p)] for _, p in weights if id(p) in remade}
        mine = [p for name, p in weights if name == reading.site.parameter]
        # Of a large one that was written in place no copy is held: others were made alike.
        small = sorted((p for _, p in weights), key=torch.numel)
        for p in [*mine, *small[:ALIKE]] if mine else ():
            if not nonfinite(p.grad):
                continue
            found = notes.begin(p.grad)
            replay = self._again(reading, found, "gradient", remade=ended)
            if replay is not None and replay.made:
                # What was remade is not kept for a trial.
                self._last = None if ended else (_key(reading), found, "gradient")
                for record in replay.records:
                    record.phase, record.direct = "backward", True
                    record.parameter = reading.site.parameter
                return replay
        return None

    def _again(
        self, reading: Reading, found: Pass, extent: Extent, *, prior: Replay | None = None,
        runner: FixRunner | None = None, remade: dict[int, torch.Tensor] | None = None,
    ) -> Replay | None:  # fmt: skip
        tail = Tail(found.noted(), found.roots, self._named, dict(remade or {}))
        gradients = found.gradients if extent == "gradients" else None
        replay = _again(tail, gradients, runner, prior, reading.phase)
        self.handed += tail.handed
        if runner is None and not (replay and replay.made):
            asked = self._asked(reading, tail, found)
            if asked is not None:
                return asked
        if runner is None and replay is not None:
            if not any(x.phase == reading.phase for x in replay.sinks):
                return None
            if not replay.records and not any(sink.parents for sink in replay.sinks):
                return None  # no operation of these made it: what did is not there any more
        return replay

    def _asked(self, reading: Reading, tail: Tail, found: Pass) -> Replay | None:
        """Find what made a gradient bad that came in, which the program had asked for before."""
        bad = {id(ref) for _, ref, stand in tail.outside if nonfinite(stand)}
        bad |= {id(ref) for ref, _ in found.roots if (x := ref()) is not None and nonfinite(x)}
        ended = [each for each in found.passes if each is not found] if bad else []
        for each in reversed(ended):
            if not any(id(ref) in bad for ref in each.gave):
                continue
            gradient = replace(
                reading, site=replace(reading.site, phase="backward", parameter=None)
            )
            replay = self._again(gradient, each, "gradients")
            if replay is None or not replay.made:
                replay = self._between(gradient, each)
            if replay is None and self.models and each is ended[-1]:
                replay = self.models(gradient)
            if replay is not None and replay.made:
                replay.sinks = [_as_read(x, reading) for x in replay.sinks]
                return replay
        return None

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Try repairs: the same operations once more, with these in their place.

        Raises:
            LookupError: If it was not this that told of the reading.
        """
        if self._last is None or self._last[0] != _key(reading):
            raise LookupError
        _, found, extent = self._last
        runner = FixRunner(repairs)
        replay = self._again(reading, found, extent, runner=runner)
        if replay is None or replay.notes or not runner.whole:
            return None
        alone = extent != "gradient" and all(x.numel() == 1 for x in found.living())
        extent = "forward" if extent == "loss" and not alone else extent
        return Attempt(replay, extent, runner.bad, runner.loss if alone else None)

    def _named(self, x: torch.Tensor) -> tuple[External, str] | None:
        name = next((name for name, p in self._weights() if p is x), None)
        if name is not None:
            return "parameter", name
        name = next((name for name, b in self._buffers() if b is x), None)
        if name is not None:
            return "buffer", name
        return None if x.requires_grad else ("input", "target")


def _as_read(sink: Sink, reading: Reading) -> Sink:
    return replace(sink, phase=reading.phase, kind=reading.kind or sink.kind)


def _key(reading: Reading) -> tuple[int, int, str]:
    return reading.step, reading.order, reading.phase


def _again(
    tail: Tail, gradients: list[Any] | None, runner: FixRunner | None, prior: Replay | None,
    phase: Phase,
) -> Replay | None:  # fmt: skip
    if tail.empty:
        return None
    watcher = TailWatcher({})
    seen = watcher.recorder
    if prior is not None:
        seen.records = list(prior.records)
        watcher.before = tuple({i for sink in prior.sinks for i in sink.parents})
    watcher.runner = runner
    watcher.within = _run.__code__
    random = RandomState.now()
    hooks = take_saved_tensors_hooks()
    try:
        with ExitStack() as stack:
            stack.enter_context(replay_context())
            stack.enter_context(unseen())
            stack.enter_context(eager())
            if not _run(tail, watcher, gradients, phase):
                return None
    except Lost:
        return None
    finally:
        give_saved_tensors_hooks(hooks)
        random.restore()
        watcher.forget()
    return Replay(seen.records, seen.sinks, seen.notes)


def _run(tail: Tail, watcher: TailWatcher, gradients: list[Any] | None, phase: Phase) -> bool:
    with Seam(watcher), watcher:
        roots = tail.run(watcher)
        if gradients is None:
            for x in roots:
                watcher.check_sink(phase, None, "loss", x)
            return True
        weak = weakref.ref(watcher)
        leaves = [(name, stand) for name, _, stand in tail.outside if stand.requires_grad]
        for name, stand in leaves:
            stand.register_hook(functools.partial(arrived, weak, None, name, None))
        pairs = [(x, g) for x, g in zip(roots, gradients, strict=True) if x.requires_grad]
        if not pairs or not leaves:
            return False
        # A function of the program's own may reach weights: their gradients are the program's.
        wanted = [x for _, x in leaves]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs], inputs=wanted)
        if watcher.runner is not None:
            found = [x.grad for x in wanted if x.grad is not None]
            watcher.runner.gradient_norm = norm_of(found)
    return True


def _operands(note: Note) -> Iterator[tuple[Any, int]]:
    """Walk the tensors that an operation took."""
    refs: list[Any] = []
    _given(note, refs.append)
    yield from zip(refs, note.versions, strict=True)


def _given(note: Note, value: Callable[[Any], Any]) -> Any:
    """Give an operation's arguments, and those by name, with tensors from the references."""
    return _filled(value, [note.args, note.kwargs or {}])


def _filled(value: Callable[[Any], Any], x: Any) -> Any:
    """Put tensors in the place of references to them."""
    kind = type(x)
    if kind is weakref.ReferenceType:
        return value(x)
    if kind in (tuple, list):
        return kind([_filled(value, item) for item in x])
    if kind is dict:
        return {key: _filled(value, item) for key, item in x.items()}
    return x


def _requires(ref: Any) -> bool:
    x = ref()
    return x is not None and bool(x.requires_grad)


@contextmanager
def _kept_as_is(fn: Any) -> Iterator[None]:
    """Leave all that a function of the program's own reaches as it is."""
    fn = inspect.unwrap(fn.made) if isinstance(fn, Transformed) else fn
    if not isinstance(fn, FunctionType) or is_library(fn.__code__.co_filename):
        yield
        return
    put_back = reached_by(fn).hold()
    try:
        with noted.unread():
            yield
    finally:
        put_back()


@contextmanager
def _modes(note: Note, args: list[Any]) -> Iterator[None]:
    """Enter the grad mode and the casts that an operation ran under."""
    # Its result needs a gradient, yet it ran without one: a weight is not written to otherwise.
    weight = note.in_place and args[0].is_leaf and args[0].requires_grad
    with ExitStack() as stack:
        for device, dtype in note.autocast.items():
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        stack.enter_context(torch.set_grad_enabled(note.grad and not weight))
        yield
