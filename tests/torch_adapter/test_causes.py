"""Causes that PyTorch produces beyond those of tests/conformance/recipes_causes.py.

Most faults are the body of a layer: ``Net`` calls it on weighted inputs, and the line at fault
ends in ``# bad``. Each must give the layer, the phase, the operation, that very line, the cause,
and the values that show it.

PyTorch 2.13 cannot produce the rows in ``NOT_IN_TORCH``; there the reason stands beside each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from anynan import Event
from anynan._diagnosis.causes import RULES
from anynan.events import Kind, Phase
from tests.conformance.recipes_causes import produced as conformance
from tests.torch_adapter import (  # noqa: F401  # their circumstances count
    test_causes_around,
    test_guard,
    test_mixed_precision,
)
from tests.torch_adapter.cause_parts import CIRCUMSTANCES, Net, caught, check_line, circumstance

INF = math.inf
Row = list[list[float]]

NOT_IN_TORCH = {
    "overwritten_input": "a write is an operation of its own, or bumps the version of a tensor",
    "cdist_gradient_at_zero": "its backward writes 0 where a distance is 0, and it has no second "
    "derivative",
    "product_gradient_at_zero": "prod and cumprod leave zeros out of the division",
    "lgamma_gradient_at_pole": "the forward result is +Inf already, which is lgamma_pole",
    "logit_gradient_at_bound": "the forward result is Inf already, which is logit_of_zero_or_one",
    "index_out_of_range": "an index out of range raises",
    "optimizer_state_overflow": "an infinite second moment makes the update 0, so no weight goes "
    "bad of it",
}


MODES = ("step", "deferred", "model")


@dataclass(frozen=True)
class Fault:
    """Say what a layer's body does wrong, and what must be said of it."""

    name: str
    body: Callable[[Tensor], Tensor]
    tag: str
    operation: str
    evidence: str
    x: Row
    phase: Phase = "forward"
    kind: Kind = "nan"
    dtype: torch.dtype = torch.float32
    then: str | None = None
    modes: tuple[str, ...] = MODES


def divergence_of_masked_scores(x: Tensor) -> Tensor:
    scores = x.masked_fill(x < 0, -INF).log_softmax(-1)
    return F.kl_div(scores, torch.full_like(x, 0.5), reduction="batchmean")  # bad


def two_masks_of_the_smallest_number(x: Tensor) -> Tensor:
    smallest = torch.full_like(x, torch.finfo(x.dtype).min)
    mask = smallest + smallest  # bad
    return (x + mask).softmax(-1)


def masked_normaliser(x: Tensor) -> Tensor:
    mask = torch.tensor([[-INF, -INF], [0, 0]])
    total = (x + mask).logsumexp(-1)  # bad
    return torch.where(total == -INF, 0, total)


def best_so_far(x: Tensor) -> Tensor:
    best = torch.full((), INF)  # bad
    return torch.maximum(x, best)


def running_variance_of_one(x: Tensor) -> Tensor:
    # nn.BatchNorm1d itself refuses one value per channel.
    mean, variance = torch.zeros(2), torch.ones(2)
    torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)  # bad
    return F.batch_norm(x, mean, variance)


