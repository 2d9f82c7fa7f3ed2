"""Read the accumulated gradients of the weights, right before an update."""

import functools
import math
import sys
import weakref
from typing import Any

import torch

from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan.torch.call.state import State
from anynan.torch.private import foreach_div, foreach_norm, set_grad_enabled
from anynan.torch.read.probes import all_ends, plain
from anynan.torch.read.slots import DeferredSlots
from anynan.torch.step.steps import Steps
from anynan.torch.weights.optimizers import Held, exact_site, norm_dtype

_CHUNK = 1 << 16


class Gradients:
    """Read the gradients of weights, and have them and the step so far judged.

    Args:
        steps: Where the readings go.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._options = steps, steps.options
        self._monitor = steps.tracker.judge.monitor

    def read(
        self, state: State, rows: Step, held: Held, gradients: list[Any], scale: Any, *,
        skipped: bool = False,
    ) -> None:  # fmt: skip
        """Read the gradients, and have them and the step so far judged.

        A gradient's L2 norm is read first, in one call for all of them: a finite norm clears it.
        Any other norm proves nothing (a sum of squares overflows on finite values), so then the
        smallest and largest value are read. They are read at once where a norm would not settle
        it: where it is judged when the gradients are gone, or against a limit of the policy.

        Args:
            state: The thread's open step.
            rows: Its rows.
            held: The watched parameters of the optimizer that is about to step.
            gradients: Their gradients; None where there is none.
            scale: What the gradients are still multiplied by, None for nothing.
            skipped: True if a scaler skipped the update: then judging waits for the step's end, so
                that nothing is raised between the scaler's step and its update.
        """
        every = self._options.read
        later = isinstance(every, int) and bool((rows.number + 1) % every)
        # Nothing depends on the answer before the update: the device goes on into it unread.
        later = later or (self._options.only_watches and not self._steps.ranks.joined)
        slots, sites = state.slots, held.sites
        by_norms = False
        if self._options.backward:
            kept = [i for i, grad in enumerate(gradients) if grad is not None]
            if len(kept) < len(gradients):
                gradients, sites = [gradients[i] for i in kept], [sites[i] for i in kept]
            if gradients:
                strict = scale is None and held.limit < sys.float_info.max
                by_ends = slots.deferred and (later or strict)
                # What cannot be read again is kept from overflowing.
                dtype = _widest(gradients[0]) if by_ends else held.dtype
                norms, gradients, sites = _norms(gradients, sites, dtype, scale)
                if by_ends or norms is None:
                    self._write_ends(state, rows, sites, gradients, norms)
                else:
                    by_norms = True
                    _write_norms(slots, rows, sites, norms)
        if not slots.deferred:
            if by_norms:
                for order, grad in self._confirm(rows, gradients, sites, held.limit, scale):
                    self._steps.flag(state, rows, order, grad)
            if self._steps.tracker.judge.norms.on:
                with state.aside():
                    self._steps.tracker.judge.guard(rows)
        elif not later:
            with state.aside():
                if skipped:
                    slots.read()
                else:
                    self._steps.settle(state)
                if by_norms:
                    self._confirm(rows, gradients, sites, held.limit, scale)
                if not skipped:
                    self._steps.tracker.judge.review(rows)
                    self._steps.tracker.judge.guard(rows)

    def _confirm(
        self, rows: Step, gradients: list[Any], sites: list[Site], limit: float, scale: Any
    ) -> list[tuple[int, Any]]:
        """Read the ends of the gradients that their norms do not clear; list those that are bad.

        The step can look at these as long as they are there.

        Args:
            rows: The step's rows.
            gradients: What was read by norms.
            sites: The slots.
            limit: The tightest of the slots' limits.
            scale: What the gradients are still multiplied by, None for nothing.
        """
        if rows.follows:
            return []
        last = len(rows.lo) - 1
        # What comes after may have been written by compiled graphs.
        while rows.sites[last] is not sites[-1]:
            last -= 1
        start = last + 1 - len(sites)
        sizes = rows.hi[start : start + len(sites)]
        # The sum bounds every norm, and carries NaN and Inf.
        if sum(sizes) <= limit:
            return []
        found: list[tuple[int, Any]] = []
        open_ = [i for i, size in enumerate(sizes) if not size <= sites[i].limit]
        nan = next((i for i in open_ if math.isnan(sizes[i])), None)
        if nan is not None and self._steps.tracker.judge.is_corrupted(rows):
            found = [(start + nan, gradients[nan])]  # one is enough to say so
            open_ = []
        values = {i: plain(gradients[i]) for i in open_}
        looked = {i: x for i, x in values.items() if x is not None}
        factor = 1.0 if scale is None else 1.0 / float(scale)
        for (i, x), (lo, hi) in zip(looked.items(), all_ends(list(looked.values())), strict=True):
            order = start + i
            site = exact_site(self._monitor, sites[i])
            size = sizes[i]
            if math.isinf(size) and -math.inf < lo and hi < math.inf:
                size = safe_norm(x, max(-lo, hi)) * factor
            rows.correct(order, lo * factor, hi * factor, site=site, norm=size)
            if not (-site.limit <= lo * factor and hi * factor <= site.limit):
                found.append((order, gradients[i]))
        for order, grad in found:
            rows.keep(order, weakref.ref(grad))
        return found

    def _write_ends(
        self, state: State, rows: Step, sites: list[Site], gradients: list[Any],
        norms: list[torch.Tensor] | None,
    ) -> None:  # fmt: skip
        """Write the ends of each gradient, and its norm beside them."""
        slots = state.slots
        orders: list[int | None] = []
        for site, grad in zip(sites, gradients, strict=True):
            values = plain(grad)
            orders.append(None if values is None else len(rows.sites))
            if values is not None and slots.write(rows, exact_site(self._monitor, site), 0, values):
                self._steps.flag(state, rows, rows.last, grad)
        if norms is None or not isinstance(slots, DeferredSlots):
            return

        def place(sizes: list[float]) -> None:
            for order, size in zip(orders, sizes, strict=True):
                if order is None:
                    continue
                # Of finite values an infinite norm says nothing.
                finite = -math.inf < rows.lo[order] and rows.hi[order] < math.inf
                if size < math.inf or not finite:
                    rows.add_norm(order, size)

        # In the dtype of the slots beside them: one cast less at the read.
        double = gradients[0].dtype is torch.float64
        slots.later(_stacked(norms, torch.float64 if double else torch.float32), place)


def _widest(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _norms(
    gradients: list[Any], sites: list[Site], dtype: torch.dtype | None, scale: Any
) -> tuple[list[torch.Tensor] | None, list[Any], list[Site]]:
    """Return the L2 norms, None where there are none, and what they are the norms of."""
    norms = _foreach_norm(gradients, dtype)
    if norms is None:
        # A sparse gradient has no such norm, nor does a shard speak for the whole: its values do.
        pairs = [(plain(grad), site) for grad, site in zip(gradients, sites, strict=True)]
        gradients = [values for values, _ in pairs if values is not None]
        sites = [site for values, site in pairs if values is not None]
        norms = _foreach_norm(gradients, norm_dtype(gradients)) if gradients else None
    if norms is not None and scale is not None:
        norms = list(foreach_div(norms, scale))
    return norms, gradients, sites


def _foreach_norm(gradients: list[Any], dtype: torch.dtype | None) -> list[torch.Tensor] | None:
    hidden = torch.is_grad_enabled()
    try:
        if hidden:  # inside: Ctrl-C may come as it returns
            set_grad_enabled(False)
        norms = foreach_norm(gradients, 2, dtype)
    except RuntimeError:
        return None
    finally:
        if hidden:
            set_grad_enabled(True)
    return list(norms) if type(norms[0]) is torch.Tensor else None


def _write_norms(slots: Any, rows: Step, sites: list[Site], norms: list[torch.Tensor]) -> None:
    if slots.deferred:
        slots.later(_stacked(norms, norms[0].dtype), functools.partial(rows.add_norms, sites))
    else:
        rows.add_norms(sites, torch.stack(norms).tolist())


def _stacked(norms: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Put scalars into one tensor of a dtype, in one copy; those of other devices come along."""
    device = norms[0].device
    with torch.no_grad():
        out = torch.empty(len(norms), dtype=dtype, device=device)
        near = [x if x.device == device else x.to(device, non_blocking=True) for x in norms]
        return torch.stack(near, out=out)


def safe_norm(values: torch.Tensor, absmax: float) -> float:
    """Return the L2 norm of finite values, in pieces of float64 that cannot overflow.

    Args:
        values: A ``plain`` tensor.
        absmax: Its largest magnitude.
    """
    if not absmax:
        return 0.0
    flat = values.reshape(-1)
    square = sum(
        float((flat[at : at + _CHUNK].to(torch.float64) / absmax).square().sum())
        for at in range(0, flat.numel(), _CHUNK)
    )
    return absmax * math.sqrt(square)
