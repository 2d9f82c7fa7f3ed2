"""The steps of one tracker: opened, written, read and closed."""

from collections.abc import Callable
from typing import Any

import torch

from anynan._base import context
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._steps.tracked import Tracked
from anynan.errors import AnomalyError
from anynan.torch.call.state import State
from anynan.torch.call.threads import Threads
from anynan.torch.distributed.ranks import Ranks
from anynan.torch.graphs.fixed import Board
from anynan.torch.graphs.graphs import Graphs
from anynan.torch.graphs.plans import Late
from anynan.torch.private import backward_roots, task
from anynan.torch.read.probes import DTYPE_NAME, nonfinite, read_ends
from anynan.torch.read.slots import DeferredSlots, site_of
from anynan.torch.weights.scalers import (
    Scalers,
    ever,
    forget_idle,
    in_sight,
    in_use,
    scales,
    uses,
    worked,
)
from anynan.torch.weights.weights import Weights

_last_pass = [-1]  # the number of the backward pass whose loss was read last


def last_pass() -> int:
    """Give the number of the backward pass whose loss a watched model read last."""
    return _last_pass[0]


class Steps:
    """Hold the open steps of all threads.

    Args:
        tracker: What judges the rows.
        threads: The threads' states.
        graphs: What compiled code wrote.
        ranks: The other processes.
        weights: What is read with ``parameters=True``.
        scalers: The loss scalers.

    Attributes:
        marked: Called with an error of the tracker's before it is raised in a hook.
    """

    def __init__(
        self, tracker: Tracked, threads: Threads, graphs: Graphs, ranks: Ranks, weights: Weights,
        scalers: Scalers,
    ) -> None:  # fmt: skip
        self.tracker, self.options = tracker, tracker.judge.options
        self.threads, self.graphs, self.ranks = threads, graphs, ranks
        self.weights, self.scalers = weights, scalers
        self.marked: Callable[[AnomalyError], None] | None = None

    # Open.

    def open(self, state: State) -> Step:
        """Open this thread's step."""
        if state.operations is not None:
            state.end_operations()  # of a step whose end was interrupted
        rows = state.rows = self.tracker.judge.rows()
        state.used = True
        if ever and torch.is_grad_enabled():
            state.scales, state.uses = scales(), uses()
        self.ranks.begin(state, rows)
        if self.options.parameters:
            self.write_weights(state, rows)
        return rows

    # Write.

    def write(self, state: State, rows: Step, site: Site, call: int, value: torch.Tensor) -> None:
        """Write one reading and have it judged if it needs to be."""
        if state.slots.write(rows, site, call, value):
            self.flag(state, rows, rows.last, value)

    def write_weights(self, state: State, rows: Step) -> None:
        """Read every weight and buffer."""
        for site, x in self.weights.readings():
            self.write(state, rows, site, 0, x)
        if not state.slots.deferred and rows.failed is None:
            self.tracker.judge.known_clean(rows.number)

    def flag(self, state: State, rows: Step, order: int, value: Any) -> None:
        """Have one reading judged while its layer is still on the stack."""
        if rows.follows:
            site = rows.sites[order]
            prefixes = [prefix for prefix, _ in self.threads.models.refs]
            if site.phase != "backward" and (site.layer is None or site.layer in prefixes):
                self.tracker.judge.flag(rows, order, value)  # another model may be given it
            return
        if self.graphs.ran():
            order = self._take_first(state, rows, order)
        with state.aside():
            try:
                if rows.sites[order].phase == "backward" and state.in_step:
                    order = self._loss_first(state, rows, order)
                self.tracker.judge.flag(rows, order, value)
            except AnomalyError as error:
                if self.marked is not None:
                    self.marked(error)
                # The user's stack is what matters, not the way through the core.
                raise error.with_traceback(None) from None

    def _loss_first(self, state: State, rows: Step, order: int) -> int:
        """Judge a bad loss before the gradients that it spoils.

        Returns:
            The gradient's new place.
        """
        if rows.failed is not None or state.deferred or order != rows.last:
            return order
        if in_use(state.scales) or any(site.phase == "loss" for site in rows.sites):
            return order
        for x in backward_roots():
            if isinstance(x, torch.Tensor) and x.numel() == 1 and nonfinite(x):
                if self.scalers.scale(state) is not None:  # what is scaled may overflow
                    return order
                site = site_of(self.tracker.judge.monitor, None, "loss", "loss", x)
                rows.insert(order, site, 0, *read_ends(x.detach()))
                root = state.roots.pop(order, None)
                if root is not None:
                    state.roots[order + 1] = root
                self.tracker.judge.flag(rows, order, x)
                return order + 1
        return order

    def read_root(self, state: State, known: Callable[[torch.Tensor], bool]) -> None:
        """Read the loss that the backward pass began with, once, where nothing else gives it.

        Args:
            state: Of the thread that began it.
            known: Tells whether a layer gave a tensor, which was read then.
        """
        rows, number = state.rows, task()
        if rows is None or _last_pass[0] == number:
            return
        _last_pass[0] = number  # of several models the first one that it comes to reads it
        # What is scaled may overflow, but that alone makes no NaN: that is all that is read of it.
        scaled = bool(ever) and (in_use(state.scales) or in_sight())
        name = "scaled loss" if scaled else "loss"
        for x in backward_roots(state.thread.ident):
            if isinstance(x, torch.Tensor) and x.numel() == 1 and x.dtype in DTYPE_NAME:
                if known(x):
                    continue
                site = site_of(self.tracker.judge.monitor, None, "loss", name, x)
                order = len(rows.sites)
                value = x.detach().clamp(-1, 1) if scaled else x.detach()
                bad = state.slots.write(rows, site, max(len(state.step_roots) - 1, 0), value)
                expected = context._expected.get()
                if expected is not None:
                    rows.expect([order], expected)
                late = bad and not value.isnan() and self.scalers.scale(state) is not None
                if late:  # a scaler that was made just now
                    rows.clear_reading(order)
                elif bad:
                    self.flag(state, rows, rows.last, value)

    # What compiled code wrote.

    def take(self, state: State) -> None:
        """Move what compiled graphs wrote into this thread's rows, and have it judged if read.

        Raises:
            AnomalyError: As the tracker's action says.
        """
        for board, values, again in self.graphs.written(state.calls):
            self._take(state, board, values, again=again)

    def _take(self, state: State, board: Board, values: torch.Tensor, *, again: bool) -> None:
        if isinstance(state.slots, DeferredSlots):
            rows = state.rows or self.open(state)
            counts = dict(state.calls) if again else None
            state.slots.later(values, Late(self.graphs.plan, state, rows, board, counts))
            return
        plan, lo, hi = self.graphs.plan(board, values.cpu().numpy())
        if not plan.sites:
            return
        rows = state.rows or self.open(state)
        if not plan.write(state, rows, lo, hi, again=again):
            return
        with state.aside():
            try:
                self.tracker.judge.review(rows)
            except AnomalyError as error:
                # The user's stack is what matters, not the way through the core.
                raise error.with_traceback(None) from None

    def _take_first(self, state: State, rows: Step, order: int) -> int:
        """Put what compiled graphs wrote before an eager reading that needs judging.

        Returns:
            The reading's new place.
        """
        if state.slots.deferred or order != rows.last:
            return order
        root = state.roots.pop(order, None)
        try:
            rows.move_last(lambda: self.take(state))
        finally:
            if root is not None:
                state.roots[rows.last] = root
        return rows.last

    # Read.

    def read(self) -> None:
        """Read and judge this thread's unread rows now."""
        state = self._own()
        if state is None or state.idle:
            return
        self.take(state)
        state.idle = True
        try:
            with self.ranks.alone(state):
                self._read_open(state)
        finally:
            state.idle = False

    def settle(self, state: State) -> None:
        """Read what is unread of a thread, and conclude its ended steps."""
        state.slots.read()
        ended, state.ended = state.ended, []
        while ended:
            rows = ended.pop(0)
            if not state.slots.deferred:
                rows.mark_judged()
            self._conclude(state, rows)

    def _own(self) -> State | None:
        """Return this thread's state, None if nothing ran in it."""
        if self.graphs.ran():  # graphs do not say in which thread they ran
            return self.threads.state()
        return self.threads.own.state

    def _read_open(self, state: State) -> None:
        """Read and judge what a thread has so far."""
        self.settle(state)
        if state.rows is None:
            return
        state.slots.read()
        self.tracker.judge.review(state.rows)
        if state.depth == 0 and state.rows.pending is not None:
            rows = self.tracker.judge.close_step()
            if rows is not None:
                try:
                    self._conclude(state, rows)
                finally:
                    state.reset()

    def _conclude(self, state: State, rows: Step) -> None:
        """Judge what is left of an ended step."""
        tracker = self.tracker
        try:
            tracker.judge.review(rows)
            if rows.pending is not None and rows.scale is None and not worked(state.scales):
                tracker.judge.unscaled(rows)
        finally:
            tracker.judge.settle(rows)
        self.ranks.concluded(state, rows)

    # Close.

    def close(self, state: State, *, evaluation: bool = False) -> None:
        """Close the step, or a call without gradients: read it now, or every n steps."""
        rows = self.tracker.judge.close_step(evaluation=evaluation)
        if ever and state.saw_backward:
            forget_idle(state.uses)
        was_idle, state.idle = state.idle, True
        try:
            if state.operations is not None:
                self._end_watching(state, rows)
            if rows is not None:
                state.ended.append(rows)
                every = self.options.read
                if isinstance(every, int) and (rows.number + 1) % every and not rows.failed:
                    return
                self.settle(state)
                self.ranks.end(state, rows)
        finally:
            state.idle = was_idle
            state.reset()

    def finish(self) -> None:
        """Close the open steps and read what is left."""
        state = self._own()
        with self.ranks.alone():
            for other in list(self.threads.states):
                if other is not state:
                    self._read_rest(other)
            if state is None or state.idle:
                return
            self.take(state)
            if state.rows is not None:
                if not self.tracker.of_model:
                    state.rows.belongs_before()  # an update behind the last call
                self.close(state)
        self.read()

    def read_rest(self) -> None:
        """Read and judge what every thread left, when the model is gone."""
        with self.tracker.judge.softly(), self.ranks.alone():
            for state in list(self.threads.states):
                self._read_rest(state)

    def _read_rest(self, state: State) -> None:
        """Read and judge what a thread that is not this one left."""
        state.idle = True
        state.slots.read()
        unread, state.ended = [*state.ended, state.rows], []
        state.rows = None
        for rows in unread:
            if rows is not None:
                self._conclude(state, rows)

    def reset(self) -> None:
        """Forget the steps of every thread."""
        for state in list(self.threads.states):
            state.reset()

    def end_operations(self, *, judge: bool) -> None:
        """End the watchers of operations.

        They stand before what else is put in front of PyTorch's functions, so they go first.

        Args:
            judge: Whether what they saw is judged.
        """
        for state in list(self.threads.states):
            if state.operations is not None:
                self._end_watching(state, state.rows if judge else None)

    def _end_watching(self, state: State, rows: Step | None) -> None:
        """End a thread's watcher of operations; what it saw is judged with the rows, if given."""
        seen = state.operations.finish()
        state.operations = None  # only now: an interrupt may come at any line
        if rows is not None:
            state.slots.read()
            self.tracker.judge.operations(rows, lambda: seen)
