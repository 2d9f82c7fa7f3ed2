"""Run an entry of one of PyTorch's own tables, sample by sample, without and with `anynan`."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import anynan
import anynan.torch
from tests.wild.rows import LEVELS, YES, Fault, Row
from tests.wild.torch_silence import events_of, listening, silence
from tests.wild.torch_state import Footprint, backward, differing, finite, seed, tensors


@dataclass
class Result:
    values: dict[str, list[Any]]
    inputs_finite: bool
    warnings: list[str]
    events: list[Any] = field(default_factory=list)
    left: str = YES

    @property
    def finite(self) -> bool:
        """Tell whether nothing that went in or came out is NaN or Inf."""
        return self.inputs_finite and finite(v for vs in self.values.values() for v in vs)


def called(
    model: nn.Module,
    args: Iterable[Any],
    kwargs: dict[str, Any],
    *,
    level: Any,
    learns: bool = True,
    whole: bool = False,
) -> Result:
    """Call a module, and run the backward pass of all it returns.

    It is tracked where a level is given: the step if ``whole``, else the module.
    """
    args = tuple(args)
    inputs: list[Tensor] = tensors((args, kwargs))
    in_range = finite(inputs)

    def step() -> Any:
        outputs = model(*args, **kwargs)
        if learns:
            backward(outputs)
        return outputs

    footprint = Footprint(model)
    events: list[Any] = []
    left = YES
    seed(2)
    with listening() as warnings:
        if level is None:
            outputs = step()
        else:
            target = step if whole else model
            tracker = anynan.torch.track(
                target, level=level, action="record", advanced=anynan.Advanced(across_ranks=False)
            )
            outputs = tracker() if whole else step()
            tracker.flush()
            events = list(tracker.events)
            tracker.remove()
            alive = weakref.ref(tracker)
            del tracker
            left = footprint.left(alive)
    values: dict[str, list[Any]] = {
        "outputs": [tensor.detach() for tensor in tensors(outputs)],
        "gradients": [tensor.grad for tensor in [*model.parameters(), *inputs]],
        "weights": [tensor.detach() for tensor in model.parameters()],
        "buffers": list(model.buffers()),
        "inputs": [tensor.detach() for tensor in inputs],
        "random state": [torch.get_rng_state()],
    }
    return Result(values, in_range, warnings, events, left)


def rows(
    suite: str, case: str, samples: int, run: Callable[[int, str | None], Result]
) -> Iterator[Row]:
    plain: dict[int, Result] = {}
    why = "no sample"
    for number in range(samples):
        try:
            plain[number] = run(number, None)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:200]
    if not plain:
        yield Row(suite, case, skipped=why)
        return
    for level in LEVELS:
        row = Row(suite, case, level, identical=YES, silent=YES, clean=YES)
        for number, untracked in plain.items():
            tracked = run(number, level)
            differs = differing(untracked.values, tracked.values)
            if differs and not differing(untracked.values, run(number, None).values):
                row.identical = f"no: {', '.join(differs)} of sample {number}"
            events = tracked.events
            if not untracked.finite:
                # Bad without a fault of ours: then it has to be said.
                if untracked.inputs_finite:
                    row.faults.append(by_nature(number, events))
                events = []
            said = silence(untracked.warnings, tracked.warnings, events)
            row.silent = row.silent if said == YES else f"sample {number}: {said}"
            row.clean = row.clean if tracked.left == YES else tracked.left
        yield row


def by_nature(number: int, events: list[Any]) -> Fault:
    """Judge what was said of a sample whose result is NaN or Inf by itself."""
    fault = Fault("by nature", f"sample {number}", detected=bool(events))
    if events:
        cause = events[0].cause
        fault.operation = events[0].operation is not None
        fault.cause = cause is not None and cause.tag != "unknown"
        fault.said = "; ".join(events_of(events[:2]))
    return fault
