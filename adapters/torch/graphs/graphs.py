"""Models that run as compiled graphs: their readings, and graphs that do not hold the hooks."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anynan._steps import context
from anynan._steps.monitor import Rows, Site
from anynan.errors import AnomalyError
from anynan.torch.call.state import State
from anynan.torch.graphs.fixed import Board, Layer
from anynan.torch.read.probes import DTYPE_MAX, DTYPE_NAME
from anynan.torch.read.slots import DeferredSlots
from anynan.torch.read.transforms import TRANSFORMED

if TYPE_CHECKING:
    from anynan.torch.session.session import Session

_before: list[Any] = []  # the setting's default, while something is tracked
_frames = torch._C._dynamo.eval_frame


def run_outside(*functions: Any) -> None:
    """Let functions run as they are when a compiled module calls them.

    What PyTorch compiles around a module's own hooks is each of them alone; these, and what
    they call, are left to Python. Inlined in a graph they are still traced.
    """
    strategy = getattr(_frames, "_FrameExecStrategy", None)
    if strategy is None:  # before 2.7: they are compiled alone, and return at once
        return
    skip = _frames._FrameAction.SKIP
    for function in functions:
        _frames.set_code_exec_strategy(function.__code__, strategy(skip, skip))


def boards(modules: dict[torch.nn.Module, str], model: torch.nn.Module) -> dict[str, Layer]:
    """Make fixed slots for layers, on the devices they are on."""
    default = _device(model) or torch.device("cpu")
    by_device: dict[torch.device, list[str]] = {}
    for module, path in modules.items():
        by_device.setdefault(_device(module) or default, []).append(path)
    found: dict[str, Layer] = {}
    for device, paths in by_device.items():
        if device.type != "meta":
            board = Board(paths, device)
            found.update(zip(board.paths, board.layers, strict=True))
    return found


def _device(module: torch.nn.Module) -> torch.device | None:
    first = next(module.parameters(), None)
    return None if first is None else first.device


def take(session: "Session", state: State) -> None:
    """Move what compiled graphs wrote into this thread's rows, and have it judged if read.

    Raises:
        AnomalyError: As the tracker's action says.
    """
    for board in session.boards:
        if board.transformed:
            board.transformed = False
            session.tracker.say(TRANSFORMED)
        if board.unseen:
            board.unseen = False
            session.tracker.say(
                "an output inside compiled code is not watched: it is of a float8 dtype, or not "
                f"on {board.device}, where its layer's weights were when track() was called"
            )
        if board.active:
            _take(session, state, board)


def _take(session: "Session", state: State, board: Board) -> None:
    if session.options.extra:
        session.tracker.say(
            f"stats={', '.join(session.options.extra)} are not measured inside compiled code, "
            "only min, max and absmax are"
        )
    again = board.calls(state.calls)
    values = board.take()
    if isinstance(state.slots, DeferredSlots):
        rows = state.rows or session.open_step(state)
        counts = dict(state.calls) if again else None
        state.slots.later(values, _Late(session, state, rows, board, counts))
        return
    plan, lo, hi = _plan(session, board, values.cpu().numpy())
    if not plan.sites:
        return
    rows = state.rows or session.open_step(state)
    start = len(rows.lo)
    rows.sites += plan.sites
    rows.calls += plan.numbers(state.calls) if again else plan.calls
    rows.lo += lo.tolist()
    rows.hi += hi.tolist()
    between = start + plan.forward
    if between < len(rows.lo):
        state.saw_backward = True
    rows.judged = len(rows.lo)
    if plan.clean(lo, hi):
        return
    rows.judged = start  # what came before was judged as it was written
    expected = context._expected.get()
    if expected is not None:
        rows.expected.update(dict.fromkeys(range(start, between), expected))
    if state.root is not None:
        state.roots.update(dict.fromkeys(range(between, len(rows.lo)), state.root))
    with session.aside(state):
        try:
            session.tracker.judge(rows)
        except AnomalyError as error:
            # The user's stack is what matters, not the way through the core.
            raise error.with_traceback(None) from None


def take_first(session: "Session", state: State, rows: Rows, order: int) -> int:
    """Put what compiled graphs wrote before an eager reading that needs judging.

    Returns:
        The reading's new place.
    """
    if not ran(session) or state.slots.deferred or order != len(rows.lo) - 1:
        return order
    site, call, lo, hi = rows.sites.pop(), rows.calls.pop(), rows.lo.pop(), rows.hi.pop()
    stats, expected = rows.stats.pop(order, None), rows.expected.pop(order, None)
    root = state.roots.pop(order, None)
    try:
        take(session, state)
    finally:
        order = len(rows.lo)
        rows.insert(order, site, call, lo, hi)
        if stats is not None:
            rows.stats[order] = stats
        if expected is not None:
            rows.expected[order] = expected
        if root is not None:
            state.roots[order] = root
    return order


def ran(session: "Session") -> bool:
    """Tell whether any layer ran inside a graph."""
    return any(board.active or board.transformed for board in session.boards)


def ran_now(session: "Session") -> bool:
    """Tell whether a layer ran inside a graph since its readings were last taken."""
    return any(layer.ran is not None for board in session.boards for layer in board.layers)


def eager() -> AbstractContextManager[Any]:
    """Run compiled modules and functions uncompiled inside."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def renew(session: "Session", model: torch.nn.Module) -> None:
    """Drop graphs that were compiled without the hooks: PyTorch would go on using them.

    By default it does not look for new hooks, nor at which model of a class has some
    (``skip_nnmodule_hook_guards``).
    """
    if "torch._dynamo" not in sys.modules:
        return
    _look_for_hooks()
    if _has_graphs(model):
        torch.compiler.reset()
        session.tracker.remark(
            "graphs compiled before track() do not hold its hooks: all compiled code was dropped "
            "(torch.compiler.reset) and is compiled again when it runs"
        )


