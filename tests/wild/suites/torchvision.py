"""Models of torchvision: classifiers and a segmentation network."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
from torchvision import models

from tests.wild.torch_training import Program, drawn, suite_of

SAMPLE = ["mobilenet_v3_small"]
CLASSIFIERS = (
    "squeezenet1_1", "mnasnet0_5", "shufflenet_v2_x0_5", "mobilenet_v3_small",
    "googlenet", "resnet18", "densenet121", "swin_t",
)  # fmt: skip


def classifier(name: str) -> Callable[[], Program]:
    def build() -> Program:
        options = {"init_weights": False} if name == "googlenet" else {}
        model = getattr(models, name)(num_classes=4, weights=None, **options)
        x, labels = drawn(2, 3, 64, 64), torch.tensor([0, 1])

        def loss(model: Any, number: int) -> Tensor:
            outputs = model(x.roll(number, -1))
            if not hasattr(outputs, "logits"):
                return F.cross_entropy(outputs, labels)
            beside = F.cross_entropy(outputs.aux_logits1, labels)
            return F.cross_entropy(outputs.logits, labels) + 0.3 * beside

        return model, loss

    return build


def segmented() -> Program:
    make = models.segmentation.lraspp_mobilenet_v3_large
    x, labels = drawn(2, 3, 64, 64), drawn(2, 64, 64).sign().long() + 1
    model = make(weights=None, weights_backbone=None, num_classes=3)
    return model, lambda model, i: F.cross_entropy(model(x)["out"], labels)


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{name: classifier(name) for name in CLASSIFIERS},
    "lraspp_mobilenet_v3_large": segmented,
}
cases, run = suite_of("torchvision", PROGRAMS)
