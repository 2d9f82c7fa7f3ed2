"""Causes outside of a layer's arithmetic: data, weights, updates, training."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from anynan import Policy
from anynan._base.messages import slug_of
from tests.torch_adapter.cause_parts import Net, caught, check_line, circumstance


@circumstance("bad_input", "bad_label")
@pytest.mark.parametrize("read", ["auto", "end"])
@pytest.mark.parametrize("which", ["x", "target"])
def test_bad_batch_names_its_rows(which: str, read: Any) -> None:
    net = nn.Linear(3, 2)

    def step(x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), target)
        loss.backward()
        return loss

    batch = {"x": torch.ones(4, 3), "target": torch.zeros(4, 2)}
    batch[which][2, 1] = math.nan
    event = caught(anynan.torch.track(step, advanced=anynan.Advanced(read=read)), **batch)
    assert (event.layer, event.phase, event.tensor, event.kind) == (None, "input", which, "nan")
    assert event.cause.tag == ("bad_input" if which == "x" else "bad_label")
    assert event.cause.evidence == "1 of 4 rows is bad: 2"


@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("computed", [True, False])
def test_an_input_that_was_computed_before_the_model_is_not_told_as_loaded_data(level, computed):
    net, scale = nn.Linear(3, 2), torch.tensor([1.0, -1.0, 1.0], requires_grad=computed)
    with anynan.torch.track(net, level=level):
        event = caught(lambda: net(torch.ones(4, 3) * scale.sqrt()).sum().backward())
    assert event.phase == "input"
    said = [note for note in event.notes if slug_of(note) == "input-computed"]
    assert bool(said) == computed
    for note in said:
        assert "last by multiply, before it called Linear" in note
        assert "anynan.torch.track(your training step) names the operation" in note
    step = anynan.torch.track(lambda x: net(x * scale.sqrt()).sum(), level=level)
    assert caught(step, torch.ones(4, 3)).operation.name == "sqrt"


@pytest.mark.parametrize("kept", [True, False])
def test_data_that_is_no_argument(*, kept: bool) -> None:
    net = nn.Linear(3, 2)
    rows = [[1.0, 2.0, 3.0], [1.0, math.nan, 3.0]]
    batch = [torch.tensor(rows)]

    def step() -> Tensor:
        x = batch[0] if kept else torch.tensor(rows)
        return net(x).sum()  # type: ignore[no-any-return]

    event = caught(anynan.torch.track(step))
    assert event.cause.tag == "bad_input"
    assert event.phase == ("forward" if kept else "loss"), "it is not the batch"
    assert "1 x NaN of 6" in event.cause.evidence


@circumstance("uninitialised_memory")
def test_uninitialised_memory() -> None:
    def body(x: Tensor) -> Tensor:
        memory = torch.empty(3, 2)
        memory[0] = x[0]
        return x * memory  # bad

    net = Net(body)
    torch.use_deterministic_algorithms(True)  # torch.empty holds NaN, as it may by chance
    try:
        with anynan.torch.track(net):
            event = caught(net, torch.ones(3, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (event.layer, event.phase, event.operation.name) == ("body", "forward", "multiply")
    assert event.cause.tag == "uninitialised_memory"
    assert "4 x NaN of 6 elements" in event.cause.evidence
    check_line(event, body)


@circumstance("bad_parameter")
@pytest.mark.parametrize("parameters", [True, False])
def test_bad_parameter(*, parameters: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.ones(1, 3)
    with anynan.torch.track(net, advanced=anynan.Advanced(parameters=parameters)), torch.no_grad():
        net(x)
        net(x)
        net[1].weight[1, 2] = math.nan
        event = caught(lambda: net(x))
    assert (event.layer, event.phase, event.parameter) == ("1", "parameter", "1.weight")
    assert event.since == ((1, 2) if parameters else (0, 2))
    assert (event.cause.tag, event.cause.evidence) == ("bad_parameter", "1 x NaN of 6 elements")


@circumstance("running_statistics_bad")
def test_running_statistics() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    with anynan.torch.track(net):
        net[0].get_buffer("running_var")[1] = math.nan
        event = caught(lambda: net(torch.ones(2, 3)))
    assert (event.layer, event.phase, event.parameter) == ("0", "parameter", "0.running_var")
    assert event.cause.tag == "running_statistics_bad"
    assert event.cause.evidence == "1 x NaN of 3 elements"


def training(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).float().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def spoiled(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params, 1e-3)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weight]["exp_avg"][0, 0] = math.nan
    return optimizer


def having(kind: Any, **setting: float) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(params, lr=0.1)
        optimizer.param_groups[0].update(setting)
        return optimizer

    return make


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
UNDERFLOW, TOO_LARGE = "optimizer_epsilon_underflow", "optimizer_step_too_large"
SETTING, STATE = "optimizer_setting_bad", "optimizer_state_bad"
HALF = torch.float16
# What updates a weight, its dtype, two batches, the cause, what is said where the weights are
# looked at after each update, and where the next step finds them bad.
UPDATES: list[tuple[Any, torch.dtype, list[float], list[float], str, str, str]] = [
    (lambda p: ADAM(p, 1e-3), HALF, [1, 0], [1, 0], UNDERFLOW,
     *["2 of 4 elements of exp_avg_sq are 0 in float16"] * 2),
    (lambda p: ADAM(p, eps=0.0), torch.float32, [1, 0], [1, 0], UNDERFLOW,
     *["the optimizer's eps is 0"] * 2),
    (lambda p: SGD(p, 1e4), HALF, [100, 0], [0, 0], TOO_LARGE,
     "the gradient reached 100, and 10,000 times that is beyond 65,504",
     "2 x -inf of 4 elements, all finite at step 0"),  # zero_grad() took the gradient
    (lambda p: SGD(p, 1e38), torch.float32, [10, 10], [10, 10], TOO_LARGE,
     "the gradient reached 10, and 1e+38 times that is beyond 3.403e+38", ""),
    (having(SGD, lr=math.nan), torch.float32, [1, 1], [1, 1], SETTING, *["lr is nan"] * 2),
    (having(ADAMW, lr=math.inf), torch.float32, [1, 1], [1, 1], SETTING, *["lr is inf"] * 2),
    (having(ADAMW, weight_decay=math.inf), torch.float32, [1, 1], [1, 1], SETTING,
     *["weight_decay is inf"] * 2),
    (spoiled, torch.float32, [1, 1], [1, 1], STATE, *["exp_avg: 1 x NaN of 4 elements"] * 2),
]  # fmt: skip


@circumstance(UNDERFLOW, TOO_LARGE, SETTING, STATE)
@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize(
    ("make", "dtype", "first", "second", "tag", "at_once", "later"), UPDATES, ids=lambda _: ""
)
def test_an_update_that_finite_gradients_spoil(
    make: Any, dtype: Any, first: Any, second: Any, tag: str, at_once: str, later: str,
    *, parameters: bool,
) -> None:  # fmt: skip
    net = nn.Linear(2, 2, bias=False).to(dtype)
    step = training(net, make(net.parameters()))
    batches = [torch.tensor([x], dtype=dtype) for x in (first, second)]
    with anynan.torch.track(step, advanced=anynan.Advanced(parameters=parameters)) as tracked:
        event = caught(lambda: [tracked(x) for x in batches])
    assert (event.layer, event.phase, event.parameter) == ("", "optimizer", "weight")
    assert event.cause.tag == tag
    assert event.step == 0 or not parameters
    said = at_once if parameters else later
    assert event.cause.evidence == said or event.cause.text.startswith(said)


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
    event = caught(tracker, x)
    assert (event.parameter, event.cause.tag) == ("weight", "weight_written")
    assert "NaN was written into a weight at step 0\n" in str(event)


class Trust(torch.optim.SGD):
    """Scale each update by the length of its weight, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.norm() / p.grad.norm()
                p.sub_(p.grad * trust, alpha=group["lr"])


