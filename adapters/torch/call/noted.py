"""What a program computes outside of its models: each operation, its operands and its line.

A function mode notes them, and is away while a model, an optimizer, a backward pass or compiled
code runs. Tensors are held weakly, and by value only where they are small: what an operation gave
can be computed again. Two passes back nothing is held at all.
"""

import copy
import functools
import inspect
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, NamedTuple

import torch

from anynan._base.identity import ByIdentity
from anynan._base.imports import when_imported
from anynan.errors import AnomalyError
from anynan.torch.call.kinds import (
    ASKED,
    DRAWN,
    GRAD,
    KINDS,
    PASS,
    PICKS,
    READ,
    SKIP,
    WRITES,
    kind_of,
)
from anynan.torch.call.note import (
    CODES,
    LONG,
    PLAINS,
    Held,
    Memory,
    Note,
    Noted,
    Transformed,
    is_users,
    leaves,
    place_of,
    several,
    split,
    weakly,
)
from anynan.torch.private import (
    EVALUATION,
    FunctionMode,
    casts,
    function_modes,
    is_casting,
    stand_before_compiled,
    writes,
)

# Bytes of one tensor, and of all, whose values are held until the pass after the next.
SMALL = 2**20
HELD = 2**24
# A tensor that is written in place is copied before, if it has a share of the bytes that are left.
COPIED, SHARE = 2**23, 16
# A larger one that lives long, as an average of weights, is copied before so many writes.
LITTLE, WRITTEN = 2**12, 256
# So many operations are noted between two backward passes.
MOST = 2**13
# Behind so many times, what NaN may stay in or end in is looked at ever more seldom.
OFTEN = 16
# So many backward passes are kept until an update.
PASSES = 4
_ARRAYS = 1 << 16  # elements of an array that is taken from a tensor without a copy, and looked at
_ASKS = frozenset({"isnan", "isinf", "isfinite"})
_COMPARES = frozenset({"lt", "gt", "le", "ge"})
# From an answer to what was asked there are so few operations, and so few others in between.
_HOPS, _RECENT = 4, 16

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_ref = weakref.ref
_getframe = sys._getframe


class Pass:
    """Hold what a backward pass began with.

    Attributes:
        roots: What it was asked for, the loss mostly: weakly, with the versions of these.
        gradients: What was given for them.
        before: Which pass had been read when it began.
        gave: The gradients that the program asked for, weakly.
        between: The gradients of what the program computed and called models with: weakly what,
            how often that had been written to, and the gradient; None for one that is not held.
        passes: It, and those beside it that are kept.
    """

    __slots__ = (
        "__weakref__", "_notes", "before", "between", "gave", "gradients", "passes", "roots",
    )  # fmt: skip

    def __init__(self, roots: list[tuple[Any, int]], gradients: list[Any], notes: "Notes") -> None:
        self.roots, self.gradients, self.before = roots, gradients, -1
        self.gave: list[Any] = []
        self.between: list[tuple[Any, int, torch.Tensor | None]] = []
        self.passes = notes.passes
        # The lists are the thread's own, and go on: this is how far they had come.
        self._notes = notes.before, notes.notes, len(notes.notes), notes.held_before, notes.held

    def at(self, ref: Any, version: int, gradient: torch.Tensor) -> "Pass":
        """Give the part of it that goes on from a tensor, by the gradient that came there."""
        part = copy.copy(self)
        part.roots, part.gradients = [(ref, version)], [gradient]
        return part

    def living(self) -> list[torch.Tensor]:
        """List what it was asked for, as far as that is there."""
        return [x for ref, _ in self.roots if (x := ref()) is not None]

    def noted(self) -> "Noted":
        """Give what had been noted."""
        before, notes, count, held_before, held = self._notes
        old, new = (
            [one for each in part for one in split(Note(*each))] for part in (before, notes[:count])
        )
        return Noted(old + new, {**held_before, **held}, len(old))


