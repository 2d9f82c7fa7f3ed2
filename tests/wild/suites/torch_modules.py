"""PyTorch's own table of modules, with its own samples of arguments."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

from tests.wild.rows import Row
from tests.wild.torch_state import seed
from tests.wild.torch_table import Result, called, rows

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


def run(case: str) -> Iterator[Row]:
    entry = ENTRIES[case]

    def one(number: int, level: str | None) -> Result:
        sample = samples(entry)[number]
        seed()
        built, given = sample.constructor_input, sample.forward_input
        model = entry.module_cls(*built.args, **built.kwargs).train()
        return called(model, given.args, given.kwargs, level=level)

    yield from rows("torch_modules", case, min(SAMPLES, len(samples(entry))), one)
