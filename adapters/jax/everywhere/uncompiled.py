"""What a program runs operation by operation: only what goes bad is traced."""

import functools
import inspect
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import jax
from jax import tree_util

from anynan._steps.judge import Judge
from anynan._steps.messages import GIVEN_BY_ANOTHER
from anynan._steps.tracked import inside
from anynan.errors import AnomalyError
from anynan.jax.eager import MISSES, Call
from anynan.jax.everywhere.compiled import Watched
from anynan.jax.everywhere.watch import LOOKS, Watch
from anynan.jax.messages import NAN_GIVEN
from anynan.jax.program.objects import refuse_cycles
from anynan.jax.program.trace import eager as eager_now
from anynan.jax.program.trace import staged, traced, tracing, under_way
from anynan.jax.read import probes
from anynan.jax.read.donated import is_gone
from anynan.jax.replay.placed import is_nan
from anynan.jax.session.raising import ended, hand_on, leave_out_own
from anynan.jax.session.session import Session
from anynan.options import Options
from anynan.tracker import Tracker


class Eager(Watched):
    """Stand for what differentiates outside of any jit: only what goes bad is traced.

    It runs operation by operation, as it does without us. One number is read of what it gives;
    a call that gave something bad is made once more, as a tracked function.
    """

    def __init__(
        self, fn: Any, watch: Watch, of: Any, slope: Any = None, given: Any = None,
        options: Options | None = None,
    ) -> None:  # fmt: skip
        super().__init__(fn, watch, options=options)
        self._slope, self._aux = slope, bool(given and given.get("has_aux"))
        # A partial and a module may be made anew in every step, and a module has no hash.
        while isinstance(of := inspect.unwrap(of), functools.partial):
            of = of.func
        self._label = getattr(of, "__name__", type(of).__name__)
        self._key = getattr(of, "__code__", getattr(type(of).__call__, "__code__", type(of)))

    def __reduce__(self) -> Any:
        """Leave nothing of ours in a file or a copy."""
        return operator.getitem, ((self.bare,), 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and look at what it gives."""
        self._watch.goes_on()
        try:
            refuse_cycles((args, kwargs))
        except ValueError as error:
            if not self._alone:
                self._leave(error)
            return self.bare(*args, **kwargs)
        given = tree_util.tree_leaves((args, kwargs))
        if self._alone or tracing() or traced(given) or staged():
            return self.bare(*args, **kwargs)
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

    @property
    def bare(self) -> Any:
        """Give what the program made, without us."""
        return self._slope or self._fn

    def shared(self) -> Tracker:
        """Give the tracker of all that is made of one function."""
        trackers = self._watch.trackers
        tracker = trackers.get(self._key)
        if tracker is None:
            tracker = trackers[self._key] = self._start()
            inside(tracker).name = self._label
            self._watch.found.add(tracker)
        return tracker

    def again(self, tracker: Tracker, session: Session, args: Any, kwargs: Any) -> None:
        """Make a call once more, as a tracked function."""
        try:
            session.again(self._fn, args, kwargs)
        except Exception as error:
            if ended(error):
                raise
            self._watch.found.fail(tracker.name, error)  # such as numbers that a trace has not

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
        elif self._watch.may_look(self._key):
            self.again(tracker, session, args, kwargs)
            arrays = [x for x in tree_util.tree_leaves(out) if isinstance(x, jax.Array)]
            session.remember(arrays, step)
            if _told(tracker) == told:
                self._watch.found.harm(f"{tracker.name} gave NaN or Inf in its step {step}")
        else:
            self._count(judge)

    def _count(self, judge: Judge) -> None:
        """Count a call that was not looked into."""
        if not judge.passed([], []):
            rows = judge.rows()
            judge.close_step()
            judge.settle(rows)


class Foreign(Eager):
    """Stand for what a library compiles, and for a loop outside of any jit.

    It runs as it does without us. One number is read of what it gives; a call that made NaN of
    none, or that an exception ended, is made once more, as a tracked function.
    """

    def __init__(self, fn: Any, watch: Watch, of: Any, library: str) -> None:
        super().__init__(fn, watch, of)
        self._label = f"{self._label} ({library})"
        self._rejected = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and look at what it gives."""
        if self._alone or not eager_now():
            return self._fn(*args, **kwargs)
        self._watch.called[self._key] += 1
        try:
            with under_way():  # what it calls is seen from here
                out = self._fn(*args, **kwargs)
        except Exception as error:
            if ended(error):
                leave_out_own(error)
                self._look(args, kwargs, error)
            raise
        self._watch.calls.note(self._fn, args, kwargs, out, watched=True)
        self._judge(out, [], args, kwargs)
        return out

    def _seen(self, out: Any, given: list[Any], args: Any, kwargs: Any) -> None:
        bad = _has_nan(tree_util.tree_leaves(self._last(out)))
        if bad:  # one look at all; at each array only where there is a NaN
            placed = self._watch.calls.placed
            told = tree_util.tree_map(lambda x: None if placed(x) else x, out)
            # What goes on with NaN makes more of it than is looked for.
            known = self._watch.calls.missed < MISSES
            bad = known and _has_nan(tree_util.tree_leaves(self._last(told)))
        # A sampler tells of a step that it rejected, and goes on from where it was.
        self._rejected = self._rejected + 1 if bad and _kept(out, args) else LOOKS * bad
        if self._rejected >= LOOKS:
            self._look(args, kwargs, out=out)

    def _last(self, out: Any) -> Any:
        """Give what counts of a result: of a scan's rows the last, as samplers reject the rest."""
        if not isinstance(self._fn, functools.partial) or self._fn.func.__name__ != "scan":
            return out
        last = 0 if self._fn.keywords.get("reverse") else -1
        return out[0], [x[last] for x in tree_util.tree_leaves(out[1]) if x.shape[0]]

    def _look(
        self, args: Any, kwargs: Any, failed: Exception | None = None, out: Any = None
    ) -> None:
        given = tree_util.tree_leaves((args, kwargs))
        if _has_nan(given) and not self._watch.calls.makes(given, tree_util.tree_leaves(out)):
            self._watch.outside(given)
            if not self._watch.found.bad():
                self._watch.found.unwatched(NAN_GIVEN(name=self._label))
            return
        tracker, gone = self.shared(), any(map(is_gone, given))
        told, judge = _told(tracker), inside(tracker).judge
        session = cast("Session | None", judge.adapter)
        if session is None or not self._watch.may_look(self._key):
            return
        for _ in range(self._watch.called[self._key] - 1 - judge.step):
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
            self._watch.found.harm(f"{self._label} gave NaN{why}")


def once(watch: Watch, call: Call, came: Iterable[Any] = ()) -> bool:
    """Make a call that is known to make bad of good once more, as a tracked function.

    Args:
        watch: Is given the tracker.
        call: The call.
        came: What came of it.

    Returns:
        Whether something was told.
    """
    found, options = watch.found, watch.options
    if call.brings:
        found.harm(f"NaN came in from NumPy, at {call.place}")
        return True
    if call.number:
        if not found.bad():
            found.harm(f"{call.number} was put in as a number, at {call.place}")
        return True
    if options.policy.neginf is None:  # it did harm, and so is no mask
        options = replace(options, policy=replace(options.policy, neginf="bad"))
    came = list(came)
    for each in filter(None, (call.whole, call)):
        run, arrays = each.run()
        maker = Eager(run, watch, run, options=options)
        tracker = maker.shared()
        session, step = cast("Session", inside(tracker).judge.adapter), inside(tracker).judge.step
        told = _told(tracker)
        # Of one that was asked for an Inf, what it placed is no news.
        session.excuses = bool(came) and not any(map(is_nan, came))
        maker.again(tracker, session, arrays, {})
        if _told(tracker) > told:
            session.remember(came, step)
            return True
    return False


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
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not is_gone(x)]
    arrays = [x for x in arrays if probes.checkable(x)]
    return bool(arrays) and int(_worst(arrays)) == probes.NAN
