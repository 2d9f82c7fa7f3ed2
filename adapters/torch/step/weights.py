"""Weights and buffers: looked at when tracking starts and when a step fails."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from anynan._steps.adapter import BadParameter
from anynan._steps.monitor import Rows
from anynan.torch.read.probes import DTYPE_MAX, DTYPE_NAME, measure, nonfinite, plain, read_ends

if TYPE_CHECKING:
    from anynan.torch.session.session import Session
from anynan.torch.call.state import State


def write_parameters(session: "Session", state: "State", rows: Rows) -> None:
    """Read every weight and buffer."""
    for name, x in all_tensors(session):
        if x.dtype in DTYPE_NAME and name not in session.masks:
            site = session.tracker.monitor.site(
                name.rpartition(".")[0],
                "parameter",
                name.rpartition(".")[2],
                DTYPE_NAME[x.dtype],
                DTYPE_MAX[x.dtype],
                parameter=name,
            )
            session.write(state, rows, site, 0, x)
    if not state.slots.deferred and rows.failed is None:
        session.tracker.known_clean(rows.step)


def all_tensors(session: "Session") -> list[tuple[str, torch.Tensor]]:
    """List weights and buffers by their full clean names."""
    return [*session.parameters(), *session.buffers()]


def check_parameters(session: "Session") -> None:
    """Look at every weight and buffer once, as at attach."""
    bad = bad_parameters(session)
    if not bad:
        session.tracker.known_clean(session.tracker.step)
        return
    state = session.state()
    rows = session.tracker.rows()
    first = bad[0]
    site = session.tracker.monitor.site(
        first.layer, "parameter", first.name.rpartition(".")[2], first.summary.dtype, None,
        parameter=first.name,
    )  # fmt: skip
    rows.sites.append(site)
    rows.calls.append(0)
    rows.lo.append(math.nan if first.summary.nan else first.summary.low or 0.0)
    rows.hi.append(math.nan if first.summary.nan else first.summary.high or 0.0)
    try:
        session.flag(state, rows, len(rows.lo) - 1, dict(all_tensors(session))[first.name])
    finally:
        if rows.failed is not None:
            rows.failed = None


def bad_parameters(session: "Session", *, read: bool = False) -> list[BadParameter]:
    """List weights with a NaN or an Inf and buffers with a NaN or +Inf.

    Args:
        session: What is tracked.
        read: Leave out what a call only writes: running statistics while training.
    """
    found = []
    unread = _unread(session) if read else set()
    weights = {name for name, _ in session.parameters()}
    judge = session.options.policy.judge
    for name, x in all_tensors(session):
        values = None if id(x) in unread else plain(x)
        if values is None:
            continue
        lo, hi = read_ends(values)
        if -math.inf < lo and hi < math.inf:
            continue
        layer = name.rpartition(".")[0]
        # A buffer of -Inf is a mask until something bad follows.
        phase: Any = "parameter" if name in weights else "forward"
        judged = judge(phase, lo, hi, layer=layer)
        if phase == "forward" and lo == -math.inf and hi < math.inf:
            session.masks.add(name)
        if judged is None or judged[1] != "bad":
            continue
        gradient = getattr(x, "grad", None)
        if gradient is not None and nonfinite(gradient):
            gradient = None  # made by the bad weight, after the update
        state = {}
        for optimizer in list(session._held):
            for key, value in optimizer.state.get(x, {}).items():
                if isinstance(value, torch.Tensor) and value.numel():
                    state[str(key)] = measure(value)
        held = any(x is p for entry in session._held.values() for p in entry.parameters)
        found.append(
            BadParameter(
                name, layer, measure(x), name not in weights,
                None if gradient is None else measure(gradient), state, held,
            )
        )  # fmt: skip
    return found


def _unread(session: "Session") -> set[int]:
    """Give the ids of running statistics that training updates and does not use."""
    return {
        id(x)
        for _, ref in session.models
        if (model := ref()) is not None
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training
        for x in module.buffers(recurse=False)
    }
