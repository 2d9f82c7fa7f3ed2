"""PyTorch's own table of operators, with its own samples of arguments."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db

from tests.wild.rows import Row
from tests.wild.torch_state import seed
from tests.wild.torch_table import Result, called, rows

SAMPLES = 3
SAMPLE = ["cumprod", "linalg.eigh", "nn.functional.gelu", "sqrt", "where"]


class Operator(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def named(entry: Any) -> str:
    variant = entry.variant_test_name
    return f"{entry.name}.{variant}" if variant else str(entry.name)


ENTRIES = {named(entry): entry for entry in op_db}


def cases() -> list[str]:
    return list(ENTRIES)


def run(case: str) -> Iterator[Row]:
    entry = ENTRIES[case]
    there = entry.supported_dtypes("cpu")
    if not there:
        yield Row("torch_operators", case, skipped="not for the CPU")
        return
    if entry.name.removeprefix("new_").startswith("empty"):
        yield Row("torch_operators", case, skipped="its result is whatever was in memory")
        return
    dtype = torch.float32 if torch.float32 in there else min(there, key=str)
    learns = entry.supports_autograd and dtype.is_floating_point

    def samples() -> list[Any]:
        seed(0)
        made = entry.sample_inputs("cpu", dtype, requires_grad=learns)
        return list(itertools.islice(made, SAMPLES))

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.detach()
        if value.layout == torch.strided:
            copy = copy.clone()
        return copy.requires_grad_(learns and value.requires_grad)

    def one(number: int, level: str | None) -> Result:
        sample = samples()[number].transform(fresh)
        given = (sample.input, *sample.args)
        model = Operator(entry.op)
        return called(model, given, sample.kwargs, level=level, learns=learns, whole=True)

    yield from rows("torch_operators", case, len(samples()), one)
