"""PyTorch's own table of modules, with its own samples of arguments."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

import anynan
import anynan.torch
from tests.wild.rows import YES, Row
from tests.wild.torch_silence import listening, silence
from tests.wild.torch_state import Footprint, backward, differing, finite, seed, tensors

SUITE = "torch_modules"
LEVELS = ("layer", "operation")
SAMPLES = 4
SAMPLE = ["nn.BatchNorm2d", "nn.GRU", "nn.LazyConv1d", "nn.MultiheadAttention", "nn.Transformer"]
ENTRIES = {entry.name: entry for entry in module_db}


def cases() -> list[str]:
    return list(ENTRIES)


def samples(entry: Any) -> list[Any]:
    seed(0)
    made = entry.module_inputs_func(
        entry, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    return [sample for sample in made if sample.forward_input is not None]


class Run:
    """One module built and called, with the backward pass of all it returns."""

    def __init__(self, entry: Any, number: int, level: str | None) -> None:
        sample = samples(entry)[number]
        seed()
        built = sample.constructor_input
        model = entry.module_cls(*built.args, **built.kwargs).train()
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        footprint = Footprint(model)
        self.events: list[Any] = []
        self.left, self.alarm = YES, ""
        with listening() as self.warnings:
            tracker = None
            if level is not None:
                tracker = anynan.torch.track(model, level=level, action="record")
            seed(2)
            outputs = model(*args, **kwargs)
            backward(outputs)
            if tracker is not None:
                tracker.check()
                self.events = list(tracker.events)
                tracker.remove()
                alive = weakref.ref(tracker)
                del tracker
                self.left = footprint.left(alive)
        inputs = tensors((args, kwargs))
        self.result = {
            "outputs": [tensor.detach() for tensor in tensors(outputs)],
            "gradients": [p.grad for p in model.parameters()] + [t.grad for t in inputs],
            "weights": [p.detach() for p in model.parameters()],
            "buffers": list(model.buffers()),
            "random state": [torch.get_rng_state()],
        }
        self.finite = finite(sum(self.result.values(), [])) and finite(inputs)  # noqa: RUF017


def run(case: str) -> Iterator[Row]:
    entry = ENTRIES[case]
    plain: dict[int, Run] = {}
    why = "no sample"
    for number in range(min(SAMPLES, len(samples(entry)))):
        try:
            plain[number] = Run(entry, number, None)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:200]
    if not plain:
        yield Row(SUITE, case, skipped=why)
        return
    for level in LEVELS:
        row = Row(SUITE, case, level, identical=YES, silent=YES, clean=YES)
        for number, untracked in plain.items():
            tracked = Run(entry, number, level)
            differs = differing(untracked.result, tracked.result)
            if differs and not differing(untracked.result, Run(entry, number, None).result):
                row.identical = f"no: {', '.join(differs)} of sample {number}"
            # Samples that are bad by nature are reported, and should be.
            events = tracked.events if untracked.finite else []
            said = silence(untracked.warnings, tracked.warnings, events)
            row.silent = row.silent if said == YES else f"sample {number}: {said}"
            row.clean = row.clean if tracked.left == YES else tracked.left
        yield row
