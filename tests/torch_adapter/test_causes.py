"""Causes that PyTorch produces beyond those of tests/conformance/recipes_causes.py.

Most faults below are the body of a layer: ``Net`` calls it on weighted inputs, and the line at
fault ends in ``# bad``. The rest are training loops. Each must give the layer, the phase, the
operation, that very line, the cause, and the values that show it.

PyTorch 2.13 cannot produce the rows in ``NOT_IN_TORCH``; there the reason stands beside each.
"""

import copy
import gc
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from anynan import AnomalyError, Event, Policy
from anynan._diagnosis.causes import RULES
from anynan.events import Kind, Phase
from tests.conformance.recipes_causes import produced as conformance

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


class Scale(nn.Module):
    """Pass values on unchanged, through a weight, so that gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Body(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Net(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = Scale()
        self.body = Body(call)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.scale(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Fault:
    """Say what a layer's body does wrong, and what must be said of it."""

    body: Callable[[Tensor], Tensor]
    tag: str
    operation: str
    evidence: str
    x: Row
    phase: Phase
    kind: Kind
    dtype: torch.dtype
    then: str | None
    modes: tuple[str, ...]


FAULTS: list[Fault] = []
MODES = ("step", "deferred", "model")


def fault(
    tag: str,
    operation: str,
    evidence: str,
    *,
    x: Row,
    phase: Phase = "forward",
    kind: Kind = "nan",
    dtype: torch.dtype = torch.float32,
    then: str | None = None,
    modes: tuple[str, ...] = MODES,
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """List a body among the faults."""

    def add(body: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        FAULTS.append(Fault(body, tag, operation, evidence, x, phase, kind, dtype, then, modes))
        return body

    return add


# Logarithms.


@fault("slope_overflow", "log", "the input is 1.001e-42 at [0, 1]", x=[[1, 1e-30]],
       phase="backward", kind="posinf")  # fmt: skip
def log_next_to_zero(x: Tensor) -> Tensor:
    return torch.log(x * 1e-12)  # bad


@fault("binary_cross_entropy_saturated", "binary_cross_entropy", "a prediction is 1.0 at [0, 0]",
       x=[[1, 0.5]], phase="backward", kind="posinf")  # fmt: skip
def learned_targets(x: Tensor) -> Tensor:
    # PyTorch clamps the logarithms and the prediction's gradient, but not the target's.
    return F.binary_cross_entropy(x.detach(), 1 - x)  # bad


@fault("log_of_negative", "xlogy", "log(-0.5) at [0, 1]", x=[[1, -1]])
def divergence_from_negative_targets(x: Tensor) -> Tensor:
    return F.kl_div(x, x / 2, reduction="batchmean")  # bad


@fault("kl_div_domain", "subtract", "holds 1 x -inf", x=[[1, -1]], kind="posinf")
def divergence_of_masked_scores(x: Tensor) -> Tensor:
    scores = x.masked_fill(x < 0, -INF).log_softmax(-1)
    return F.kl_div(scores, torch.full_like(x, 0.5), reduction="batchmean")  # bad


# Division.


@fault("divide_by_zero", "reciprocal", "reciprocal(0.0) at [0, 1]", x=[[1, 0]], kind="posinf")
def one_by_zero(x: Tensor) -> Tensor:
    return 1 / x  # bad


@fault("cosine_of_zero_vector", "divide", "a vector of length 0 (first at [1, 0])",
       x=[[3, 4], [0, 0]], dtype=torch.float16)  # fmt: skip
def normalize_in_half(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)  # bad


# Roots, powers, angles.


@fault("sqrt_gradient_at_zero", "sqrt", "sqrt(0.0)", x=[[1, 2]], phase="backward", kind="posinf",
       then="mse_loss")  # fmt: skip
def root_mean_square_error(x: Tensor) -> Tensor:
    return F.mse_loss(x, x.detach()).sqrt()  # bad


@fault("sqrt_gradient_at_zero", "pow", "sqrt(0.0) at [0, 1]", x=[[1, 0]], phase="backward",
       kind="posinf")  # fmt: skip
def root_as_power(x: Tensor) -> Tensor:
    return x**0.5  # bad


@fault("norm_gradient_at_zero", "hypot", "1 vector of length 0", x=[[3, 0], [4, 0]],
       phase="backward")  # fmt: skip
def hypotenuse(x: Tensor) -> Tensor:
    return torch.hypot(x[0], x[1])  # bad


# Too large.


@fault("overflow_in_dtype", "sum", "in float32 the result reaches 120,000", x=[[6e4, 6e4]],
       dtype=torch.float16, kind="posinf")  # fmt: skip
def sum_in_half(x: Tensor) -> Tensor:
    return x.sum(-1)  # bad


@fault("overflow_in_dtype", "sum", "in float64 the result reaches 6.", x=[[3e38, 3e38]],
       dtype=torch.bfloat16, kind="posinf")  # fmt: skip
def sum_in_bfloat16(x: Tensor) -> Tensor:
    return x.sum(-1)  # bad


@fault("overflow_in_dtype", "add", "bfloat16 ends at 3.39e+38", x=[[1, 2]], dtype=torch.bfloat16,
       kind="neginf", then="softmax")  # fmt: skip
def two_masks_of_the_smallest_number(x: Tensor) -> Tensor:
    smallest = torch.full_like(x, torch.finfo(x.dtype).min)
    mask = smallest + smallest  # bad
    return (x + mask).softmax(-1)


# Inf that was placed on purpose.


@fault("softmax_fully_masked", "logsumexp", "1 x -inf in the result", x=[[1, 2], [3, 4]],
       phase="backward")  # fmt: skip
def masked_normaliser(x: Tensor) -> Tensor:
    mask = torch.tensor([[-INF, -INF], [0, 0]])
    total = (x + mask).logsumexp(-1)  # bad
    return torch.where(total == -INF, 0, total)


@fault("normalisation_of_inf", "layer_norm", "the input holds 1 x Inf", x=[[1, 3]])
def norm_of_masked(x: Tensor) -> Tensor:
    return F.layer_norm(x.masked_fill(x > 2, -INF), (2,))  # bad


@fault("written_constant", "full", "is the constant inf", x=[[1, 2]], kind="posinf",
       modes=("step", "deferred"))  # fmt: skip
def best_so_far(x: Tensor) -> Tensor:
    best = torch.full((), INF)  # bad
    return torch.maximum(x, best)


# Too few, or degenerate.


@fault("variance_of_one", "batch_norm", "1 value per channel", x=[[1, 2]])
def running_variance_of_one(x: Tensor) -> Tensor:
    # nn.BatchNorm1d itself refuses one value per channel.
    mean, variance = torch.zeros(2), torch.ones(2)
    torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)  # bad
    return F.batch_norm(x, mean, variance)


@fault("empty_mean", "nll_loss", "2 targets, and all are -100, which is ignored",
       x=[[1, 2], [3, 4]])  # fmt: skip
def every_target_ignored(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.tensor([-100, -100]))  # bad


@fault("singular_matrix", "inv", "inv of a finite float32 matrix (2, 2)", x=[[1, 0], [0, 0]])
def inverse_of_singular(x: Tensor) -> Tensor:
    # torch.linalg.inv itself raises.
    return torch.linalg.inv_ex(x)[0]  # bad


@fault("unknown", "airy_ai", "-1e+30", x=[[1, -1e30]], modes=("step", "deferred"))
def what_no_rule_knows(x: Tensor) -> Tensor:
    return x + torch.special.airy_ai(x.detach())  # bad


# Running them.


def caught(run: Callable[[], object]) -> Event:
    with pytest.raises(AnomalyError) as error:
        run()
    return error.value.event


def run_fault(it: Fault, mode: str) -> Event:
    net = Net(it.body).to(it.dtype)
    x = torch.tensor(it.x, dtype=it.dtype)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).sum()
        loss.backward()
        return loss

    if mode == "model":
        with anynan.torch.track(net):
            return caught(lambda: step(x))
    tracked = anynan.torch.track(step, read="step" if mode == "deferred" else "auto")
    with tracked:
        return caught(lambda: tracked(x))