class Notes(FunctionMode):
    """Note one thread's operations.

    Attributes:
        passes: The last backward passes.
        around: Called with each backward pass: before it with True, and behind it with False, and
            with what it gave.
        inside: How many passes and calls run in which nothing is noted.
        refused: The exception that an operation raised last, in words, and the tensors that
            the operation was given, small ones alone.
        reads: Called with a tensor that is bad as the program looks at its value, or picks of it.
        writes: Whether an operation wrote to anything since the last pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = False
        self.refused: tuple[str, list[torch.Tensor]] = "", []
        # As plain tuples: a Note takes longer to make.
        self.notes: list[Any] = []
        self.before: list[Any] = []
        # Values that no operation can give again, by the identity of their weak references.
        self.held: dict[int, Held] = {}
        self.held_before: dict[int, Held] = {}
        self.passes: deque[Pass] = deque(maxlen=PASSES)
        self.around: Callable[[Notes, Pass, bool, Any], None] | None = None
        self.reads: Callable[[Notes, torch.Tensor, bool], None] | None = None
        self._bytes = self._copied = self.inside = 0
        self._compiled = 0
        self.writes = False
        # What the program trains and calls models with.
        self.leaves: deque[Any] = deque(maxlen=LONG)
        self._picks: dict[Any, int] = {}
        self._wrote: ByIdentity[torch.Tensor, int] = ByIdentity()
        # Gradients that the program asked for since the last pass or update.
        self._gradients: deque[Any] = deque(maxlen=LONG)

    # In and out.

    def put(self) -> None:
        """Begin to note, or go on."""
        if self.ended or self._compiled or self.inside:
            return
        modes = function_modes
        if not modes.count():
            modes.push(self)
        elif not modes.has(self):
            modes.insert(self)

    def take(self) -> bool:
        """Note no more; tell whether it did."""
        return not self.inside and function_modes.remove(self)

    def compiled(self, begins: bool, number: int) -> None:
        """Stay away from compiled code, whose guards would see the mode."""
        if begins and not self._compiled and self.take():
            self._compiled = number
        elif not begins and self._compiled == number:
            self._compiled = 0
            self.put()

    def end(self) -> None:
        """Note nothing any more."""
        self.take()
        self.ended = True
        self.forget()

    # Each operation.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = KINDS.get(func)
        if kind is None:
            kind = kind_of(func)
        if kind == SKIP:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind <= PICKS:
            try:
                out = func(*args, **kwargs) if kwargs else func(*args)
            except Exception as error:
                self._refuse(error, args, kwargs)
                raise
            if type(out) is not _Tensor and not isinstance(out, tuple | list):
                return out
            try:
                taken: list[Any] = []
                versions: list[int] = []
                for x in args:
                    what = type(x)
                    if what is _Tensor or what is _Parameter:
                        taken.append(_ref(x))
                        versions.append(writes(x))
                    elif what in PLAINS:
                        taken.append(x)
                    else:
                        taken.append(weakly(x, versions))
                if kwargs:
                    kwargs = {
                        name: x if type(x) in PLAINS else weakly(x, versions)
                        for name, x in kwargs.items()
                        if name != "out"  # what it gives is that
                    }
                frame = _getframe(1)
                code, last = frame.f_code, frame.f_lasti
                around = None
                if not CODES.get(code):
                    code, last, around = place_of(frame)
                if type(out) is _Tensor:  # spelt out: to spread a tuple takes as long as half of it
                    made, count, grad = _ref(out), writes(out), out.requires_grad
                else:
                    made, count, grad = several(out)
                self.notes.append(
                    (
                        func, taken, kwargs, versions, code, last, around,
                        casts() if is_casting() else {}, made, count, grad, None,
                    )
                )  # fmt: skip
            except Exception:  # noqa: BLE001  it is as if what it gave came from outside
                for x in [out] if type(out) is _Tensor else out:
                    if type(x) is _Tensor:
                        self.hold(x)
                return out
            if kind == PICKS:
                self._picked(args, (code, last))
            if len(self.notes) > MOST:
                self._turn()
            return out
        if kind == PASS:
            return self._pass(func, args, kwargs or {})
        if kind == READ:
            return self._read(func, args, kwargs or {})
        if kind == GRAD and args[1] is not None and type(args[0].grad) is _Tensor:
            self.hold(args[0].grad)  # what another gradient is made of goes as that one comes
        if kind == ASKED:
            return self._ask(func(*args))
        try:
            if kind == WRITES:
                return self._write(func, args, kwargs or {})
            out = func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            self._refuse(error, args, kwargs)
            raise
        if kind == DRAWN and type(out) is _Tensor:
            self.hold(out)
        return out

    def _ask(self, gradient: Any) -> Any:
        if type(gradient) is _Tensor:
            self._gradients.append(_ref(gradient))
        return gradient

    def _refuse(self, error: Exception, args: tuple[Any, ...], kwargs: Any) -> None:
        """Keep what an operation raised an exception over: it may be bad, whatever that says."""
        given = [x for x in leaves((args, kwargs or {})) if type(x) in (_Tensor, _Parameter)]
        self.refused = repr(error), [x for x in given if x.nbytes <= SMALL]

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an operation that writes to its first operand, or to each of a list."""
        note: Any = None
        x: Any = args[0] if args else None
        many = isinstance(x, tuple | list)
        try:
            if many or type(x) in (_Tensor, _Parameter):
                versions: list[int] = []
                taken = [weakly(item, versions) for item in args]
                named = {name: weakly(item, versions) for name, item in kwargs.items()}
                autocast = casts() if is_casting() else {}
                note = (func, taken, named, versions, *place_of(_getframe(2)), autocast, taken[0])
                copy = [self._copy(item) for item in x] if many else self._copy(x)
                memory = Memory.of(x) if type(x) is _Tensor else None  # a weight is no view
        except Exception:  # noqa: BLE001
            note = None
        out = func(*args, **kwargs)
        if note is not None:
            version = [writes(item) for item in x] if many else writes(x)
            self.notes.append((*note, version, not many and x.requires_grad, copy, memory))
            self.writes = True
        elif type(x) is _Tensor:  # by an index of NumPy's: what it gave is as if from outside
            self.hold(x)
        return out

    def _copy(self, x: torch.Tensor) -> torch.Tensor | None:
        """Copy what is written to, if it is small."""
        if self._copied + SHARE * x.nbytes > COPIED:
            return None
        if x.nbytes > LITTLE:
            count = self._wrote[x] = self._wrote.get(x, 0) + 1
            if count > WRITTEN:
                return None
        self._copied += x.nbytes
        return x.detach().clone()

    def hold(self, x: torch.Tensor, *, copied: bool = False) -> None:
        """Hold the value of a small tensor that no noted operation gives again."""
        try:
            size = x.nbytes
            if size <= SMALL and self._bytes + size <= HELD:
                self._bytes += size
                ref = _ref(x)
                value = x.detach().clone() if copied else x.detach()
                self.held[id(ref)] = Held(ref, writes(x), x.requires_grad, value)
        except Exception:  # noqa: BLE001, S110  one that has no such value
            pass

    def _turn(self) -> None:
        """Let go of what was noted before the last pass."""
        self.before, self.notes = self.notes, []
        self.held_before, self.held = self.held, {}
        self._bytes = self._copied = 0
        self.writes = False
        self._gradients.clear()

    def hold_gradients(self) -> None:
        """Hold the gradients that operations took, before they are set to none."""
        if self._gradients:
            taken = {id(ref) for ref in self.taken()}
            for ref in self._gradients:
                x = ref() if id(ref) in taken and id(ref) not in self.held else None
                if x is not None:
                    self.hold(x)
            self._gradients.clear()

    def forget(self) -> None:
        """Let go of everything."""
        self._turn()
        self._turn()
        self.passes.clear()

    def applied(
        self, run: Callable[..., Any], again: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:  # fmt: skip
        """Note a call of the program's own function as one operation, unless it writes in place."""
        note: Any = None
        versions: list[int] = []
        with suppress(Exception):  # it may hold what is not to be held
            taken = [weakly(x, versions) for x in args]
            named = {name: weakly(x, versions) for name, x in kwargs.items()}
            autocast = casts() if is_casting() else {}
            note = (again, taken, named, versions, *place_of(frame), autocast)
        self.take()
        try:
            out = run(*args, **kwargs)
        finally:
            self.put()
        if note is not None:
            with suppress(Exception):  # of inference mode
                after: list[int] = []
                for x in (*args, *kwargs.values()):
                    weakly(x, after)
                gave: Any = tuple(leaves(out)) if type(again) is Transformed else out
                one = type(gave) in (_Tensor, _Parameter)
                made = (_ref(gave), writes(gave), gave.requires_grad) if one else several(gave)
                if after == versions:
                    self.notes.append((*note, *made, None))
        return out

    # Backward passes.

    def _pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            found = self._begun(args, kwargs)
        except Exception:  # noqa: BLE001  nothing is told of it then
            found = None
        self.inside += 1
        told = self.around is not None
        try:
            if told:
                self._tell(found, True, None)
            out = func(*args, **kwargs)
            if told:
                self._tell(found, False, out)
        finally:
            self.inside -= 1
        if isinstance(out, tuple):
            for x in out:
                if type(x) is _Tensor:
                    self.hold(x)
                    if found is not None:
                        found.gave.append(_ref(x))
        else:
            self._turn()
        return out

    def _tell(self, found: Pass | None, begins: bool, out: Any) -> None:
        if found is None or self.around is None:
            return
        try:
            self.around(self, found, begins, out)
        except AnomalyError as error:
            # The user's stack is what matters, not the way through the core.
            raise error.with_traceback(None) from None
        except Exception:  # noqa: BLE001  the program is not to fail by ours
            return

    def begin(self, x: torch.Tensor) -> Pass:
        """Take up a tensor as a backward pass that begins with it would be."""
        self.hold(x)
        return Pass([(_ref(x), writes(x))], [None], self)

    def entered(self, ref: Any, version: int, gradient: torch.Tensor) -> None:
        """Note the gradient that comes to what a model was called with; hold it if it is small."""
        if not self.passes:
            return
        size = gradient.nbytes
        small = size <= SMALL and self._bytes + size <= HELD
        self._bytes += size if small else 0
        self.passes[-1].between.append((ref, version, gradient.detach() if small else None))

    def taken(self) -> Iterator[Any]:
        """Walk what the operations since the last pass took, weakly."""
        for note in self.notes:
            for x in note[1]:
                if type(x) is weakref.ReferenceType:
                    yield x

    def behind(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Walk what a tensor was made of, as far as it is there, the nearest first."""
        refs = {id(_ref(x))}
        for note in (Note(*each) for each in reversed([*self.before, *self.notes])):
            if any(id(ref) in refs for ref, _ in note.made):
                for ref in leaves((note.args, note.kwargs or {})):
                    if type(ref) is weakref.ReferenceType:
                        refs.add(id(ref))
                        if (found := ref()) is not None:
                            yield found

    # What the program looks at.

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See a bad value that becomes a number, an answer or text."""
        out = func(*args, **kwargs)
        if self.reads is None or self.inside:
            return out
        kind = type(out)
        x = args[0] if args else None
        if kind is float:
            bad = out - out != 0
        elif kind is bool:
            x = self._asked(x)
            bad = x is not None
        elif kind is str:
            bad = "nan" in out or "inf" in out
        else:
            bad = kind is list or getattr(out, "size", math.inf) <= _ARRAYS  # looked at below
        if bad and type(x) is _Tensor:
            self._look(x, picked=False)
        return out

    def _look(self, x: torch.Tensor, *, picked: bool) -> None:
        self.inside += 1
        try:
            assert self.reads is not None
            self.reads(self, x, picked)
        except AnomalyError as error:
            raise error.with_traceback(None) from None
        except Exception:  # noqa: BLE001  the program is not to fail by ours
            return
        finally:
            self.inside -= 1

    def _picked(self, args: tuple[Any, ...], place: Any) -> None:
        """Look at what the program computed to pick of it: ever more seldom in the same line."""
        if self.reads is None or self.inside:
            return
        count = self._picks[place] = self._picks.get(place, 0) + 1
        x = args[0] if args else None
        if (count > OFTEN and count.bit_count() > 1) or type(x) is not _Tensor:
            return
        ref = _ref(x)
        if any(each[8] is ref for each in reversed(self.notes[-_RECENT:])):
            self._look(x, picked=True)

    def _asked(self, x: Any) -> Any:
        """Give what the program asked whether it is finite, or compared; None for other answers."""
        ref = _ref(x)
        for _ in range(_HOPS):
            recent = reversed(self.notes[-_RECENT:])
            note = next((Note(*each) for each in recent if each[8] is ref), None)
            if note is None or not note.args or type(note.args[0]) is not weakref.ReferenceType:
                return None
            ref = note.args[0]
            name = getattr(note.func, "__name__", "")
            if name in _ASKS:
                return ref()
            if name in _COMPARES:
                given = [x() for x in note.args if type(x) is weakref.ReferenceType]
                return next((x for x in given if x is not None and x.numel() == 1 and x != x), None)
        return None

    def _begun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        roots = args[0]
        grads = args[1] if len(args) > 1 else None
        for name in ("gradient", "grad_tensors", "grad_outputs") if kwargs else ():
            grads = kwargs.get(name, grads)
        roots = [roots] if isinstance(roots, _Tensor) else list(roots)
        given = list(grads) if isinstance(grads, tuple | list) else [grads] * len(roots)
        for x in roots:
            self.hold(x)
        pairs = [(_ref(x), writes(x)) for x in roots]
        found = Pass(pairs, given, self)
        self.passes.append(found)
        return found


class _Here(threading.local):
    notes: Notes | None = None


_here = _Here()


class Everywhere(NamedTuple):
    """Say what is called where the whole program is noted.

    Attributes:
        around: With each backward pass, before and after it.
        reads: With what is bad as the program reads it.
        update: Before each update.
    """

    around: Callable[[Notes, Pass, bool, Any], None]
    reads: Callable[[Notes, torch.Tensor, bool], None]
    update: Callable[[], None]


# None where only what is behind a model's call is noted.
everywhere: Everywhere | None = None
# Has watched models read nothing while a function of the program's runs again.
unread: Callable[[], AbstractContextManager[Any]] = nullcontext
_all: "weakref.WeakValueDictionary[int, Notes]" = weakref.WeakValueDictionary()
_waiting: list[Any] = []


def _has_ranks() -> bool:
    """Tell whether what runs again could wait for other processes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def called(
    run: Callable[..., Any], again: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    frame: FrameType,
) -> Any:  # fmt: skip
    """Call a function, noted as one operation where anything is noted.

    Args:
        run: What to call.
        again: What an investigation calls; None if nothing may be called again.
        args: With what.
        kwargs: By name.
        frame: Where it is called.
    """
    notes = _here.notes
    if again is None or notes is None or not function_modes.has(notes) or _has_ranks():
        return run(*args, **kwargs)
    return notes.applied(run, again, args, kwargs, frame)


def of(thread: int | None = None) -> Notes | None:
    """Give a thread's notes, this one's by default; None where none are taken."""
    return _here.notes if thread is None else _all.get(thread)


def begin() -> Notes:
    """Give this thread's notes; the mode is not put in yet."""
    notes = _here.notes
    if notes is None or notes.ended:
        notes = _here.notes = _all[threading.get_ident()] = Notes()
        if not _waiting:
            _waiting.append(when_imported(EVALUATION, _before_compiled))
    if everywhere is not None:  # it may have begun after a tracker of the program's own
        notes.around, notes.reads = everywhere.around, everywhere.reads
    return notes


def _before_compiled() -> None:
    try:
        stand_before_compiled(_compiled)
    except Exception:  # noqa: BLE001  code that is compiled comes before what is noted
        end()


def _compiled(begins: bool, number: int) -> None:
    notes = _here.notes
    if notes is not None:
        notes.compiled(begins, number)


def behind_models() -> None:
    """Note what comes behind a model's call, where not the whole program is noted."""
    if everywhere is None:
        begin().put()


def enters(x: torch.Tensor) -> None:
    """Have the gradient held that comes to what the program computed and calls a model with."""
    notes = _here.notes
    if notes is None:
        return
    if x.is_leaf:
        notes.leaves.append(_ref(x))
        return
    with suppress(RuntimeError):  # inside a function transform
        x.register_hook(functools.partial(notes.entered, _ref(x), writes(x)))


def within_models() -> None:
    """Note nothing from a model's call or an update on, where not the whole program is noted."""
    if everywhere is None:
        away()


def is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer's step is code of the program's: that is noted, too."""
    kind: Any = type(optimizer)
    return _steps_itself(kind)


@functools.lru_cache(maxsize=64)
def _steps_itself(kind: Any) -> bool:
    code = getattr(inspect.unwrap(kind.step), "__code__", None)
    return code is not None and is_users(code)


def updated(optimizer: torch.optim.Optimizer) -> None:
    """Note an update: what led to its gradients is over."""
    notes = _here.notes
    if notes is not None:
        if everywhere is not None:
            notes.passes.clear()
            notes._gradients.clear()
            notes.put()
        else:
            notes.take()  # a closure of the optimizer's has called the model since
            if not is_own(optimizer):
                notes.forget()


def leave() -> None:
    """Let go of what was noted for a tracker that ends."""
    if everywhere is None and _here.notes is not None:
        _here.notes.take()
        _here.notes.forget()


def end() -> None:
    """Note nothing more in any thread; the modes of others go as they come by."""
    for notes in list(_all.values()):
        notes.end()


def away() -> Notes | None:
    """Note nothing for a while; give what is to be put back."""
    notes = _here.notes
    if notes is None and everywhere is not None:
        return begin()  # a thread that nobody has seen
    return notes if notes is not None and notes.take() else None


@contextmanager
def apart() -> Iterator[None]:
    """Note nothing inside, whatever updates."""
    notes = away()
    if notes is not None:
        notes.inside += 1
    try:
        yield
    finally:
        if notes is not None:
            notes.inside -= 1
            notes.put()


def _forked() -> None:
    if _here.notes is not None:
        _here.notes.end()
        _here.notes = None  # it begins anew where a model runs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
