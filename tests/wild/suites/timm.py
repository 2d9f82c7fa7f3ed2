"""The families of timm: the smallest two models of every module of it."""

import logging
import zlib
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
EACH, LARGEST = 2, 30e6
# What the small models of a family are called, smallest first.
SMALL = (
    "test_", "atto", "femto", "pico", "nano", "xxs", "xxt", "tiny", "xs", "_s0", "_b0", "b0", "005",
    "_050", "_small", "_s", "_t", "lite", "_0", "10", "18", "",
)  # fmt: skip
SIZES: tuple[tuple[dict[str, int], int], ...] = (
    ({"img_size": 64}, 64),
    ({}, 64),
    ({}, 96),
    ({}, 160),
)


def smallness(name: str) -> tuple[int, int, str]:
    return next(i for i, word in enumerate(SMALL) if word in name), len(name), name


def cases() -> list[str]:
    # In an order of no meaning: part of a run is a sample.
    families = sorted(timm.list_modules(), key=lambda family: zlib.crc32(family.encode()))
    members = [timm.list_models(module=family) for family in families]
    chosen = [sorted(names, key=smallness)[:EACH] for names in members]
    return list(dict.fromkeys(names[i] for i in range(EACH) for names in chosen if names[i:]))


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
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in timm.create_model(name).parameters())
    if weights > LARGEST:
        msg = f"too large: {weights} weights"
        raise ValueError(msg)
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