CASES = [
    pytest.param(it, mode, id=f"{it.body.__name__}-{mode}") for it in FAULTS for mode in it.modes
]


@pytest.mark.filterwarnings("ignore:(std|var)\\(\\):UserWarning")
@pytest.mark.parametrize(("it", "mode"), CASES)
def test_fault(it: Fault, mode: str) -> None:
    event = run_fault(it, mode)
    operation, cause = event.operation, event.cause
    assert operation is not None
    assert cause is not None
    assert cause.tag == it.tag, event
    found = (event.layer, event.phase, event.kind, operation.name, operation.phase)
    assert found == ("body", it.phase, it.kind, it.operation, it.phase)
    assert it.evidence in cause.evidence
    assert event.then is None if it.then is None else event.then is not None
    if event.then is not None:
        assert event.then.name == it.then
    assert event.severity == "bad"
    check_line(event, it.body)


def check_line(event: Event, function: Callable[..., Any]) -> None:
    """Hold that the operation's line is the one marked in a function."""
    assert event.operation is not None
    source = event.operation.source
    assert source is not None
    lines, first = inspect.getsourcelines(function)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# bad")]
    assert (source.file, [source.line]) == (__file__, marked)
    assert source.text == lines[marked[0] - first].strip()


def test_every_tag_is_produced() -> None:
    produced = {it.tag for it in FAULTS} | CIRCUMSTANCES | conformance("torch")
    rows = {rule.tag for rule in RULES} | {"unknown", "outside_the_model"}
    assert produced | set(NOT_IN_TORCH) == rows
    assert not produced & set(NOT_IN_TORCH)


