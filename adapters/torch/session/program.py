"""A program without modules: each backward pass over its own tensors is a step."""

import inspect
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from os.path import basename
from traceback import walk_stack
from typing import Any

import torch

from anynan._arrays.containers import shown
from anynan._base import tracebacks
from anynan._base.identity import SetByIdentity
from anynan._base.messages import slug_of
from anynan._base.sources import is_library, user_source
from anynan._base.summary import Summary
from anynan._diagnosis.evidence import BadParameter, ReplayError
from anynan._diagnosis.lineage import Replay, trace
from anynan._diagnosis.rules.repair import Repair
from anynan._diagnosis.trials import Attempt
from anynan._everywhere import Found
from anynan._readings.readings import Reading
from anynan._readings.step import Step
from anynan._steps.adapter import BaseAdapter
from anynan._steps.failures import names_bad
from anynan._steps.messages import METRIC_BAD
from anynan._steps.tracked import Tracked
from anynan.options import Options
from anynan.torch.call import noted
from anynan.torch.call.note import Note, is_trained
from anynan.torch.call.noted import Notes, Pass
from anynan.torch.messages import GONE, READ_BAD
from anynan.torch.private import foreach_norm, storage_number
from anynan.torch.read import probes
from anynan.torch.read.probes import DTYPE_NAME, measure, nonfinite, read_ends, same_memory
from anynan.torch.read.slots import site_of
from anynan.torch.replay.tail import Tails
from anynan.torch.step.steps import last_pass
from anynan.torch.update.updates import watching
from anynan.torch.weights.scalers import in_sight, in_use, scales
from anynan.tracker import begin

NAME = "the program"
# Where distributions refuse their arguments.
_CHECKS = inspect.getfile(torch.distributions.Distribution)
_WORDS = {"nan": "NaN", "posinf": "+Inf", "neginf": "-Inf"}
# So many lines that read numbers which are bad are looked into.
MOST = 3
Suspect = tuple[Reading, torch.Tensor, Any]


