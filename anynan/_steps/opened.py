"""The open step of each thread, from its first reading to its end."""

import threading

from anynan._readings.history import Cleared
from anynan._readings.monitor import Monitor
from anynan._readings.readings import Site
from anynan._readings.step import Step
from anynan._steps import producers


class OpenSteps:
    """Hold the open steps, and number them in each thread."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._local = threading.local()
        self._since = producers.upcoming[0]

    def rows(self) -> Step:
        """Return this thread's open step; open it if there is none."""
        step: Step | None = getattr(self._local, "step", None)
        if step is None:
            step = self._local.step = Step(getattr(self._local, "next", 0))
            step.evaluated = self.evaluated
        return step

    @property
    def failed(self) -> Step | None:
        """Return this thread's open step if it failed."""
        step: Step | None = getattr(self._local, "step", None)
        return None if step is None or step.failed is None else step

    def count_to(self, step: Step) -> None:
        """Number what follows in this thread like a step of another, with which it belongs."""
        self._local.next, self._local.evaluated = step.number, step.evaluated

    def close(self, *, evaluation: bool = False) -> Step | None:
        """End this thread's step and count on; ``settle`` it when it is read.

        Args:
            evaluation: It was a call without gradients: no iteration of a training.
        """
        step: Step | None = getattr(self._local, "step", None)
        if step is not None:
            self._local.step = None
            self._local.next = step.number + 1
            self._local.since = producers.upcoming[0]
            if evaluation:
                self._local.evaluated = self.evaluated + 1
        return step

    def pass_over(self, sites: list[Site], squares: list[float]) -> bool:
        """Count a step of which everything read was clean, at little cost.

        Returns:
            False if one is open, which has to be closed.
        """
        local = self._local.__dict__  # asked once: it is another for each thread
        if local.get("step") is not None:
            return False
        number: int = local.get("next", 0)
        local["next"], local["since"] = number + 1, producers.upcoming[0]
        self._monitor.history.add(Cleared(number, sites, squares))
        return True

    @property
    def number(self) -> int:
        """Give the number of this thread's step, from 0."""
        step: Step | None = getattr(self._local, "step", None)
        return step.number if step is not None else getattr(self._local, "next", 0)

    @property
    def evaluated(self) -> int:
        """Count this thread's steps that took no gradients."""
        count: int = getattr(self._local, "evaluated", 0)
        return count

    @property
    def since(self) -> int:
        """Give the number of what was made bad first after this thread's last step."""
        return int(getattr(self._local, "since", self._since))

    def since_the_start(self) -> None:
        """Count the program before it was watched as its own: it is watched from its first call."""
        self._since = producers.began[0]