# What takes more than a body: loops, weights, data.

CIRCUMSTANCES: set[str] = {"outside_the_model"}


def circumstance(*tags: str) -> Callable[[Any], Any]:
    CIRCUMSTANCES.update(tags)
    return lambda function: function


def tag_of(event: Event) -> str:
    assert event.cause is not None
    return event.cause.tag


def evidence_of(event: Event) -> str:
    assert event.cause is not None
    return event.cause.evidence


def name_of(event: Event) -> str:
    assert event.operation is not None
    return event.operation.name


def penalty(body: Callable[[Tensor], Tensor], x: Row) -> Event:
    """Take the gradient of a gradient, as gradient penalties do."""
    net = Net(body)

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss: Tensor = out + slope.pow(2).sum()
        loss.backward()
        return loss

    with anynan.torch.track(step) as tracked:
        return caught(lambda: tracked(torch.tensor(x, dtype=torch.float32)))


@circumstance("norm_gradient_at_zero")
def test_second_derivative_of_a_norm() -> None:
    def length(x: Tensor) -> Tensor:
        return x.norm(dim=-1)  # bad

    event = penalty(length, [[0, 0]])
    assert (event.layer, event.phase, name_of(event)) == ("body", "backward", "vector_norm")
    assert tag_of(event) == "norm_gradient_at_zero"
    assert evidence_of(event) == "1 vector of length 0"
    check_line(event, length)


@circumstance("atan2_origin_gradient")
def test_second_derivative_of_an_angle() -> None:
    # The first one is written as 0 at the origin.
    def angle(x: Tensor) -> Tensor:
        return torch.atan2(x[:, 0], x[:, 1])  # bad

    event = penalty(angle, [[0, 0]])
    assert (event.layer, event.phase, name_of(event)) == ("body", "backward", "atan2")
    assert tag_of(event) == "atan2_origin_gradient"
    assert evidence_of(event) == "atan2(0.0, 0.0) at [0]"
    check_line(event, angle)