@pytest.mark.parametrize("whole", [True, False])
def test_the_operation_inside_of_an_optimizer_is_named_where_all_are_watched(whole: bool) -> None:
    net = nn.Linear(2, 2, bias=False)
    step = training(net, Trust(net.parameters(), lr=0.1))
    x = torch.zeros(1, 2)
    with anynan.torch.track(step if whole else net, level="operation") as tracked:
        event = caught(lambda: [(tracked if whole else step)(x) for _ in range(2)])
    assert (event.phase, event.parameter) == ("optimizer", "weight")
    if whole:  # a model's own call is over as its optimizer steps
        assert event.operation.source.text == "trust = p.norm() / p.grad.norm()"
        assert event.cause.tag == "divide_by_zero"


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
    assert (event.cause.tag, event.operation.name) == ("ctc_target_too_long", "ctc_loss")
    assert said in event.cause.evidence
    assert f"its input has {frames}" in event.cause.evidence


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
    assert (event.cause.tag == "growth_without_training") is not trained
    assert ("learning rate" in event.cause.fix) is trained


@circumstance("learning_rate_divergence")
@pytest.mark.parametrize("read", ["auto", "end"])
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

    with anynan.torch.track(step, advanced=anynan.Advanced(read=read)) as tracked:
        event = caught(lambda: [tracked(torch.full((1, 1), 100.0)) for _ in range(20)])
    assert (event.layer, event.phase, event.operation.name, event.step) == (None, "loss", "pow", 5)
    assert event.cause.tag == "learning_rate_divergence"
    assert "10,000 at step 0" in event.cause.evidence
    assert "at step 4" in event.cause.evidence
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
    assert (event.layer, event.phase, event.operation.name) == ("1", "backward", "matmul")
    assert (event.step, event.cause.tag) == (5, "exploding_gradient")
    assert "1e+15 at step 0" in event.cause.evidence
    assert "1e+35 at step 4" in event.cause.evidence
    check_line(event, step)


@circumstance("beyond_limit")
@pytest.mark.parametrize("where", ["input", "forward"])
def test_beyond_limit(where: str) -> None:
    net = nn.Linear(2, 1, bias=False)
    nn.init.constant_(net.weight, 1.0 if where == "input" else 1e5)
    policy = Policy(large=1e4, bad=("large",))
    with anynan.torch.track(net, policy=policy):
        event = caught(lambda: net(torch.full((1, 2), 5e4 if where == "input" else 1.0)))
    assert (event.kind, event.phase, event.cause.tag) == ("large", where, "beyond_limit")
    assert ("50,000" if where == "input" else "200,000") in event.cause.evidence


def test_gradient_that_was_bad_outside_the_model() -> None:
    net = nn.Linear(2, 2)

    def step() -> None:
        out = net(torch.zeros(1, 2))
        (out - out).sqrt().sum().backward()

    with anynan.torch.track(net, advanced=anynan.Advanced(replay=False)):
        event = caught(step)
    assert (event.layer, event.phase, event.cause.tag) == (None, "loss", "outside_the_model")
    with anynan.torch.track(net):  # what is behind the model is noted, too, for a second run
        event = caught(step)
    assert (event.phase, event.cause.tag) == ("backward", "sqrt_gradient_at_zero")