FAULTS = [
    Fault("log_next_to_zero", lambda x: torch.log(x * 1e-12),  # bad
          "slope_overflow", "log", "the input is 1.001e-42 at [0, 1]", [[1, 1e-30]],
          "backward", "posinf"),
    # PyTorch clamps the logarithms and the prediction's gradient, but not the target's.
    Fault("learned_targets", lambda x: F.binary_cross_entropy(x.detach(), 1 - x),  # bad
          "binary_cross_entropy_saturated", "binary_cross_entropy", "a prediction is 1.0 at [0, 0]",
          [[1, 0.5]], "backward", "posinf"),
    Fault("divergence_from_negative_targets",
          lambda x: F.kl_div(x, x / 2, reduction="batchmean"),  # bad
          "log_of_negative", "xlogy", "log(-0.5) at [0, 1]", [[1, -1]]),
    Fault("divergence_of_masked_scores", divergence_of_masked_scores,
          "kl_div_domain", "subtract", "holds 1 x -inf", [[1, -1]], kind="posinf"),
    Fault("one_by_zero", lambda x: 1 / x,  # bad
          "divide_by_zero", "reciprocal", "reciprocal(0.0) at [0, 1]", [[1, 0]], kind="posinf"),
    Fault("normalize_in_half", lambda x: F.normalize(x, dim=-1),  # bad
          "cosine_of_zero_vector", "divide", "a vector of length 0 (first at [1, 0])",
          [[3, 4], [0, 0]], dtype=torch.float16),
    Fault("root_mean_square_error", lambda x: F.mse_loss(x, x.detach()).sqrt(),  # bad
          "sqrt_gradient_at_zero", "sqrt", "sqrt(0.0)", [[1, 2]], "backward", "posinf",
          then="mse_loss"),
    Fault("root_as_power", lambda x: x**0.5,  # bad
          "sqrt_gradient_at_zero", "pow", "sqrt(0.0) at [0, 1]", [[1, 0]], "backward", "posinf"),
    Fault("hypotenuse", lambda x: torch.hypot(x[0], x[1]),  # bad
          "norm_gradient_at_zero", "hypot", "1 vector of length 0", [[3, 0], [4, 0]], "backward"),
    Fault("sum_in_half", lambda x: x.sum(-1),  # bad
          "overflow_in_dtype", "sum", "in float32 the result reaches 120,000", [[6e4, 6e4]],
          kind="posinf", dtype=torch.float16),
    Fault("two_masks_of_the_smallest_number", two_masks_of_the_smallest_number,
          "overflow_in_dtype", "add", "bfloat16 ends at 3.39e+38", [[1, 2]],
          kind="neginf", dtype=torch.bfloat16, then="softmax"),
    Fault("masked_normaliser", masked_normaliser,
          "softmax_fully_masked", "logsumexp", "1 x -inf in the result", [[1, 2], [3, 4]],
          "backward"),
    Fault("norm_of_masked", lambda x: F.layer_norm(x.masked_fill(x > 2, -INF), (2,)),  # bad
          "normalisation_of_inf", "layer_norm", "the input holds 1 x Inf", [[1, 3]]),
    Fault("best_so_far", best_so_far, "written_constant", "full", "is the constant inf", [[1, 2]],
          kind="posinf", modes=("step", "deferred")),
    Fault("running_variance_of_one", running_variance_of_one,
          "variance_of_one", "batch_norm", "1 value per channel", [[1, 2]]),
    Fault("every_target_ignored", lambda x: F.cross_entropy(x, torch.tensor([-100, -100])),  # bad
          "empty_mean", "nll_loss", "2 targets, and all are -100, which is ignored",
          [[1, 2], [3, 4]]),
    Fault("loss_of_no_elements", lambda x: F.smooth_l1_loss(x[x > 9], x[x > 9]),  # bad
          "empty_mean", "smooth_l1_loss", "the input has shape (0,)", [[1, 2]]),
    # torch.linalg.inv itself raises.
    Fault("inverse_of_singular", lambda x: torch.linalg.inv_ex(x)[0],  # bad
          "singular_matrix", "inv", "inv of a finite float32 matrix (2, 2)", [[1, 0], [0, 0]]),
    Fault("what_no_rule_knows", lambda x: x + torch.special.airy_ai(x.detach()),  # bad
          "unknown", "airy_ai", "-1e+30", [[1, -1e30]], modes=("step", "deferred")),
]  # fmt: skip


def test_the_loss_of_an_empty_batch_speaks_of_no_ignored_targets() -> None:
    loss = nn.CrossEntropyLoss()
    tracker = anynan.torch.track(loss, action="record")
    loss(torch.ones(0, 4), torch.ones(0, dtype=torch.int64))
    assert tracker.events[0].cause.text == "the mean of no elements is 0/0"