def test_custom_function_backward_names_its_own_line() -> None:
    class Magnitude(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.abs()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] * x / x.abs()  # bad

    net = Net(Magnitude.apply)  # type: ignore[arg-type]
    with anynan.torch.track(net):
        event = caught(lambda: net(torch.tensor([[1.0, 0.0]])).sum().backward())
    assert (event.layer, event.phase, name_of(event)) == ("body", "backward", "divide")
    assert tag_of(event) == "divide_by_zero"
    assert "0.0 / 0.0 at [0, 1]" in evidence_of(event)
    check_line(event, Magnitude.backward)


def test_operations_without_gradient_take_no_blame_for_their_neighbours() -> None:
    """A mask made right after an operation is not that operation's doing, nor the reverse."""

    def body(x: Tensor) -> Tensor:
        roots = x.sqrt()  # bad
        mask = torch.zeros(2) - INF
        return roots + mask.exp()

    event = run_fault(Fault(body, "", "", "", [[1, 0]], "backward", "posinf", torch.float32, None,
                            MODES), "model")  # fmt: skip
    assert (event.phase, name_of(event), tag_of(event)) == (
        "backward", "sqrt", "sqrt_gradient_at_zero",
    )  # fmt: skip
    check_line(event, body)


def test_attention_layer_with_every_key_masked() -> None:
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    x, mask = torch.ones(1, 3, 4), torch.ones(1, 3, dtype=torch.bool)

    def step() -> Tensor:
        return net(x, x, x, key_padding_mask=mask)[0].sum()  # type: ignore[no-any-return]  # bad

    with anynan.torch.track(step) as tracked:
        event = caught(tracked)
    assert (event.layer, event.phase, name_of(event)) == ("", "forward", "softmax")
    assert tag_of(event) == "softmax_fully_masked"
    assert evidence_of(event) == "6 rows are -inf throughout"
    check_line(event, step)
    assert event.operation is not None
    assert event.operation.source is not None
    assert "functional.py" in (event.operation.source.via or "")


def test_weight_normalisation_of_a_zero_weight() -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with torch.no_grad():
        net.parametrizations.weight.original1[1] = 0
    with anynan.torch.track(net):
        event = caught(lambda: net(torch.ones(1, 2)))
    assert (event.phase, name_of(event), tag_of(event)) == (
        "forward", "weight_norm", "cosine_of_zero_vector",
    )  # fmt: skip
    assert evidence_of(event) == "the weight holds 2 zeros"


# Data.


@circumstance("bad_input", "bad_label")
@pytest.mark.parametrize(
    "read",
    [
        "auto",
        "step",
    ],
)
@pytest.mark.parametrize("which", ["x", "target"])
def test_bad_batch_names_its_rows(which: str, read: Any) -> None:
    net = nn.Linear(3, 2)

    def step(x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), target)
        loss.backward()
        return loss

    batch = {"x": torch.ones(4, 3), "target": torch.zeros(4, 2)}
    batch[which][2, 1] = math.nan
    with anynan.torch.track(step, read=read) as tracked:
        event = caught(lambda: tracked(**batch))
    assert (event.layer, event.phase, event.tensor, event.kind) == (None, "input", which, "nan")
    assert tag_of(event) == ("bad_input" if which == "x" else "bad_label")
    assert evidence_of(event) == "1 of 4 rows is bad: 2"


