"""Read the accumulated gradients of the weights, right before an update."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anynan.monitor import Rows, Site
from anynan.torch.probes import plain, read_ends
from anynan.torch.slots import DeferredSlots

if TYPE_CHECKING:
    from anynan.torch.session import Session
from anynan.torch.state import State


@dataclass(frozen=True, slots=True)
class Held:
    """List the watched parameters of one optimizer.

    Attributes:
        size: Number of parameters the optimizer held when this list was made.
        parameters: Those that are watched.
        sites: Their gradient slots.
        limit: The tightest of the slots' limits.
    """

    size: int
    parameters: list[torch.Tensor]
    sites: list[Site]
    limit: float


def write_gradients(
    session: "Session", state: "State", rows: Rows, held: Held, gradients: list[Any]
) -> None:
    """Write one reading for each gradient.

    On the host a gradient's L2 norm is read: a finite norm clears it, any other norm proves
    nothing (a sum of squares overflows on finite values), so then its ends are read.
    """
    sites = held.sites
    if None in [None if grad is None else 0 for grad in gradients]:
        kept = [i for i, grad in enumerate(gradients) if grad is not None]
        gradients, sites = [gradients[i] for i in kept], [sites[i] for i in kept]
    if not gradients:
        return
    if isinstance(state.slots, DeferredSlots):
        _write_ends(session, state, rows, sites, gradients)
        return
    first = gradients[0].dtype
    plain_ones = all(
        type(grad) is torch.Tensor and grad.layout is torch.strided and grad.dtype is first
        for grad in gradients
    )
    if not plain_ones or any(not grad.numel() for grad in gradients):
        _write_ends(session, state, rows, sites, gradients)
        return
    with torch.no_grad():
        sizes = torch.stack(torch._foreach_norm(gradients)).tolist()
    start = len(rows.lo)
    rows.sites.extend(sites)
    rows.calls.extend([0] * len(sites))
    rows.lo.extend([-size for size in sizes])
    rows.hi.extend(sizes)
    policy = session.options.policy
    if policy.spike is not None or policy.vanishing is not None:
        session.guard(state, rows, math.hypot(*sizes))
    # The sum bounds every norm, and carries NaN and Inf.
    if sum(sizes) <= held.limit:
        return
    for i, size in enumerate(sizes):
        if size <= sites[i].limit:
            continue
        order = start + i
        site = rows.sites[order] = exact_site(session, sites[i])
        lo, hi = rows.lo[order], rows.hi[order] = read_ends(gradients[i].detach())
        if not (-site.limit <= lo and hi <= site.limit):
            session.flag(state, rows, order, gradients[i])


def _write_ends(
    session: "Session", state: "State", rows: Rows, sites: list[Site], gradients: list[Any]
) -> None:
    for site, grad in zip(sites, gradients, strict=True):
        values = plain(grad)
        if values is not None and state.slots.write(rows, exact_site(session, site), 0, values):
            session.flag(state, rows, len(rows.lo) - 1, grad)


def exact_site(session: "Session", site: Site) -> Site:
    """Return the slot that holds a gradient's ends instead of its norm."""
    return session.tracker.monitor.site(
        site.layer,
        site.phase,
        site.tensor,
        site.dtype,
        site.dtype_max,
        parameter=site.parameter,
    )