class Program(BaseAdapter):
    """Read the losses and gradients of backward passes that no watched model has a part in."""

    backend = "torch"
    probes = probes

    def __init__(self, tracker: Tracked) -> None:
        super().__init__(tracker)
        self.tails = Tails(self.weights, _buffers, last=True)
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._names: dict[int, str] = {}

    # What is asked when something is bad.

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """List the tensors that gradients came to, by the names that the program has for them."""
        living = [x for ref in list(self._leaves.values()) if (x := ref()) is not None]
        unknown = [x for x in living if id(x) not in self._names]
        if unknown:
            found = names_of(unknown)
            for i, x in enumerate(living):
                self._names.setdefault(id(x), found.get(id(x), f"weight {i}"))
        return [(self._names[id(x)], x) for x in living]

    def bad_parameters(self) -> list[BadParameter]:
        """List those that hold a NaN or an Inf."""
        return [
            BadParameter(name, "", measure(x), held=False)
            for name, x in self.weights()
            if nonfinite(x)
        ]

    def replay(self, reading: Reading) -> Replay:
        """Compute what is bad again, from what was noted."""
        found = self.tails.replay(None, reading, None)
        if found is None or not found.made:  # a weight may have been written by hand
            weights = sorted((x for _, x in self.weights()), key=torch.numel)
            found = self.tails.before(None, reading, weights) or found
        if found is None:
            raise ReplayError(GONE())
        return found

    def attempt(self, reading: Reading, repairs: Sequence[Repair]) -> Attempt | None:
        """Compute it once more with operations repaired."""
        return self.tails.attempt(reading, repairs)

    def memory(self, value: Any) -> Callable[[Any], bool] | None:
        """Tell whether another tensor is of the same storage."""
        return same_memory(value)

    # Steps.

    def ended(self, notes: Notes, found: Pass, out: Any) -> None:
        """Read a backward pass that has ended."""
        judge = self.tracker.judge
        rows = judge.rows()
        try:
            for x in found.living():
                if x.numel() == 1 and x.dtype in DTYPE_NAME:
                    self._read(rows, x.detach(), "loss", "loss", None)
            if out is None:
                self._gradients(rows, notes)
            elif rows.failed is None:
                for x in out:
                    if isinstance(x, torch.Tensor) and nonfinite(x):
                        self._read(rows, x, "backward", "grad", None)
                        break
        finally:
            self._close(rows)

    def beside(self, free: dict[int, "weakref.ref[torch.Tensor]"]) -> None:
        """Read the gradients of weights beside models, one of which is bad."""
        self._leaves |= free
        rows = self.tracker.judge.rows()
        try:
            self._bad_gradient(rows)
        finally:
            self._close(rows)

    def reading(self, x: torch.Tensor) -> Reading:
        """Give what would be read of a loss, or of a value: one without a graph trains nothing."""
        rows = self.tracker.judge.rows()
        name = "loss" if x.numel() == 1 and x.requires_grad else "value"
        site = site_of(self.tracker.judge.monitor, None, "loss", name, x)
        return Reading(rows.number, len(rows.lo), 0, site, *read_ends(x.detach()))

    def settle(self, reading: Reading, x: torch.Tensor, seen: Replay | None) -> None:
        """Judge what was read, and what was found of it then."""
        judge = self.tracker.judge
        rows = judge.rows()
        rows.add(reading.site, 0, reading.lo or math.nan, reading.hi or math.nan)
        try:
            judge.flag(rows, rows.last, x, replayed=seen)
        finally:
            self._close(rows)

    def _close(self, rows: Step) -> None:
        judge = self.tracker.judge
        if judge.close_step() is not None:
            rows.mark_judged()  # each reading was, as it was written
            judge.settle(rows)
            if rows.failed is not None:  # no update of a program of its own is seen
                judge.applied_bad_update(rows)

    def _read(
        self, rows: Step, x: torch.Tensor, phase: Any, tensor: str, parameter: str | None
    ) -> None:
        site = site_of(self.tracker.judge.monitor, None, phase, tensor, x, parameter)
        lo, hi = read_ends(x)
        rows.add(site, 0, lo, hi)
        if not (-site.limit <= lo and hi <= site.limit):
            self.tracker.judge.flag(rows, rows.last, x)

    def _gradients(self, rows: Step, notes: Notes) -> None:
        """Look at the gradients of what the noted operations took, in one read."""
        leaves = self._leaves
        for ref in notes.taken():
            x = ref()
            if is_trained(x):
                leaves[id(x)] = ref
        for key in [key for key, ref in leaves.items() if ref() is None]:
            del leaves[key]
            self._names.pop(key, None)
        if rows.failed is None and spoilt(leaves):
            self._bad_gradient(rows)

    def _bad_gradient(self, rows: Step) -> None:
        """Read the first gradient that is bad."""
        for name, x in self.weights():
            if x.grad is not None and nonfinite(x.grad):
                self._read(rows, x.grad, "backward", f"grad of {name}", name)
                return


class _Program(Tracked):
    """Track what is neither a model nor a function."""

    anywhere = True

    @property
    def target(self) -> str:
        """Say what it is."""
        return NAME