@pytest.mark.parametrize("kept", [True, False])
def test_data_that_is_no_argument(*, kept: bool) -> None:
    net = nn.Linear(3, 2)
    rows = [[1.0, 2.0, 3.0], [1.0, math.nan, 3.0]]
    batch = [torch.tensor(rows)]

    def step() -> Tensor:
        x = batch[0] if kept else torch.tensor(rows)
        return net(x).sum()  # type: ignore[no-any-return]

    with anynan.torch.track(step) as tracked:
        event = caught(tracked)
    assert tag_of(event) == "bad_input"
    assert event.phase == ("forward" if kept else "loss"), "it is not the batch"
    assert "1 x NaN of 6" in evidence_of(event)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Have torch.empty hold NaN, as chance may."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@circumstance("uninitialised_memory")
def test_uninitialised_memory() -> None:
    def body(x: Tensor) -> Tensor:
        memory = torch.empty(3, 2)
        memory[0] = x[0]
        return x * memory  # bad

    net = Net(body)
    with filled_memory(), anynan.torch.track(net):
        event = caught(lambda: net(torch.ones(3, 2)))
    assert (event.layer, event.phase, name_of(event)) == ("body", "forward", "multiply")
    assert tag_of(event) == "uninitialised_memory"
    assert "4 x NaN of 6 elements" in evidence_of(event)
    check_line(event, body)


# Weights.


@circumstance("bad_parameter")
@pytest.mark.parametrize("parameters", [True, False])
def test_bad_parameter(*, parameters: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.ones(1, 3)
    with anynan.torch.track(net, parameters=parameters), torch.no_grad():
        net(x)
        net(x)
        net[1].weight[1, 2] = math.nan
        event = caught(lambda: net(x))
    assert (event.layer, event.phase, event.parameter) == ("1", "parameter", "1.weight")
    assert event.since == ((1, 2) if parameters else (0, 2))
    assert tag_of(event) == "bad_parameter"
    assert evidence_of(event) == "1 x NaN of 6 elements"


@circumstance("running_statistics_bad")
def test_running_statistics() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    with anynan.torch.track(net):
        net[0].get_buffer("running_var")[1] = math.nan
        event = caught(lambda: net(torch.ones(2, 3)))
    assert (event.layer, event.phase, event.parameter) == ("0", "parameter", "0.running_var")
    assert tag_of(event) == "running_statistics_bad"
    assert evidence_of(event) == "1 x NaN of 3 elements"


# Optimizers.


def training(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).float().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def first_bad_update(step: Callable[[Tensor], Tensor], *batches: Tensor, parameters: bool) -> Event:
    with anynan.torch.track(step, parameters=parameters) as tracked:
        event = caught(lambda: [tracked(x) for x in batches])
    assert (event.layer, event.phase, event.parameter) == ("", "optimizer", "weight")
    return event


@circumstance("optimizer_epsilon_underflow")
@pytest.mark.parametrize("parameters", [True, False])
def test_adam_in_half_precision(*, parameters: bool) -> None:
    net = nn.Linear(2, 2, bias=False).half()
    step = training(net, torch.optim.Adam(net.parameters(), 1e-3))
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float16)
    event = first_bad_update(step, x, x, parameters=parameters)
    assert tag_of(event) == "optimizer_epsilon_underflow"
    assert evidence_of(event) == "2 of 4 elements of exp_avg_sq are 0 in float16"
    assert event.step == 0


@pytest.mark.parametrize("parameters", [True, False])
def test_adam_whose_eps_is_0(*, parameters: bool) -> None:
    net = nn.Linear(2, 2, bias=False)
    step = training(net, torch.optim.Adam(net.parameters(), eps=0.0))
    x = torch.tensor([[1.0, 0.0]])
    event = first_bad_update(step, x, x, parameters=parameters)
    assert event.cause is not None
    assert tag_of(event) == "optimizer_epsilon_underflow"
    assert event.cause.text.startswith("the optimizer's eps is 0")


