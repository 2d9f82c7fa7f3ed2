"""Make torchvision importable where its build does not fit PyTorch's, as on machines without CUDA.

Import this before anything that imports torchvision. The operators that its models call are then
done in Python; the others are declared, and fail when they are called.
"""

import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_ROI = "Tensor input, Tensor rois, float scale, SymInt height, SymInt width"
_BACK = "Tensor grad, Tensor rois, float scale, SymInt height, SymInt width"
_SIZE = "SymInt n, SymInt c, SymInt h, SymInt w"
_STRIDES = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt sh, SymInt sw, "
    "SymInt ph, SymInt pw, SymInt dh, SymInt dw, SymInt groups, SymInt offsets, bool use_mask"
)
SCHEMAS = f"""
nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
roi_align({_ROI}, int ratio, bool aligned) -> Tensor
_roi_align_backward({_BACK}, {_SIZE}, int ratio, bool aligned) -> Tensor
roi_pool({_ROI}) -> (Tensor, Tensor)
_roi_pool_backward({_BACK.replace(" float", " Tensor argmax, float")}, {_SIZE}) -> Tensor
ps_roi_align({_ROI}, int ratio) -> (Tensor, Tensor)
_ps_roi_align_backward({_BACK.replace(" float", " Tensor to, float")}, int r, {_SIZE}) -> Tensor
ps_roi_pool({_ROI}) -> (Tensor, Tensor)
_ps_roi_pool_backward({_BACK.replace(" float", " Tensor to, float")}, {_SIZE}) -> Tensor
deform_conv2d({_STRIDES}) -> Tensor
_deform_conv2d_backward(Tensor grad, {_STRIDES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
"""


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    left = scores.argsort(descending=True, stable=True)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    while left.numel():
        first, left = left[0], left[1:]
        kept.append(first)
        low = torch.maximum(boxes[first, :2], boxes[left, :2])
        high = torch.minimum(boxes[first, 2:], boxes[left, 2:])
        both = (high - low).clamp(min=0).prod(1)
        left = left[both / (area[first] + area[left] - both) <= threshold]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.long)


def _roi_align(*args: Any) -> Tensor:
    from torchvision.ops import roi_align

    return roi_align.__globals__["_roi_align"](*args)


def _declare() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for schema in re.findall(r"^\S.*$", SCHEMAS, re.MULTILINE):
        library.define(schema)
    library.impl("nms", _nms, "CPU")
    library.impl("roi_align", _roi_align, "CompositeImplicitAutograd")
    return library


def _use() -> torch.library.Library | None:
    if find_spec("torchvision") is None:
        return None
    try:
        import_module("torchvision")
    except (RuntimeError, OSError):
        library = _declare()
        import torchvision
        import torchvision.extension
        import torchvision.ops.boxes

        def there() -> None:
            return None

        torchvision.ops.boxes._assert_has_ops = there
        torchvision.ops.roi_align.__globals__["_assert_has_ops"] = there
        return library
    return None


_library = _use()  # kept: what is declared goes with it