class Watch:
    """See to the passes and the losses that nobody else reads.

    Args:
        options: As for ``track``.
        found: Is given the tracker of the program, once there is something to read.
    """

    def __init__(self, options: Options, found: Found) -> None:
        self._options, self._found = options, found
        self._adapter: Program | None = None
        self._suspect: Suspect | None = None
        self._passes = 0
        self._looked: dict[Any, Suspect | None] = {}
        self._optimizers: SetByIdentity[torch.optim.Optimizer] = SetByIdentity()
        self._beside = False  # whether models read the pass, and the free weights are to be read
        self._free: dict[int, weakref.ref[torch.Tensor]] = {}

    def program(self) -> Program:
        """Give what reads the program itself."""
        if self._adapter is None:
            tracker = _Program(Watch.program, self._options, NAME)
            self._adapter = Program(tracker)
            begin(tracker, self._adapter)
            tracker.judge.steps.since_the_start()
            self._found.add(tracker)
        return self._adapter

    def around(self, notes: Notes, found: Pass, begins: bool, out: Any) -> None:
        """Read a backward pass, where no watched model did."""
        if begins:
            found.before, self._suspect = last_pass(), None
            self._passes += 1
            often = self._passes <= noted.OFTEN or self._passes.bit_count() == 1
            if often and notes.writes and not self._found.bad():
                self._written(notes, notes.notes)
            return
        for each in watching():
            each.passed()
        if _in_step() or in_use(scales()) or in_sight():
            return
        self._beside = found.before != last_pass()
        if self._beside:
            self._find_free(notes)
            if out is None and not any(each.optimizers.exist() for each in watching()):
                self.before()
            return
        # Beside models it is told of what is bad alone: compiled code hides calls of theirs.
        if self._adapter is not None or not watching() or _is_bad(found):
            self._count()
            self.program().ended(notes, found, out)

    def _find_free(self, notes: Notes) -> None:
        """Find the weights that no model has; none of a model's is referred to after it."""
        for key in [key for key, ref in self._free.items() if ref() is None]:
            del self._free[key]
        refs = {id(x): ref for ref in (*notes.leaves, *notes.taken()) if is_trained(x := ref())}
        notes.leaves.clear()
        if refs.keys() - self._free.keys():
            self._free |= refs
            for p in (p for each in watching() for _, p in each.models.parameters()):
                self._free.pop(id(p), None)

    def before(self) -> None:
        """Read the gradients of weights that no model has, after a pass that models have read."""
        beside, self._beside = self._beside, False
        if not (beside and spoilt(self._free)):
            return
        if not any(step.failed is not None for step in _steps()):
            self._count()
            self.program().beside(self._free)

    def _count(self) -> None:
        """Number the program's step like that of the models beside it."""
        for step in _steps()[-1:]:
            self.program().tracker.judge.steps.count_to(step)

    def loss(self, notes: Notes, x: torch.Tensor, picked: bool) -> None:
        """Take up what is bad as the program looks at it: it may be a loss, or a measure.

        It is told as the program ends, unless a backward pass comes after it: then it was a
        measure that did no harm, or is told of that pass. What is looked at in the same line again
        is not looked into again.

        Args:
            notes: What was noted.
            x: The number, or what the program asked for NaN.
            picked: The program only picks of it, as its largest: it is told at once.
        """
        graph = x.requires_grad and x.grad_fn is not None
        if ((x.numel() != 1 or picked) and not _holds_nan(x)) or _in_step():
            return  # of many, some may be infinite on purpose
        if not nonfinite(x) or self._found.bad():
            return
        if picked:
            if _made((found := self._look(notes, x))[2]):
                self.program().settle(*found)
            return
        line = user_source()
        where = None if line is None else (line.file, line.line)
        if where not in self._looked and len(self._looked) < MOST:
            found = self._look(notes, x)
            self._looked[where] = found if graph or _computed(*found) else None
        if self._suspect is None:  # what is read later may be made of it
            self._suspect = self._looked.get(where)

    def _look(self, notes: Notes, x: torch.Tensor) -> Suspect:
        """Find out at once what led to it: it may be gone later."""
        program, found = self.program(), notes.begin(x)
        notes.passes.append(found)
        reading = program.reading(x)
        try:
            return reading, x.detach(), program.tails.replay(None, reading, None)
        finally:
            notes.passes.remove(found)

    def _over(self, notes: Notes, error: BaseException) -> Suspect | None:
        """Find what the program ended over, if that was bad."""
        for x, named in itertools.islice(_ended_over(error, notes), MOST):
            found = self._look(notes, x)
            if named or _made(found[2]):
                return found
        return None

    def finish(self) -> None:
        """Say what is bad as the program ends, where nothing was said of it."""
        notes, error = noted.of(), self._found.ended_by
        if notes is not None and not self._found.bad():
            found = None if error is None else self._over(notes, error)
            if found is not None:
                self._suspect = found
            elif any(slug_of(n) == METRIC_BAD.slug for t in self._found.living() for n in t.notes):
                self._suspect = None  # a trainer read that
            if self._suspect is not None:
                self.program().settle(*self._suspect)
        self._suspect = None
        self._weights()
        if not self._found.bad():
            self._state()
        if notes is not None and not self._found.bad() and not self._found.harms:
            self._written(notes, [*notes.before, *notes.notes], over=True)
        if not self._found.bad() and not self._found.harms:
            self._read()

    def _written(self, notes: Notes, operations: list[Any], *, over: bool = False) -> None:
        """Tell of a weight that the program wrote by hand in a model that never runs.

        Such is an average of weights. What a library writes, as Keras its metrics, is its own.

        Args:
            notes: What was noted.
            operations: What to look through of it.
            over: The program is over: tell of what no operation made, too.
        """
        weights: dict[int, torch.Tensor] = {}  # by their memory: a view of it may be written to
        written: dict[int, tuple[torch.Tensor, Note]] = {}
        for note in (Note(*each) for each in operations):
            ref = note.args[0] if note.args else None
            x: Any = ref() if type(ref) is weakref.ReferenceType else None
            if isinstance(x, torch.nn.Parameter) and x.layout is torch.strided:
                weights[storage_number(x)] = x
            elif note.memory is not None:
                x = weights.get(note.memory.storage)
            if x is not None and note.in_place and note.around is None and x.is_floating_point():
                written[id(x)] = x, note
        if not written or finite_norms([x.detach() for x, _ in written.values()]):
            return
        mine = {id(p) for each in watching() for _, p in each.models.parameters()}
        for x, note in written.values():
            if id(x) not in mine and nonfinite(x):
                found, at = self._look(notes, x), note.source()
                if _made(found[2]):
                    self.program().settle(*found)
                elif over and at is not None:
                    self._harm(f"a weight that {at.place} writes", measure(x))
                return

    def _read(self) -> None:
        """Say which bad numbers the program read on its way: it may have kept them, as a metric."""
        for where, suspect in self._looked.items():
            seen = None if suspect is None else suspect[2]
            origin = trace(seen.records, seen.sinks).origin if seen and _made(seen) else None
            if where and suspect and origin and origin.source:
                at, kind = origin.source, _WORDS[suspect[0].kind or "nan"]
                places = [f"{basename(file)}:{line}" for file, line in (where, (at.file, at.line))]
                note = READ_BAD(kind=kind, where=places[0], name=origin.name, source=places[1])
                self.program().tracker.judge.say(note)

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that updated."""
        self._optimizers.add(optimizer)

    def _state(self) -> None:
        """Say what optimizers keep for the next update that is bad."""
        own = [] if self._adapter is None else self._adapter.weights()
        models = (each.models.parameters() for each in watching())
        names = {id(p): name for name, p in itertools.chain(own, *models)}
        for optimizer in list(self._optimizers):
            bad = [
                (key, p, x)
                for p, kept in optimizer.state.items()
                for key, x in (kept.items() if isinstance(kept, dict) else ())
                if isinstance(x, torch.Tensor) and x.shape == p.shape and nonfinite(x)
            ]
            for key, p, x in bad[:1]:
                name = names.get(id(p), "a weight")
                self._harm(f"{type(optimizer).__name__}'s {key} of {name}{_more(bad)}", measure(x))

    def _weights(self) -> None:
        for each in watching():
            tracker = each.tracker
            if self._found.has(tracker) and not tracker.count("bad"):
                bad = [item for item in each.steps.weights.bad() if not item.buffer]
                self._first(bad, f"{tracker.name}: ")
        program = self._adapter
        if program is not None and not program.tracker.count("bad"):
            self._first(program.bad_parameters())

    def _first(self, bad: list[BadParameter], of: str = "") -> None:
        for item in bad[:1]:
            self._harm(f"{of}{item.name}{_more(bad)}", item.summary)

    def _harm(self, name: str, summary: Summary) -> None:
        self._found.harm(f"{name} holds {_WORDS[summary.kind or 'nan']} as the program ends")


def _steps() -> list[Step]:
    """List the open steps of the models that are watched."""
    rows = (each.steps.threads.state().rows for each in watching())
    return [step for step in rows if step is not None]


def _buffers() -> Iterator[tuple[str, torch.Tensor]]:
    for each in watching():
        yield from each.models.buffers()


def spoilt(weights: dict[int, "weakref.ref[torch.Tensor]"]) -> bool:
    """Tell, in one read, whether any of these has a bad gradient."""
    grads = [x.grad for ref in weights.values() if (x := ref()) is not None]
    found = [g for g in grads if g is not None and g.layout is torch.strided]
    return bool(found) and not finite_norms(found)


def finite_norms(tensors: list[torch.Tensor]) -> bool:
    """Tell, in one read, whether the norms of all are finite."""
    with torch.no_grad():
        norms = foreach_norm(tensors, 2, None)
        return math.isfinite(sum(torch.stack([n.float() for n in norms]).tolist()))


def _more(bad: list[Any]) -> str:
    return f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""


def _computed(reading: Reading, x: torch.Tensor, seen: Replay | None) -> bool:
    """Tell whether a value without a graph was computed, and not there from the beginning."""
    if reading.kind == "nan" and x.numel() == 1:
        return seen is not None
    return _made(seen)


def _made(seen: Replay | None) -> bool:
    """Tell whether a second run showed an operation that made it."""
    return seen is not None and seen.made and any(x.name != "constant" for x in seen.records)


def _ended_over(error: BaseException, notes: Notes) -> Iterator[tuple[torch.Tensor, bool]]:
    """Walk the bad tensors that the program may have ended over, and tell whether it says so.

    These are what an operation refused, what library code holds that raised, and what such a tensor
    was made of: an index made of NaN is a number, and no message names it. The program's own
    variables have a part in it only where NaN or Inf is named.
    """
    named, through = names_bad(error), tracebacks.frames(error)
    words, given = notes.refused
    by_value = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
    given = given if words in map(repr, _chain(error)) else []
    for each in reversed(through):
        file = each.tb_frame.f_code.co_filename
        if not (named or is_library(file)):
            break
        by_value = by_value or file == _CHECKS
        scope = list(each.tb_frame.f_locals.items())
        given = given + [x for name, value in scope for _, x in _inside(name, value)]
    given = [x for x in given if type(x) is torch.Tensor]
    for look in filter(None, (_holds_nan, nonfinite if by_value else None)):
        yield from ((x, named) for x in given if look(x))
        yield from ((x, False) for each in given for x in notes.behind(each) if look(x))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Walk an exception and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _holds_nan(x: Any) -> bool:
    if type(x) is not torch.Tensor or x.dtype not in DTYPE_NAME or not x.numel():
        return False
    return bool(math.isnan(read_ends(x.detach())[0]))


def _is_bad(found: Pass) -> bool:
    """Tell whether a pass began with a bad number."""
    return any(x.numel() == 1 and nonfinite(x.detach()) for x in found.living())


def _in_step() -> bool:
    """Tell whether a step of the program's own runs, or a batch of Keras's: it reads all of it."""
    states = (each.steps.threads.state() for each in watching())
    return any(state.in_step and state.depth for state in states)


def names_of(tensors: list[torch.Tensor]) -> dict[int, str]:
    """Give the names of tensors in the functions that run now."""
    wanted = {id(x) for x in tensors}
    found: dict[int, str] = {}
    for frame, _ in walk_stack(sys._getframe(1)):
        if len(found) == len(wanted):
            break
        if not is_library(frame.f_code.co_filename):
            for scope in (tracebacks.variables(frame), frame.f_globals):
                for name, value in list(scope.items()):
                    for path, item in _inside(name, value):
                        if id(item) in wanted:
                            found.setdefault(id(item), path)
    return found


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    kind = type(value)
    if kind in (list, tuple):
        return [(f"{name}[{i}]", item) for i, item in enumerate(value[:100])]
    if kind is dict:
        return [(f"{name}[{shown(key)}]", item) for key, item in list(value.items())[:100]]
    return [(name, value)]