@circumstance("weight_written")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("where", [(1, 0), ...])
def test_a_weight_that_other_code_writes(kind: Any, where: Any) -> None:
    net = nn.Linear(2, 2)
    step = training(net, kind(net.parameters(), 0.1))
    tracker = anynan.torch.track(step)
    x = torch.ones(1, 2)
    tracker(x)
    with torch.no_grad():
        net.weight[where] = math.nan
    with pytest.raises(anynan.NonFiniteError) as caught:
        tracker(x)
    event = caught.value.event
    assert (event.parameter, tag_of(event)) == ("weight", "weight_written")
    assert "NaN was written into a weight at step 0\n" in str(caught.value)


@circumstance("optimizer_step_too_large")
@pytest.mark.parametrize("parameters", [True, False])
def test_a_step_beyond_the_weights_range(*, parameters: bool) -> None:
    net = nn.Linear(2, 2, bias=False).half()
    step = training(net, torch.optim.SGD(net.parameters(), 1e4))
    x = torch.tensor([[100.0, 0.0]], dtype=torch.float16)
    event = first_bad_update(step, x, 0 * x, parameters=parameters)
    assert tag_of(event) == "optimizer_step_too_large"
    if parameters:
        said = "the gradient reached 100, and 10,000 times that is beyond 65,504"
        assert evidence_of(event) == said
    else:  # the gradient is gone: the next step began with zero_grad()
        assert evidence_of(event) == "2 x -inf of 4 elements, all finite at step 0"


@circumstance("optimizer_setting_bad")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("name", "value"), [("lr", math.nan), ("lr", math.inf), ("weight_decay", math.inf)]
)
def test_a_setting_of_the_optimizer_that_is_not_finite(kind: Any, name: str, value: float) -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = kind(net.parameters(), lr=0.1)
    optimizer.param_groups[0][name] = value
    x = torch.ones(1, 2)
    event = first_bad_update(training(net, optimizer), x, x, parameters=True)
    assert tag_of(event) == "optimizer_setting_bad"
    assert evidence_of(event) == f"{name} is {value}"


def test_a_schedule_that_gives_a_finite_rate_again_after_the_update() -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step else math.nan)

    def step(x: Tensor) -> None:
        update(x)
        rates.step()

    update = training(net, optimizer)
    x = torch.ones(1, 2)
    event = first_bad_update(step, x, x, parameters=False)
    assert tag_of(event) == "optimizer_setting_bad"
    assert evidence_of(event) == "lr is nan"


