"""Where what compiled graphs wrote belongs among a step's rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anynan._base import context
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan.torch.call.state import State
from anynan.torch.graphs.fixed import Board


@dataclass(frozen=True, slots=True)
class Plan:
    """Say which slots of a board hold something, as rows in the order of execution.

    Attributes:
        sites: The slots, outputs first.
        forward: How many of them are outputs.
        at: Their rows and columns on the board.
        limits: Magnitudes at which they need judging.
    """

    sites: list[Site]
    forward: int
    at: tuple[np.ndarray, np.ndarray]
    limits: np.ndarray

    def numbers(self, counts: dict[str, int] | None) -> list[int]:
        """Number the calls that were the last ones, from 0; without counts they were the first."""
        if counts is None:
            return [0] * len(self.sites)
        return [counts.get(site.layer or "", 1) - 1 for site in self.sites]

    def clean(self, lo: np.ndarray, hi: np.ndarray) -> bool:
        """Tell whether nothing needs judging."""
        return bool(((lo >= -self.limits) & (hi <= self.limits)).all())

    def write(
        self, state: State, rows: Step, lo: np.ndarray, hi: np.ndarray, *, again: bool
    ) -> bool:
        """Append the rows of what the host has already.

        Args:
            state: The thread's open step.
            rows: Its rows.
            lo: The smallest values.
            hi: The largest.
            again: Whether a layer had run in this step before.

        Returns:
            Whether they need judging.
        """
        start = len(rows.lo)
        calls = self.numbers(state.calls if again else None)
        rows.extend(self.sites, calls, lo.tolist(), hi.tolist())
        between = start + self.forward
        if between < len(rows.lo):
            state.saw_backward = True
        clean = self.clean(lo, hi)
        rows.mark_judged(None if clean else start)  # what came before was judged as it was written
        if clean:
            return False
        expected = context._expected.get()
        if expected is not None:
            rows.expect(range(start, between), expected)
        if state.root is not None:
            state.roots.update(dict.fromkeys(range(between, len(rows.lo)), state.root))
        return True


Find = Callable[[Board, np.ndarray], tuple[Plan, np.ndarray, np.ndarray]]


class Late:
    """Put readings that are read later where they belong among a step's rows."""

    def __init__(
        self, plan: "Find", state: State, rows: Step, board: Board, counts: dict[str, int] | None
    ) -> None:
        self.plan, self.state, self.rows, self.board = plan, state, rows, board
        self.counts = counts
        self.end = len(rows.sites)
        self.root = state.root

    def __call__(self, flat: list[float]) -> None:
        """Take the values, shape (layers, 4), row by row."""
        rows = self.rows
        values = np.asarray(flat, np.float64).reshape(-1, 4)
        plan, lo, hi = self.plan(self.board, values)
        calls = plan.numbers(self.counts)
        others = rows.sites[rows.judged : self.end]
        calm = all(
            -site.limit <= low and high <= site.limit
            for site, low, high in zip(
                others, rows.lo[rows.judged : self.end], rows.hi[rows.judged : self.end],
                strict=True,
            )
        )  # fmt: skip
        if calm and plan.clean(lo, hi):  # then their order tells nothing
            rows.extend(plan.sites, calls, lo.tolist(), hi.tolist())
            return
        at = rows.judged
        for i, (site, low, high) in enumerate(
            zip(plan.sites, lo.tolist(), hi.tolist(), strict=True)
        ):
            at = self._place(site, at if i != plan.forward else rows.judged)
            rows.insert(at, site, calls[i], low, high)
            self._shift(at, site)
            at += 1

    def _place(self, site: Site, at: int) -> int:
        """Find the first row, from a place on, that must have come after."""
        rank, own = self.board.rank, self.board.rank[site.layer or ""]
        ends = ("loss", "backward", "optimizer", "parameter")
        while at < self.end:
            other = self.rows.sites[at]
            if other.phase == site.phase and other.parameter is None:
                place = rank.get(other.layer or "", own)
                if place > own if site.phase == "forward" else place < own:
                    break
            elif other.phase in ends and (site.phase == "forward" or other.parameter is not None):
                break
            at += 1
        return at

    def _shift(self, at: int, site: Site) -> None:
        """Move what the state knows by a row's place."""
        state = self.state
        if state.rows is self.rows:
            state.roots = {order + (order >= at): root for order, root in state.roots.items()}
            state.step_roots = [
                (start + (start > at or start == self.end), root)
                for start, root in state.step_roots
            ]
            if site.phase == "backward" and self.root is not None:
                state.roots[at] = self.root
        self.end += 1
