"""The families of timm: the smallest two models of every module of it."""

import logging
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
import timm

from tests.wild.rows import Row
from tests.wild.torch_training import Program, rows

logging.disable(logging.WARNING)

SAMPLE = ["test_convnext", "test_vit"]
EACH, LARGEST = 2, 12e6
# What small models are called; counting the weights of all of them takes minutes.
SMALL = re.compile(r"test|atto|femto|pico|nano|tiny|xxs|xs|_s0|b0|_small|_s\b|lite|005|_0|18|10")
SIZES: tuple[tuple[dict[str, int], int], ...] = (
    ({"img_size": 64}, 64),
    ({}, 64),
    ({}, 96),
    ({}, 160),
)


def weights(name: str) -> float:
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in timm.create_model(name).parameters())
    except Exception:
        return float("inf")


def cases() -> list[str]:
    first, later = ["test_convnext", "test_vit"], []
    for family in sorted(timm.list_modules()):
        names = timm.list_models(module=family)
        small = [name for name in names if SMALL.search(name)] or names
        sized = sorted((size, name) for name in small[:12] if (size := weights(name)) < LARGEST)
        chosen = [name for _, name in sized[:EACH]]
        first += chosen[:1]
        later += chosen[1:]
    return list(dict.fromkeys(first + later))


def images(size: int, channels: int) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(3))


@cache
def fitting(name: str) -> tuple[dict[str, int], int]:
    """Find the smallest images that a model takes."""
    for options, size in SIZES:
        try:
            model = timm.create_model(name, num_classes=5, **options)
            model(images(size, model.default_cfg["input_size"][0]))
        except Exception as error:
            why = error
        else:
            return options, size
    raise why


def build(name: str) -> Program:
    options, size = fitting(name)
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options)
    given = images(size, model.default_cfg["input_size"][0])

    def loss(model: Any, number: int) -> Tensor:
        outputs = model(given.roll(number, -1))
        parts = outputs if isinstance(outputs, tuple | list) else [outputs]
        losses = [F.cross_entropy(part, torch.tensor([0, 1])) for part in parts]
        return sum(losses[1:], losses[0])

    return model, loss


def run(case: str) -> Iterator[Row]:
    yield from rows("timm", case, lambda: build(case))