class Trust(torch.optim.SGD):
    """Scale each update by the length of its weight, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.norm() / p.grad.norm()
                p.sub_(p.grad * trust, alpha=group["lr"])


@pytest.mark.parametrize("whole", [True, False])
def test_the_operation_inside_of_an_optimizer_is_named_where_all_are_watched(
    *, whole: bool
) -> None:
    net = nn.Linear(2, 2, bias=False)
    step = training(net, Trust(net.parameters(), lr=0.1))
    x = torch.zeros(1, 2)
    with anynan.torch.track(step if whole else net, level="operation") as tracked:
        event = caught(lambda: [(tracked if whole else step)(x) for _ in range(2)])
    assert (event.phase, event.parameter) == ("optimizer", "weight")
    if whole:  # a model's own call is over as its optimizer steps
        assert event.operation is not None
        assert event.operation.source is not None
        assert event.operation.source.text == "trust = p.norm() / p.grad.norm()"
        assert tag_of(event) == "divide_by_zero"


def test_a_learning_rate_that_is_too_large_is_named_beside_the_gradient() -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e38)
    x = torch.full((1, 2), 10.0)
    event = first_bad_update(training(net, optimizer), x, x, parameters=True)
    assert tag_of(event) == "optimizer_step_too_large"
    assert evidence_of(event) == "the gradient reached 10, and 1e+38 times that is beyond 3.403e+38"


@circumstance("ctc_target_too_long")
@pytest.mark.parametrize(
    ("frames", "labels", "said"),
    [(3, [1, 2, 3, 4], "needs 4 time steps"), (4, [1, 1, 2, 2], "needs 6 time steps")],
)
def test_a_target_longer_than_its_input(frames: int, labels: list[int], said: str) -> None:
    net = nn.Linear(4, 6)

    def step(x: Tensor, frames: int) -> Tensor:
        scores = net(x).log_softmax(-1)
        return F.ctc_loss(scores, torch.tensor([labels]), torch.tensor([frames]), torch.tensor([4]))

    with anynan.torch.track(step) as tracked:
        tracked(torch.randn(6, 1, 4), 6)  # long enough
        event = caught(lambda: tracked(torch.randn(6, 1, 4), frames))
    assert (tag_of(event), name_of(event)) == ("ctc_target_too_long", "ctc_loss")
    assert said in evidence_of(event)
    assert f"its input has {frames}" in evidence_of(event)


@circumstance("growth_without_training")
@pytest.mark.parametrize("trained", [False, True])
def test_a_hidden_state_that_grows(*, trained: bool) -> None:
    cell = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        cell.weight.copy_(10 * torch.eye(2))

    def run() -> None:
        h = torch.ones(1, 2)
        for _ in range(60):
            h = cell(h)
            if trained:
                h.sum().backward()
                h = h.detach()

    with anynan.torch.track(cell), torch.set_grad_enabled(trained):
        event = caught(run)
    assert (tag_of(event) == "growth_without_training") is not trained
    assert event.cause is not None
    assert ("learning rate" in event.cause.fix) is trained


@circumstance("optimizer_state_bad")
def test_a_spoiled_optimizer_state() -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    step = training(net, optimizer)
    step(torch.ones(1, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"][0, 0] = math.nan
    optimizer.load_state_dict(saved)
    event = first_bad_update(step, torch.ones(1, 2), torch.ones(1, 2), parameters=False)
    assert tag_of(event) == "optimizer_state_bad"
    assert evidence_of(event) == "exp_avg: 1 x NaN of 4 elements"


# Growth.


@circumstance("learning_rate_divergence")
@pytest.mark.parametrize("read", ["auto", "step"])
def test_diverging_training(read: Any) -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (net(x) ** 2).sum()  # bad
        loss.backward()
        optimizer.step()
        return loss

    with anynan.torch.track(step, read=read) as tracked:
        event = caught(lambda: [tracked(torch.full((1, 1), 100.0)) for _ in range(20)])
    assert (event.layer, event.phase, name_of(event), event.step) == (None, "loss", "pow", 5)
    assert tag_of(event) == "learning_rate_divergence"
    assert "10,000 at step 0" in evidence_of(event)
    assert "at step 4" in evidence_of(event)
    check_line(event, step)


@circumstance("exploding_gradient")
def test_exploding_gradient() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(net[0].weight, 1e-30)
    nn.init.ones_(net[1].weight)

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        with torch.no_grad():
            net[1].weight.mul_(1e5)
        loss: Tensor = net(x).sum() * 1e10  # bad
        loss.backward()
        return loss

    with anynan.torch.track(step) as tracked:
        event = caught(lambda: [tracked(torch.full((1, 1), 1e-8)) for _ in range(12)])
    assert (event.layer, event.phase, name_of(event)) == ("1", "backward", "matmul")
    assert (event.step, tag_of(event)) == (5, "exploding_gradient")
    assert "1e+15 at step 0" in evidence_of(event)
    assert "1e+35 at step 4" in evidence_of(event)
    check_line(event, step)


def test_spike_of_the_gradient_norm() -> None:
    net = nn.Linear(2, 1, bias=False)
    step = training(net, torch.optim.SGD(net.parameters(), 0.0))
    policy = Policy(spike=10, bad=("spike",))
    batches = [torch.ones(1, 2)] * 7 + [torch.full((1, 2), 1e4)]
    with anynan.torch.track(step, policy=policy) as tracked:
        event = caught(lambda: [tracked(x) for x in batches])
    assert (event.kind, event.phase, event.step) == ("spike", "backward", 7)
    assert tag_of(event) == "exploding_gradient"
    assert "1.414" in evidence_of(event)


@circumstance("vanishing_gradient")
def test_vanishing_gradient() -> None:
    net = nn.Linear(2, 1, bias=False)
    step = training(net, torch.optim.SGD(net.parameters(), 0.0))
    policy = Policy(vanishing=1e-4, bad=("vanishing",))
    with anynan.torch.track(step, policy=policy) as tracked:
        event = caught(lambda: tracked(torch.full((1, 2), 3e-9)))
    assert (event.kind, event.phase, tag_of(event)) == (
        "vanishing", "backward", "vanishing_gradient",
    )  # fmt: skip
    assert "4.243e-09" in evidence_of(event)


@circumstance("beyond_limit")
@pytest.mark.parametrize("where", ["input", "forward"])
def test_beyond_limit(where: str) -> None:
    net = nn.Linear(2, 1, bias=False)
    nn.init.constant_(net.weight, 1.0 if where == "input" else 1e5)
    policy = Policy(large=1e4, bad=("large",))
    with anynan.torch.track(net, policy=policy):
        event = caught(lambda: net(torch.full((1, 2), 5e4 if where == "input" else 1.0)))
    assert (event.kind, event.phase, tag_of(event)) == ("large", where, "beyond_limit")
    assert ("50,000" if where == "input" else "200,000") in evidence_of(event)


# Loss scaling.


def scaled(scale: float, weight: float) -> Callable[[Tensor], Tensor]:
    """Train in float16 under a loss scaler; the gradient into the first layer is huge."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(net[1].weight, weight)
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss: Tensor = net(x).float().sum()  # bad
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


