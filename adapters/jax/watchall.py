"""Find the functions that a program compiles: each is watched from its first call on."""

import functools
import inspect
import operator
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax import tree_util

from anynan._base.imports import when_imported
from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan._everywhere import Found
from anynan._steps.judge import Judge
from anynan._steps.messages import GIVEN_BY_ANOTHER
from anynan._steps.tracked import Tracked, inside
from anynan.errors import AnomalyError
from anynan.jax.eager import ARRAYS, Call, Calls, bad, held
from anynan.jax.messages import CHECKED_BY_PROGRAM, COMPILED_AHEAD, EAGER_CALLS, NAN_GIVEN, WENT_ON
from anynan.jax.program import signature
from anynan.jax.program.objects import refuse_cycles
from anynan.jax.program.trace import eager as eager_now
from anynan.jax.program.trace import staged, traced, tracing, under_way
from anynan.jax.read import probes
from anynan.jax.session.raising import ended, hand_on, leave_out_own
from anynan.jax.session.session import Session
from anynan.jax.tracking import start
from anynan.options import Options
from anynan.tracker import Tracker

# What compiles, and what differentiates, in JAX and in modules that are no part of it.
COMPILERS = {"jax": ("jit", "pmap"), "flax.nnx": ("jit",), "equinox": ("filter_jit",)}
SLOPES = {
    "jax": ("value_and_grad", "jacfwd", "jacrev", "hessian"),
    "flax.nnx": ("grad", "value_and_grad"),
    "equinox": ("filter_grad", "filter_value_and_grad"),
}
# What runs a function of the program's round by round; outside of any jit it is compiled by itself.
LOOPS = ("scan", "while_loop", "fori_loop", "map")
# What takes no function with readings in it: they are neither linear nor differentiated forwards.
BARE = ("jvp", "linearize", "linear_transpose")
FIXED = frozenset({"length", "reverse", "unroll", "batch_size"})
# What compiles for others is looked into by its own name, or by another adapter.
OWN = frozenset({"jax", "jaxlib", "flax", "equinox", "keras", "anynan"})
# So many bad calls of one function are looked into; how many of each were, and were there at all.
LOOKS = 3
_looked: Counter[Any] = Counter()
_called: Counter[Any] = Counter()
# How a program looks at a number, and the first that was bad, until another step runs: where, the
# call that made it bad, None if that is not known, and whether the program asked and so knows.
READS = ("__float__", "__format__", "__repr__", "__str__", "item", "tolist")
_read: list[tuple[str, Call | None, bool]] = []
# What looks at a number for the program that hands it one, to write it down.
WRITERS = frozenset({"logging", "absl", "loguru", "tqdm", "rich", "json", "clu", "tensorboardX"})
# By what a program asks NumPy whether numbers are finite, and what it is answered where one is not.
ASKS = {"isnan": True, "isinf": True, "isfinite": False}
_calls = Calls()
# Those that were told as what made an array bad that a step was given, or a number that was read.
_followed: list[Call] = []
# What watches what runs outside of any jit, by its code.
_trackers: dict[Any, Tracker] = {}
# What was compiled before, by function and options: JAX itself remembers that. Where a program
# compiles one anew in each step, its tracker is kept; of the last few that hold little.
_compiled: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()
_between: dict[Hashable, Tracker] = {}
BETWEEN, LITTLE = 8, 1 << 20
_config: Any = jax.config


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch what the program's own code has compiled, by ``jax.jit`` and the like.

    Of what a library compiles only the results are looked at, as of loops outside of any jit. What
    was compiled before stays as it is.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    patches = Patches()
    valued = jax.value_and_grad

    def compiled(made: Any, *args: Any, **given: Any) -> Any:
        return Watched(made, options, found, _again(made, *args, **given))

    def foreign(made: Any, of: Any, library: str) -> Any:
        return Foreign(made, options, found, of, library)

    def looping(loop: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(loop)

        @functools.wraps(loop)
        def loops(*args: Any, **kwargs: Any) -> Any:
            of = [x for x in args if callable(x)]
            if not of or not eager_now():
                return loop(*args, **kwargs)
            try:
                given = parameters.bind(*args, **kwargs).arguments
            except TypeError:  # JAX has its own words for it
                return loop(*args, **kwargs)
            known = {key: given.pop(key) for key in FIXED & given.keys()}
            return foreign(functools.partial(loop, **known), of[-1], loop.__name__)(**given)

        return loops

    def differentiated(made: Any, *args: Any, **given: Any) -> Any:
        return Eager(made, options, found, args[0])

    def sloped(made: Any, *args: Any, **given: Any) -> Any:
        if len(args) > 2:
            return differentiated(made, *args)
        # It is what grad itself calls, and gives the value too.
        return Eager(valued(*args, **given), options, found, args[0], made, given)

    def change(module: str, names: tuple[str, ...], stand_in: Callable[..., Any]) -> None:
        for name in names:
            if hasattr(sys.modules[module], name):
                made = functools.partial(_watching, stand_in, foreign)
                patches.change(sys.modules[module], name, made)

    waiting = [
        when_imported(module, functools.partial(change, module, names, stand_in))
        for doors, stand_in in (
            (COMPILERS, compiled),
            ({"jax": ("grad",)}, sloped),
            (SLOPES, differentiated),
        )
        for module, names in doors.items()
    ]

    def mapped(made: Any, *args: Any, **given: Any) -> Any:
        return foreign(made, args[0], "vmap")

    patches.change(jax, "vmap", functools.partial(_watching, mapped, lambda made, *_: made))
    for name in LOOPS:
        patches.change(jax.lax, name, looping)
    for array in ARRAYS:
        for name in READS:
            patches.change(array, name, _reading)
        patches.change(array, "__bool__", functools.partial(_deciding, found))

    def clearing(clear: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(clear)
        def clears() -> None:
            clear()
            _forget(found.living())

        return clears

    calls = _calls.begin()
    for name in BARE:
        patches.change(jax, name, _bare)
    patches.change(
        jax,
        "make_jaxpr",
        lambda make: functools.wraps(make)(lambda *args, **given: _bare(make(*args, **given))),
    )
    patches.change(jax, "clear_caches", clearing)
    patches.change(jax, "device_get", _fetching)
    for name in (*ASKS, "asarray", "array"):
        patches.put(np, name, OfNumPy(getattr(np, name)))

    def undo() -> None:
        for leave in waiting:
            leave()
        patches.undo()
        calls()
        _look_at_the_end(found, options)
        _looked.clear()
        _called.clear()
        _read.clear()
        _calls.clear()
        _followed.clear()
        _trackers.clear()
        _between.clear()

    return undo


def _goes_on(found: Found, options: Options) -> None:
    """Tell of what was read before a step; where the program asked and goes on, it is a note."""
    if not eager_now():
        return
    looks = list(_read)
    _read.clear()
    _calls.goes_on()
    for place, call, asked in looks:
        if call is not None and not asked:
            _follow(call, options, found)
        elif call is not None and not any("[went-on]" in note for note in found.notes):
            found.notes.append(WENT_ON(place=place, origin=call.place))


def _was_fetched(x: Any, host: Any) -> None:
    """Remember a bad number that the program brought to the host."""
    nan = bool(np.any(host != host))
    if nan or (probes.checkable(x) and not np.isfinite(host).all()):
        _was_read(x, made=not nan, depth=3)


def _was_read(x: Any, *, made: bool = False, asked: bool = False, depth: int = 2) -> None:
    """Remember where the program looks at a bad number; a library's looks are its own affair.

    Args:
        x: The number, or the answer to a question about it.
        made: Whether it counts only if it is known what made it bad: an Inf may be what a search
            begins with.
        asked: Whether the program asked if it is bad.
        depth: How many frames away the program is.
    """
    frame: Any = sys._getframe(depth)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in WRITERS:
        frame = frame.f_back
    known = bool(_read and _read[0][1])
    if known or is_library(frame.f_code.co_filename):
        return
    call = None
    with suppress(Exception):  # it is looked for in what the program computed
        call = _calls.origin([x], numpys=True)
    if call is not None or not (made or _read):
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        _read[:] = [(place, call, asked)]


class OfNumPy:
    """Stand for a function of NumPy's that a program asks by, or brings a number to the host.

    It is equal to the function, has all that it has, and looks at one number of JAX's alone.
    """

    def __init__(self, fn: Any) -> None:
        self._fn, self._bad = fn, ASKS.get(fn.__name__)
        functools.update_wrapper(self, fn)
        self.__module__ = "numpy"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        out = self._fn(*args, **kwargs)
        x: Any = args[0] if args else None
        one = type(x) in ARRAYS and x.size == 1  # most that is asked for is no array of JAX's
        if one and self._bad is None:
            _was_fetched(x, out)
        elif one and bool(out.item()) is self._bad:
            _was_read(x, asked=True)
        return out

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Pass for it."""
        return type(self._fn)

    def __getattr__(self, name: str) -> Any:
        """Give what it has."""
        return getattr(self.__dict__["_fn"], name)

    def __eq__(self, other: object) -> bool:
        """Be what tables of functions have it as."""
        return other is self or other == self._fn

    def __hash__(self) -> int:
        """Be found in them."""
        return hash(self._fn)

    def __reduce__(self) -> str:
        """Leave nothing of ours in a file."""
        return str(self._fn.__name__)


def _fetching(get: Callable[..., Any]) -> Callable[..., Any]:
    """Have the program bring arrays to the host as before, and remember a bad number."""

    def gets(*args: Any, **kwargs: Any) -> Any:
        out = get(*args, **kwargs)
        for x, host in zip(*map(tree_util.tree_leaves, (args, out)), strict=False):
            if isinstance(host, np.ndarray) and host.size == 1:
                _was_fetched(x, host)
        return out

    return gets


def _reading(read: Callable[..., Any]) -> Callable[..., Any]:
    """Have the program look at a value as before, and remember a bad number with its line.

    An Inf that it prints may be what a search begins with.
    """

    def reads(x: Any, *args: Any) -> Any:
        out = read(x, *args)
        if isinstance(out, float):
            if out - out != 0:
                _was_read(x)
        elif isinstance(out, str) and x.size == 1 and ("nan" in out or "inf" in out):
            _was_read(x, made="nan" not in out)
        return out

    return reads


def _deciding(found: Found, decide: Callable[..., Any]) -> Callable[..., Any]:
    """Have the program decide as before, and remember where it did so by a bad number."""

    def decides(x: Any) -> Any:
        out = decide(x)
        frame = sys._getframe(1)
        if is_library(frame.f_code.co_filename):
            return out
        with suppress(Exception):  # it is looked for in what the program computed
            asked, one = _calls.asked(x) or (False, False)
            if one:
                _was_read(x, asked=True)
            elif asked:  # data may have gaps, which it fills
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                found.unwatched(CHECKED_BY_PROGRAM(place=place))
        return out

    return decides


def _watching(
    stand_in: Callable[..., Any], foreign: Callable[..., Any], make: Callable[..., Any]
) -> Callable[..., Any]:
    """Give what compiles as before, and has a function of the program's own watched."""

    @functools.wraps(make)
    def making(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        frame = sys._getframe(1)
        if is_library(frame.f_code.co_filename):
            library = str(frame.f_globals.get("__name__")).partition(".")[0]
            return made if library in OWN or not _alone(args) else foreign(made, args[0], library)
        if not args:  # it was given options alone, and returns a decorator
            return lambda *given, **more: stand_in(made(*given, **more), *given, **more)
        return stand_in(made, *args, **kwargs)

    return making


def _alone(args: tuple[Any, ...]) -> bool:
    """Tell what is compiled by itself from a class's method, which is bound in its own way."""
    fn: Any = args[0] if args else None
    outer = str(getattr(fn, "__qualname__", "")).rpartition(".")[0]
    bound = isinstance(fn, types.MethodType) or not outer or outer.endswith("<locals>")
    return callable(fn) and bound


def _look_at_the_end(found: Found, options: Options) -> None:
    """Say what of a program was not read, and what it kept that is bad, if nothing was told."""
    program = dict(vars(sys.modules["__main__"]))
    if any(value is jax.numpy or value is jax for value in program.values()):
        found.unwatched(EAGER_CALLS())
    arrays = {"": [] if found.ended_by is None else held(found.ended_by)}
    for name, value in program.items():
        if signature.is_kept(name) or name == "loss":
            arrays[name] = bad(value)
    told = False
    with suppress(Exception):  # what cannot be made once more stays without its operation
        left = (*arrays.values(), _calls.left())
        ended = arrays[""]
        origins = (_calls.origin(each, numpys=True, floats=each is ended) for each in left)
        for call in (*(call for _, call, _ in _read), *origins):
            if call is not None and not told and not found.bad():
                told = once(call, options, found)
    if told or found.bad():
        return
    for place, *_ in _read:
        found.harm(f"a number was NaN or Inf as it was read, at {place}")
    for name, each in arrays.items():
        if name and each:
            found.harm(f"{name} holds NaN or Inf as the program ends")


def _bare(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Have a program's functions run as they are while JAX transforms them."""

    @functools.wraps(transform)
    def transforms(*args: Any, **kwargs: Any) -> Any:
        with under_way():
            return transform(*args, **kwargs)

    return transforms


def _again(made: Any, fn: Any = None, *args: Any, **given: Any) -> Hashable:
    """Give what a function that the program compiles again is known by; None the first time."""
    try:
        key = type(made), args, tuple(sorted(given.items()))
        known = _compiled.setdefault(fn, set())
        again = key in known
        known.add(key)
    except TypeError:  # no hash, or not to be held weakly
        return None
    return (fn, *key) if again else None


def _forget(trackers: Iterable[Tracked]) -> None:
    """Have functions traced anew at their next calls."""
    for tracker in trackers:
        if isinstance(tracker.judge.adapter, Session):
            tracker.judge.adapter.detach()


def _left(tracker: Tracker, key: Hashable) -> None:
    """End what watched a compiled function that is gone, or keep it for the next of its kind."""
    judge = inside(tracker).judge
    session = cast("Session | None", judge.adapter)
    if key is None or session is None or session.size() > LITTLE:
        tracker.remove()
        return
    with judge.softly():
        session.read()
    _between[key] = tracker
    if len(_between) > BETWEEN:
        _between.pop(next(iter(_between))).remove()


class Watched:
    """Stand for a compiled function, tracked from its first call on.

    Args:
        fn: The function.
        options: As for ``track``.
        found: Is given its tracker.
        again: What it is known by, if the program compiles it anew.
    """

    def __init__(self, fn: Any, options: Options, found: Found, again: Hashable = None) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._options, self._found, self._again = fn, options, found, again
        self._tracker: Tracker | None = None
        self._alone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as one step."""
        _goes_on(self._found, self._options)
        # A tracked function that calls it sees all of it; without jit it is eager code.
        if self._alone or tracing() or _config.jax_disable_jit:
            return self._fn(*args, **kwargs)
        tracker = self._tracker or self._track()
        if tracker is None:
            return self._fn(*args, **kwargs)
        try:
            return tracker(*args, **kwargs)
        except Exception as error:
            if ended(error) or self._cannot_again(args, kwargs):
                raise
            failed = error
        out = self._fn(*args, **kwargs)
        self._leave(failed)
        return out

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind like a function."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Give whatever else a compiled function has."""
        return getattr(self.__dict__["_fn"], name)

    def __repr__(self) -> str:
        """Show the compiled function."""
        return repr(self._fn)

    def __reduce__(self) -> Any:
        """Leave nothing of ours in a file or a copy."""
        return operator.getitem, ((self._fn,), 0)

    def clear_cache(self) -> None:
        """Forget what was traced, as it does itself: the next call traces anew."""
        self._fn.clear_cache()
        if self._tracker is not None:
            _forget([inside(self._tracker)])

    # JAX knows a compiled function by these, and asks its class for them.

    @property
    def lower(self) -> Any:
        """Give what lowers it."""
        name = getattr(self, "__name__", "a function")
        return self._ahead("lower", lambda: self._found.unwatched(COMPILED_AHEAD(name=name)))

    @property
    def trace(self) -> Any:
        """Give what traces it."""
        return self._ahead("trace", lambda: None)

    @property
    def eval_shape(self) -> Any:
        """Give what tells the shapes that it gives."""
        return self._ahead("eval_shape", lambda: None)

    def _ahead(self, name: str, tell: Callable[[], None]) -> Any:
        """Give what makes its program, which may be exported: it is the user's own."""
        found = getattr(self._fn, name)

        @functools.wraps(found)
        def made(*args: Any, **kwargs: Any) -> Any:
            tell()
            with under_way():
                return found(*args, **kwargs)

        return made

    def _track(self) -> Tracker | None:
        try:
            tracker = self._tracker = _between.pop(self._again, None)
            if tracker is None:
                tracker = self._start()
                inside(tracker).judge.steps.since_the_start()
                self._found.add(tracker)
            weakref.finalize(self, _left, tracker, self._again).atexit = False
        except Exception as error:  # noqa: BLE001  it is not watched then, and that is said
            self._leave(error)
        return self._tracker

    def _start(self) -> Tracker:
        tracker = self._tracker = start(self._fn, self._options)
        outside = functools.partial(_outside, self._options, self._found)
        cast("Session", inside(tracker).judge.adapter).outside = outside
        return tracker

    def _cannot_again(self, *given: Any) -> bool:
        """Tell whether a call cannot be made once more: its arrays are given away."""
        try:
            refuse_cycles(given)
        except ValueError:
            return True
        return any(map(_is_gone, tree_util.tree_leaves(given)))

    def _leave(self, error: Exception) -> None:
        """Watch it no longer, and say why."""
        self._alone = True
        if self._tracker is not None:
            self._tracker.remove()
        self._found.fail(getattr(self, "__name__", "a compiled function"), error)


class Eager(Watched):
    """Stand for what differentiates outside of any jit: only what goes bad is traced.

    It runs operation by operation, as it does without us. One number is read of what it gives;
    a call that gave something bad is made once more, as a tracked function.
    """

    def __init__(
        self, fn: Any, options: Options, found: Found, of: Any, slope: Any = None, given: Any = None
    ) -> None:
        super().__init__(fn, options, found)
        self._slope, self._aux = slope, bool(given and given.get("has_aux"))
        # A partial and a module may be made anew in every step, and a module has no hash.
        while isinstance(of := inspect.unwrap(of), functools.partial):
            of = of.func
        self._label = getattr(of, "__name__", type(of).__name__)
        self._key = getattr(of, "__code__", getattr(type(of).__call__, "__code__", type(of)))

    def __reduce__(self) -> Any:
        """Leave nothing of ours in a file or a copy."""
        return operator.getitem, ((self._slope or self._fn,), 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and look at what it gives."""
        _goes_on(self._found, self._options)
        try:
            refuse_cycles((args, kwargs))
        except ValueError as error:
            if not self._alone:
                self._leave(error)
            return (self._slope or self._fn)(*args, **kwargs)
        given = tree_util.tree_leaves((args, kwargs))
        if self._alone or tracing() or traced(given) or staged():
            return (self._slope or self._fn)(*args, **kwargs)
        with under_way():  # what it calls is seen from here
            out = self._fn(*args, **kwargs)
        self._judge(out, given, args, kwargs)
        if self._slope is None:
            return out
        return (out[1], out[0][1]) if self._aux else out[1]

    def _judge(self, out: Any, given: list[Any], args: Any, kwargs: Any) -> None:
        """Look at what a call gave; it has run, so what we make of it is our affair."""
        try:
            self._seen(out, given, args, kwargs)
        except Exception as error:
            if ended(error):
                raise
            self._leave(error)

    def shared(self) -> Tracker:
        """Give the tracker of all that is made of one function."""
        tracker = _trackers.get(self._key)
        if tracker is None:
            tracker = _trackers[self._key] = self._start()
            inside(tracker).name = self._label
            self._found.add(tracker)
        return tracker

    def _looks(self) -> bool:
        """Tell whether one more bad call is looked into: a look is compiled, and takes long."""
        _looked[self._key] += 1
        return _looked[self._key] <= LOOKS

    def again(self, tracker: Tracker, session: Session, args: Any, kwargs: Any) -> None:
        """Make a call once more, as a tracked function."""
        try:
            session.again(self._fn, args, kwargs)
        except Exception as error:
            if ended(error):
                raise
            self._found.fail(tracker.name, error)  # such as numbers that a trace has not

    def _seen(self, out: Any, given: list[Any], args: Any, kwargs: Any) -> None:
        tracker = self.shared()
        judge = inside(tracker).judge
        session = cast("Session | None", judge.adapter)
        if session is None:
            return
        if not _is_bad(tree_util.tree_leaves(out)):
            self._count(judge)
            return
        step, told = judge.step, _told(tracker)
        if _is_bad(given) and (told or session.maker(given)):
            comes = "is bad, and came after"
            judge.say(GIVEN_BY_ANOTHER(name=tracker.name, comes=comes, maker="a step"))
            self._count(judge)
        elif self._looks():
            self.again(tracker, session, args, kwargs)
            arrays = [x for x in tree_util.tree_leaves(out) if isinstance(x, jax.Array)]
            session.remember(arrays, step)
            if _told(tracker) == told:
                self._found.harm(f"{tracker.name} gave NaN or Inf in its step {step}")
        else:
            self._count(judge)

    def _count(self, judge: Judge) -> None:
        """Count a call that was not looked into."""
        if not judge.passed([], []):
            rows = judge.rows()
            judge.close_step()
            judge.settle(rows)


def once(call: Call, options: Options, found: Found, came: Iterable[Any] = ()) -> bool:
    """Make a call that is known to make bad of good once more, as a tracked function.

    Args:
        call: The call.
        options: As for ``track``.
        found: Is given the tracker.
        came: What came of it.

    Returns:
        Whether something was told.
    """
    if call.brings:
        found.harm(f"NaN came in from NumPy, at {call.place}")
        return True
    if call.number:
        if not found.bad():
            found.harm(f"{call.number} was put in as a number, at {call.place}")
        return True
    if options.policy.neginf is None:  # it did harm, and so is no mask
        options = replace(options, policy=replace(options.policy, neginf="bad"))
    for each in filter(None, (call.whole, call)):
        run, arrays = each.run()
        maker = Eager(run, options, found, run)
        tracker = maker.shared()
        session, step = cast("Session", inside(tracker).judge.adapter), inside(tracker).judge.step
        told = _told(tracker)
        maker.again(tracker, session, arrays, {})
        if _told(tracker) > told:
            session.remember(came, step)
            return True
    return False


def _outside(options: Options, found: Found, given: list[Any], weights: Iterable[Any] = ()) -> None:
    """Tell what made the bad arrays that a step was given, if that ran outside of any.

    Those of -Inf may be masks, but for weights.
    """
    arrays, call = [*bad(given), *weights], None
    with suppress(Exception):  # the step is judged all the same
        call = _calls.origin(arrays, floats=True)
    if call is not None:
        _follow(call, options, found, arrays)


def _follow(call: Call, options: Options, found: Found, came: Iterable[Any] = ()) -> None:
    """Tell of a call that made something bad, once for each line."""
    if len(_followed) >= LOOKS or any(call.place == each.place for each in _followed):
        return
    _followed.append(call)
    try:
        once(call, options, found, came)
    except AnomalyError:
        raise
    except Exception as error:  # noqa: BLE001  the program goes on
        found.fail(f"what {call.place} gave", error)


class Foreign(Eager):
    """Stand for what a library compiles, and for a loop outside of any jit.

    It runs as it does without us. One number is read of what it gives; a call that made NaN of
    none, or that an exception ended, is made once more, as a tracked function.
    """

    def __init__(self, fn: Any, options: Options, found: Found, of: Any, library: str) -> None:
        super().__init__(fn, options, found, of)
        self._label = f"{self._label} ({library})"
        self._rejected = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and look at what it gives."""
        if self._alone or not eager_now():
            return self._fn(*args, **kwargs)
        _called[self._key] += 1
        try:
            with under_way():  # what it calls is seen from here
                out = self._fn(*args, **kwargs)
        except Exception as error:
            if ended(error):
                leave_out_own(error)
                self._look(args, kwargs, error)
            raise
        _calls.note(self._fn, args, kwargs, out)
        self._judge(out, [], args, kwargs)
        return out

    def _seen(self, out: Any, given: list[Any], args: Any, kwargs: Any) -> None:
        bad = _has_nan(tree_util.tree_leaves(self._last(out)))
        # A sampler tells of a step that it rejected, and goes on from where it was.
        self._rejected = self._rejected + 1 if bad and _kept(out, args) else LOOKS * bad
        if self._rejected >= LOOKS:
            self._look(args, kwargs)

    def _last(self, out: Any) -> Any:
        """Give what counts of a result: of a scan's rows the last, as samplers reject the rest."""
        if not isinstance(self._fn, functools.partial) or self._fn.func.__name__ != "scan":
            return out
        last = 0 if self._fn.keywords.get("reverse") else -1
        return out[0], [x[last] for x in tree_util.tree_leaves(out[1]) if x.shape[0]]

    def _look(self, args: Any, kwargs: Any, failed: Exception | None = None) -> None:
        given = tree_util.tree_leaves((args, kwargs))
        if _has_nan(given):
            _outside(self._options, self._found, given)
            if not self._found.bad():
                self._found.unwatched(NAN_GIVEN(name=self._label))
            return
        tracker, gone = self.shared(), any(map(_is_gone, given))
        told, judge = _told(tracker), inside(tracker).judge
        session = cast("Session | None", judge.adapter)
        if session is None or not self._looks():
            return
        for _ in range(_called[self._key] - 1 - judge.step):
            self._count(judge)
        try:
            if not gone:
                self.again(tracker, session, args, kwargs)
        except Exception as error:
            if failed is None or isinstance(error, AnomalyError):
                raise
            hand_on(error, failed)
        if failed is None and _told(tracker) == told:
            why = ", and what it was given was donated" if gone else ""
            self._found.harm(f"{self._label} gave NaN{why}")


@jax.jit
def _worst(arrays: list[Any]) -> Any:
    # A mask holds -Inf, a loss does not.
    words = [probes.code(x) + (probes.code(x) == 1) * (x.size == 1) for x in arrays]
    return jax.numpy.max(jax.numpy.stack(words))


def _is_bad(leaves: list[Any]) -> bool:
    """Tell whether one of these is an array with a NaN or an Inf that is no mask."""
    arrays = [x for x in leaves if isinstance(x, jax.Array) and probes.checkable(x)]
    return bool(arrays) and int(_worst(arrays)) >= probes.POSINF


def _told(tracker: Tracker) -> int:
    """Count what was told of a function: one event may be many."""
    return tracker.count("bad") + tracker.count("suspect")


def _kept(out: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a result begins with a finite state of the form that it was given."""
    first = out[0] if isinstance(out, tuple) and out else None
    leaves, form = tree_util.tree_flatten(first)
    alike = len(leaves) > 1 and form in map(tree_util.tree_structure, args)
    return alike and not _has_nan(leaves)


def _has_nan(leaves: list[Any]) -> bool:
    """Tell whether one of these is an array with a NaN."""
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not _is_gone(x)]
    arrays = [x for x in arrays if probes.checkable(x)]
    return bool(arrays) and int(_worst(arrays)) == probes.NAN


def _is_gone(x: Any) -> bool:
    """Tell whether an array was given away."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