def run_fault(it: Fault, mode: str) -> Event:
    net = Net(it.body).to(it.dtype)
    x = torch.tensor(it.x, dtype=it.dtype)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).sum()
        loss.backward()
        return loss

    if mode == "model":
        anynan.torch.track(net)
        return caught(step, x)
    advanced = anynan.Advanced(read="end" if mode == "deferred" else "auto")
    return caught(anynan.torch.track(step, advanced=advanced), x)


CASES = [
    pytest.param(it, mode, id=f"{it.name}-{mode}")
    for at, it in enumerate(FAULTS)
    for mode in [it.modes[at % len(it.modes)]]
]


@pytest.mark.filterwarnings("ignore:(std|var)\\(\\):UserWarning")
@pytest.mark.parametrize(("it", "mode"), CASES)
def test_fault(it: Fault, mode: str) -> None:
    event = run_fault(it, mode)
    operation, cause = event.operation, event.cause
    assert cause.tag == it.tag, event
    found = (event.layer, event.phase, event.kind, operation.name, operation.phase)
    assert found == ("body", it.phase, it.kind, it.operation, it.phase)
    assert it.evidence in cause.evidence
    assert (event.then and event.then.name) == it.then
    assert event.severity == "bad"
    check_line(event, it.body)


def test_every_tag_is_produced() -> None:
    produced = {it.tag for it in FAULTS} | CIRCUMSTANCES | conformance("torch")
    rows = {rule.tag for rule in RULES} | {"unknown", "outside_the_model"}
    assert produced | set(NOT_IN_TORCH) == rows
    assert not produced & set(NOT_IN_TORCH)


def length(x: Tensor) -> Tensor:
    return x.norm(dim=-1)  # bad


def angle(x: Tensor) -> Tensor:  # the first derivative is written as 0 at the origin
    return torch.atan2(x[:, 0], x[:, 1])  # bad


@circumstance("norm_gradient_at_zero", "atan2_origin_gradient")
@pytest.mark.parametrize(
    ("body", "operation", "tag", "evidence"),
    [
        (length, "vector_norm", "norm_gradient_at_zero", "1 vector of length 0"),
        (angle, "atan2", "atan2_origin_gradient", "atan2(0.0, 0.0) at [0]"),
    ],
)
def test_a_second_derivative(body: Any, operation: str, tag: str, evidence: str) -> None:
    """Take the gradient of a gradient, as gradient penalties do."""
    net = Net(body)

    def step(x: Tensor) -> None:
        out = net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.pow(2).sum()).backward()

    event = caught(anynan.torch.track(step), torch.zeros(1, 2, requires_grad=True))
    assert (event.layer, event.phase, event.operation.name) == ("body", "backward", operation)
    assert (event.cause.tag, event.cause.evidence) == (tag, evidence)
    check_line(event, body)


def test_operations_without_gradient_take_no_blame_for_their_neighbours() -> None:
    """A mask made right after an operation is not that operation's doing, nor the reverse."""

    def body(x: Tensor) -> Tensor:
        roots = x.sqrt()  # bad
        mask = torch.zeros(2) - INF
        return roots + mask.exp()

    event = run_fault(Fault("", body, "", "", "", [[1, 0]]), "model")
    found = event.phase, event.operation.name, event.cause.tag
    assert found == ("backward", "sqrt", "sqrt_gradient_at_zero")
    check_line(event, body)


def test_weight_normalisation_of_a_zero_weight() -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with torch.no_grad():
        net.parametrizations.weight.original1[1] = 0
    with anynan.torch.track(net):
        event = caught(lambda: net(torch.ones(1, 2)))
    found = event.phase, event.operation.name, event.cause.tag
    assert found == ("forward", "weight_norm", "cosine_of_zero_vector")
    assert event.cause.evidence == "the weight holds 2 zeros"