@pytest.fixture
def _no_scaler_left() -> Iterator[None]:
    """Drop the scaler: one that lives counts as in use."""
    yield
    gc.collect()


@circumstance("loss_scale_floor")
@pytest.mark.usefixtures("_no_scaler_left")
def test_overflow_with_the_scale_at_its_floor() -> None:
    step = scaled(1.0, 6e4)
    with anynan.torch.track(step) as tracked:
        event = caught(lambda: tracked(torch.full((4, 2), 1e-4)))
    assert (event.layer, event.phase, name_of(event)) == ("1", "backward", "linear")
    assert tag_of(event) == "loss_scale_floor"
    assert evidence_of(event) == (
        "the loss scale is down to 1; in float32 the result reaches 120,000, float16 ends at 65,504"
    )


@circumstance("loss_scale_too_high")
@pytest.mark.usefixtures("_no_scaler_left")
def test_a_streak_of_overflows() -> None:
    step = scaled(2.0**15, 6.0)
    with anynan.torch.track(step, policy=Policy(scale_streak=2)) as tracked:
        event = caught(lambda: [tracked(torch.full((4, 2), 1e-4)) for _ in range(5)])
    assert (event.layer, event.phase, event.step) == ("1", "backward", 1)
    assert tag_of(event) == "loss_scale_too_high"
    # The scale of the failing step, not the one that the scaler went on to.
    assert evidence_of(event) == (
        "loss scale 16,384, gradients in float16; in float32 the result reaches 196,608 "
        "(12 without the loss scale), float16 ends at 65,504"
    )


def test_gradient_that_was_bad_outside_the_model() -> None:
    net = nn.Linear(2, 2)

    def step() -> None:
        out = net(torch.zeros(1, 2))
        (out - out).sqrt().sum().backward()

    with anynan.torch.track(net, replay=False):  # else what is behind the model is noted
        event = caught(step)
    assert (event.layer, event.phase) == (None, "loss")
    assert tag_of(event) == "outside_the_model"
    with anynan.torch.track(net):
        event = caught(step)
    assert (event.layer, event.phase) == (None, "backward")
    assert tag_of(event) == "sqrt_gradient_at_zero"