def _look_for_hooks() -> None:
    """Have a graph without hooks used only for models without hooks, from now on.

    The default is changed: what is set is set for one thread, which need not be the one that
    runs the model or removes the tracker. A value that the program set itself stays.
    """
    if not _before:
        entry = _setting()
        _before.append(entry.default)
        entry.default = False


def look_no_more() -> None:
    """Put PyTorch's own setting back once nothing is tracked."""
    if _before:
        _setting().default = _before.pop()


def _setting() -> Any:
    config: Any = torch._dynamo.config
    return config._config["skip_nnmodule_hook_guards"]


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _has_graphs(model: torch.nn.Module) -> bool:
    entries = getattr(_frames, "_debug_get_cache_entry_list", None)
    if entries is None:
        return True
    from torch._dynamo.external_utils import wrap_inline

    codes = set()
    for module in model.modules():
        if _is_compiled(module):
            # Each of these codes stands for everything that is compiled by way of it.
            codes |= {torch.nn.Module._call_impl.__code__, wrap_inline(_has_graphs).__code__}
        code = getattr(module.forward, "__code__", None)
        if code is not None:
            codes.add(code)
    return any(entries(code) for code in codes)


def missed(session: "Session", *, called: bool) -> bool:
    """See to a model that ran without a hook of its layers: a graph compiled before ``track``.

    Args:
        session: What is tracked.
        called: Whether the model's own call was seen; else only its gradients were.

    Returns:
        True if that is why, or may be: which models a graph of somebody else's code runs cannot
        be told. The graphs are dropped then.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    models = [model for _, ref in session.models if (model := ref()) is not None]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if (called and not any(_has_graphs(model) for model in models)) or (not called and not graphs):
        return False
    if session.renewed:
        session.tracker.say(
            "the layers ran in a graph without hooks once more, and are not watched there"
            if called
            else "once more weights got gradients from layers that were not seen running"
        )
        return True
    session.renewed = True
    _look_for_hooks()
    torch.compiler.reset()
    what = (
        "the layers ran in a graph that was compiled before track() and does not hold its hooks"
        if called
        else "weights got gradients, but none of the watched layers was seen running: they may "
        "have run in a graph that was compiled before track() and does not hold its hooks"
    )
    session.tracker.say(
        f"{what}: this step was not watched; all compiled code was dropped "
        "(torch.compiler.reset), and is compiled again, with the hooks, when it runs"
    )
    return True


@dataclass(frozen=True, slots=True)
class _Plan:
    """Say which slots of a board hold something, as rows in the order of execution.

    Attributes:
        sites: The slots, outputs first.
        forward: How many of them are outputs.
        at: Their rows and columns on the board.
        limits: Magnitudes at which they need judging.
        calls: A zero for each.
    """

    sites: list[Site]
    forward: int
    at: tuple[np.ndarray, np.ndarray]
    limits: np.ndarray
    calls: list[int]

    def numbers(self, counts: dict[str, int]) -> list[int]:
        """Number the calls that were the last ones, from 0."""
        return [counts.get(site.layer or "", 1) - 1 for site in self.sites]

    def clean(self, lo: np.ndarray, hi: np.ndarray) -> bool:
        """Tell whether nothing needs judging."""
        return bool(((lo >= -self.limits) & (hi <= self.limits)).all())


def _plan(
    session: "Session", board: Board, values: np.ndarray
) -> tuple[_Plan, np.ndarray, np.ndarray]:
    """Find what was written: the plan, and the ends of each row of it."""
    written = ~(values[:, 0::2] > values[:, 1::2])
    key = written.tobytes()
    plan = board.plans.get(key)
    if plan is None:
        outputs = np.flatnonzero(written[:, 0])
        gradients = np.flatnonzero(written[:, 1])[::-1]
        sites = [_site(session, board, i, "forward") for i in outputs.tolist()]
        sites += [_site(session, board, i, "backward") for i in gradients.tolist()]
        which = np.concatenate([outputs, gradients])
        columns = np.repeat([0, 2], [len(outputs), len(gradients)])
        limits = np.array([site.limit for site in sites])
        plan = _Plan(sites, len(outputs), (which, columns), limits, [0] * len(sites))
        board.plans[key] = plan
    rows, columns = plan.at
    return plan, values[rows, columns], values[rows, columns + 1]


def _site(session: "Session", board: Board, i: int, phase: Any) -> Site:
    dtype = board.layers[i].dtype or torch.float32
    return session.tracker.monitor.site(
        board.paths[i], phase, "output" if phase == "forward" else "grad",
        DTYPE_NAME[dtype], DTYPE_MAX[dtype],
    )  # fmt: skip


class _Late:
    """Put readings that are read later where they belong among a step's rows."""

    def __init__(
        self,
        session: "Session",
        state: State,
        rows: Rows,
        board: Board,
        counts: dict[str, int] | None,
    ) -> None:
        self.session, self.state, self.rows, self.board = session, state, rows, board
        self.counts = counts
        self.end = len(rows.sites)
        self.root = state.root

    def __call__(self, flat: list[float]) -> None:
        """Take the values, shape (layers, 4), row by row."""
        rows = self.rows
        values = np.asarray(flat, np.float64).reshape(-1, 4)
        plan, lo, hi = _plan(self.session, self.board, values)
        calls = plan.calls if self.counts is None else plan.numbers(self.counts)
        others = rows.sites[rows.judged : self.end]
        calm = all(
            -site.limit <= low and high <= site.limit
            for site, low, high in zip(
                others, rows.lo[rows.judged : self.end], rows.hi[rows.judged : self.end],
                strict=True,
            )
        )  # fmt: skip
        if calm and plan.clean(lo, hi):  # then their order tells nothing
            rows.sites += plan.sites
            rows.calls += calls
            rows.lo += lo.tolist()
            rows.hi += hi.tolist()
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
