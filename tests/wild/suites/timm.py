"""The families of timm: the smallest model of every module of it, made shallow."""

import itertools
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
import timm

from tests.wild.rows import Row
from tests.wild.torch_training import Program, rows

logging.disable(logging.WARNING)

SAMPLE = ["test_convnext", "test_vit"]
LARGEST = 30e6
# What the small models of a family are called, smallest first.
SMALL = (
    "test_", "atto", "femto", "pico", "nano", "xxs", "xxt", "tiny", "xs", "_s0", "_b0", "b0", "005",
    "_050", "_small", "_s", "_t", "lite", "_0", "10", "18", "",
)  # fmt: skip
# What makes a model shallower, where it takes one of these, and the images smaller.
SHALLOW: tuple[dict[str, Any], ...] = ({"depth": 2}, {"depths": (1, 1, 1, 1)}, {})
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
    return list(dict.fromkeys(min(names, key=smallness) for names in members if names))


def images(size: int, channels: int) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(3))


def small(name: str) -> tuple[nn.Module, int]:
    """Make a model, as shallow as it can be, and find the smallest images that it takes."""
    why: Exception | None = None
    for shallow, (options, size) in itertools.product(SHALLOW, SIZES):
        try:
            model = timm.create_model(name, num_classes=5, **shallow, **options)
            weights = sum(weight.numel() for weight in model.parameters())
            if weights > LARGEST:
                why = ValueError(f"too large: {weights} weights")
                continue
            model(images(size, model.default_cfg["input_size"][0]))
        except Exception as error:
            why = error
        else:
            return model, size
    raise why or AssertionError


def build(name: str) -> Program:
    model, size = small(name)
    given = images(size, model.default_cfg["input_size"][0])

    def loss(model: Any, number: int) -> Tensor:
        outputs = model(given.roll(number, -1))
        parts = outputs if isinstance(outputs, tuple | list) else [outputs]
        losses = [F.cross_entropy(part, torch.tensor([0, 1])) for part in parts]
        return sum(losses[1:], losses[0])

    return model, loss


def run(case: str) -> Iterator[Row]:
    yield from rows("timm", case, lambda: build(case))
