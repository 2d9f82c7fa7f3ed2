"""Models that run as compiled graphs: their readings, and graphs that do not hold the hooks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anynan._readings.readings import Site
from anynan._steps.tracked import Tracked
from anynan.torch.call.models import Models
from anynan.torch.graphs.compiler import has_graphs, look_for_hooks
from anynan.torch.graphs.fixed import Board, Layer
from anynan.torch.graphs.plans import Plan
from anynan.torch.messages import (
    COMPILED_BEFORE_TRACK,
    COMPILED_OUTPUT_UNREAD,
    COMPILED_STATS,
    COMPILED_UNWATCHED,
    LAYERS_UNSEEN,
    TRANSFORMED,
)
from anynan.torch.private import count_graphs, is_compiler_loaded
from anynan.torch.read.probes import DTYPE_MAX, DTYPE_NAME


class Graphs:
    """Know the fixed slots that compiled code writes to.

    Args:
        tracker: What is told.
        models: What is watched.

    Attributes:
        boards: The slots of each model on each device.
    """

    def __init__(self, tracker: Tracked, models: Models) -> None:
        self._tracker, self._models = tracker, models
        self.boards: list[Board] = []
        self._renewed = False

    # Attaching.

    def add(self, modules: dict[torch.nn.Module, str], model: torch.nn.Module) -> dict[str, Layer]:
        """Make fixed slots for the layers of a model, on the devices they are on."""
        default = _device(model) or torch.device("cpu")
        by_device: dict[torch.device, list[str]] = {}
        for module, path in modules.items():
            by_device.setdefault(_device(module) or default, []).append(path)
        found: dict[str, Layer] = {}
        for device, paths in by_device.items():
            if device.type != "meta":
                board = Board(paths, device)
                self.boards.append(board)
                found.update(zip(board.paths, board.layers, strict=True))
        return found

    def renew(self, model: torch.nn.Module) -> None:
        """Drop graphs that were compiled without the hooks: PyTorch would go on using them.

        By default it does not look for new hooks, nor at which model of a class has some
        (``skip_nnmodule_hook_guards``).
        """
        if not is_compiler_loaded():
            return
        look_for_hooks()
        if has_graphs(model):
            torch.compiler.reset()
            what = "graphs compiled before track() do not hold its hooks"
            self._tracker.judge.remark(COMPILED_BEFORE_TRACK(what=what))

    def clear(self) -> None:
        """Forget what was written so far."""
        for board in self.boards:
            board.take()

    # What ran.

    def ran(self) -> bool:
        """Tell whether any layer ran inside a graph."""
        return any(board.active or board.transformed for board in self.boards)

    def ran_now(self) -> bool:
        """Tell whether a layer ran inside a graph since its readings were last taken."""
        return any(layer.ran is not None for board in self.boards for layer in board.layers)

    def hides(self) -> bool:
        """Tell whether a call that nobody saw may be inside compiled code."""
        return is_compiler_loaded() and count_graphs() > 0

    def missed(self, *, called: bool) -> bool:
        """See to a model that ran without a hook of its layers: a graph compiled before ``track``.

        Args:
            called: Whether the model's own call was seen; else only its gradients were.

        Returns:
            True if that is why, or may be: which models a graph of somebody else's code runs
            cannot be told. The graphs are dropped then.
        """
        if self._models.options.level == "step":  # nothing is wanted of a graph's inside
            return False
        if not is_compiler_loaded():
            return False
        models = [model for _, model in self._models.living()]
        if called and not any(has_graphs(model) for model in models):
            return False
        if not called and not count_graphs():
            return False
        if self._renewed:
            self._tracker.judge.say(
                COMPILED_UNWATCHED() if called else LAYERS_UNSEEN(again=" once more")
            )
            return True
        self._renewed = True
        look_for_hooks()
        torch.compiler.reset()
        what = (
            "the layers ran in a graph that was compiled before track() and does not hold its hooks"
            if called
            else "weights got gradients, but no watched layer was seen running: they "
            "may have run in a graph that was compiled before track() and does not hold its hooks"
        )
        self._tracker.judge.say(
            COMPILED_BEFORE_TRACK(what=f"{what}, and this step was not watched")
        )
        return True

    # What it wrote.

    def written(self, calls: dict[str, int]) -> Iterator[tuple[Board, torch.Tensor, bool]]:
        """Take what was written since the last time, board by board.

        Args:
            calls: Calls in this step by path, counted on.

        Yields:
            The board, its values, and whether a layer had run in this step before.
        """
        for board in self.boards:
            if board.transformed:
                board.transformed = False
                self._tracker.judge.say(TRANSFORMED())
            if board.unseen:
                board.unseen = False
                self._tracker.judge.say(COMPILED_OUTPUT_UNREAD(device=board.device))
            if board.active:
                extra = self._models.options.extra
                if extra:
                    self._tracker.judge.say(COMPILED_STATS(stats=", ".join(extra)))
                again = board.calls(calls)
                yield board, board.take(), again

    def plan(self, board: Board, values: np.ndarray) -> tuple[Plan, np.ndarray, np.ndarray]:
        """Find what was written: the plan, and the ends of each row of it."""
        written = ~(values[:, 0::2] > values[:, 1::2])
        key = written.tobytes()
        plan: Plan | None = board.plans.get(key)
        if plan is None:
            outputs = np.flatnonzero(written[:, 0])
            gradients = np.flatnonzero(written[:, 1])[::-1]
            sites = [self._site(board, i, "forward") for i in outputs.tolist()]
            sites += [self._site(board, i, "backward") for i in gradients.tolist()]
            which = np.concatenate([outputs, gradients])
            columns = np.repeat([0, 2], [len(outputs), len(gradients)])
            limits = np.array([site.limit for site in sites])
            plan = Plan(sites, len(outputs), (which, columns), limits)
            board.plans[key] = plan
        rows, columns = plan.at
        return plan, values[rows, columns], values[rows, columns + 1]

    def _site(self, board: Board, i: int, phase: Any) -> Site:
        dtype = board.layers[i].dtype or torch.float32
        name = "output" if phase == "forward" else "grad"
        site = self._tracker.judge.monitor.site
        return site(board.paths[i], phase, name, DTYPE_NAME[dtype], DTYPE_MAX[dtype])


def _device(module: torch.nn.Module) -> torch.device | None:
    first = next(iter(module.parameters()), None)
    return None if first is None else first.device
