"""Models of torchvision: classifiers, a segmentation network, detectors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
from torchvision import models
from torchvision.models import detection, segmentation
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from tests.wild.rows import Row
from tests.wild.torch_training import Program, drawn, rows

SAMPLE = ["mobilenet_v3_small"]
CLASSIFIERS = (
    "squeezenet1_1", "mnasnet0_5", "shufflenet_v2_x0_5", "mobilenet_v3_small",
    "googlenet", "resnet18", "densenet121", "swin_t",
)  # fmt: skip
SIZES = {"min_size": 64, "max_size": 72}
NOTHING = {"weights": None, "weights_backbone": None, "num_classes": 3}


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
    model = segmentation.lraspp_mobilenet_v3_large(**NOTHING)
    x = drawn(2, 3, 64, 64)
    labels = torch.randint(0, 3, (2, 64, 64), generator=torch.Generator().manual_seed(3))
    return model, lambda model, i: F.cross_entropy(model(x)["out"], labels)


def detector(make: Callable[[], nn.Module]) -> Callable[[], Program]:
    def build() -> Program:
        generator = torch.Generator().manual_seed(3)
        x = [torch.rand(3, 64, wide, generator=generator) for wide in (64, 72)]

        def loss(model: Any, number: int) -> Tensor:
            first = {
                "boxes": torch.tensor([[5.0, 5, 30, 30], [10, 20, 50, 60]]),
                "labels": torch.tensor([1, 2]),
            }
            second = {"boxes": torch.tensor([[8.0, 8, 40, 44]]), "labels": torch.tensor([1])}
            return sum(model(x, [first, second]).values())

        return make(), loss

    return build


def backbone() -> Any:
    body: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 4, 1), nn.ReLU()
    )
    body.out_channels = 32
    return body


def faster_rcnn() -> nn.Module:
    return detection.FasterRCNN(
        backbone(),
        3,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 5, 2),
        **SIZES,
    )


def retinanet() -> nn.Module:
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    return detection.RetinaNet(backbone(), 3, anchor_generator=anchors, **SIZES)


def fcos() -> nn.Module:
    return detection.FCOS(
        backbone(), 3, anchor_generator=AnchorGenerator(((16,),), ((1.0,),)), **SIZES
    )


def ssdlite() -> nn.Module:
    return detection.ssdlite320_mobilenet_v3_large(**NOTHING)


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{name: classifier(name) for name in CLASSIFIERS},
    "lraspp_mobilenet_v3_large": segmented,
    "FasterRCNN": detector(faster_rcnn),
    "RetinaNet": detector(retinanet),
    "FCOS": detector(fcos),
    "ssdlite320_mobilenet_v3_large": detector(ssdlite),
}


def cases() -> list[str]:
    return list(PROGRAMS)


def run(case: str) -> Iterator[Row]:
    yield from rows("torchvision", case, PROGRAMS[case])
