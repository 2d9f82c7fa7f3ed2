"""Read the accumulated gradients of the weights, right before an update."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anynan.monitor import Rows, Site
from anynan.torch.probes import DTYPE_MAX, plain, read_ends
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
    if any(grad is None for grad in gradients):
        kept = [i for i, grad in enumerate(gradients) if grad is not None]
        gradients, sites = [gradients[i] for i in kept], [sites[i] for i in kept]
    if not gradients:
        return
    sizes = None if isinstance(state.slots, DeferredSlots) else _norms(gradients)
    if sizes is None:
        _write_ends(session, state, rows, sites, gradients)
        return
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


def _norms(gradients: list[Any]) -> list[float] | None:
    """Return the L2 norms, None for gradients that must be looked at one by one."""
    try:
        with torch.no_grad():
            norms = torch._foreach_norm(gradients)
    except RuntimeError:  # a sparse gradient has no such norm
        return None
    if type(norms[0]) is not torch.Tensor:  # nor does a shard speak for the whole
        return None
    return [norm.item() for norm in norms]


def _write_ends(
    session: "Session", state: "State", rows: Rows, sites: list[Site], gradients: list[Any]
) -> None:
    for site, grad in zip(sites, gradients, strict=True):
        values = plain(grad)
        if values is not None and state.slots.write(rows, exact_site(session, site), 0, values):
            session.flag(state, rows, len(rows.lo) - 1, grad)


def gradient_site(session: "Session", name: str, p: torch.Tensor) -> Site:
    """Return the slot that holds the norm of a weight's gradient."""
    return session.tracker.monitor.site(
        name.rpartition(".")[0],
        "backward",
        f"grad of {name.rpartition('.')[2]}",
        str(p.dtype).removeprefix("torch."),
        DTYPE_MAX.get(p.dtype),
        parameter=name,
        bound=True,
    )


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
