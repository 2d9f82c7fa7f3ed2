"""The guard on gradients: norms of every layer in the one read, jumps and fading told in time."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anynan
from anynan import AnynanWarning, Policy
from anynan.torch import demo
from tests.torch_adapter.cause_parts import circumstance

every_read = pytest.mark.parametrize("read", ["immediate", "end", 3])


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)
    )


def trainer(model: nn.Module, optimizer: Any = None) -> Callable[[Tensor], dict[str, float]]:
    """Return a training step, which gives the gradient norm of each layer as they are."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)

    def step(x: Tensor) -> dict[str, float]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        layers: dict[str, list[float]] = defaultdict(list)
        for name, p in model.named_parameters():
            layers[name.rpartition(".")[0]].append(p.grad.to_dense().double().norm().item())
        optimizer.step()
        return {layer: math.hypot(*sizes) for layer, sizes in layers.items()}

    return step


@every_read
@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
@pytest.mark.parametrize("policy", [Policy(), Policy(large=1e-5)], ids=["norms", "ends"])
def test_norms_of_all_weights_and_of_each_layer(read: Any, policy: Policy) -> None:
    model = net()
    step = trainer(model)
    with anynan.torch.track(model, advanced=anynan.Advanced(read=read), policy=policy) as tracker:
        true = [step(torch.randn(3, 4)) for _ in range(6)]
    last = true[-1]
    numbers = tracker.metrics(layers=True)
    assert numbers["anynan/gradient_norm"] == pytest.approx(math.hypot(*last.values()), rel=1e-5)
    assert set(last) == {"0", "2.0", "3"}
    for layer, norm in last.items():
        assert numbers[f"anynan/gradient_norm/{layer}"] == pytest.approx(norm, rel=1e-5)
        found = tracker.history.norms(layer)
        assert [at for at, _ in found] == list(range(6))
        assert [x for _, x in found] == pytest.approx([t[layer] for t in true], rel=1e-5)
    total = [math.hypot(*t.values()) for t in true]
    assert [x for _, x in tracker.history.norms()] == pytest.approx(total, rel=1e-5)
    assert tracker.history.norms("1") == ()
    assert f"norm {total[-1]:.4g}, step 5" in tracker.report()


@every_read
def test_a_sparse_gradient_counts(read: Any) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    step = trainer(model)
    with anynan.torch.track(model, advanced=anynan.Advanced(read=read)) as tracker:
        true = step(torch.tensor([1, 2, 3]))
    numbers = tracker.metrics(layers=True)
    assert numbers["anynan/gradient_norm/0"] == pytest.approx(true["0"], rel=1e-5)
    assert numbers["anynan/gradient_norm"] == pytest.approx(math.hypot(*true.values()), rel=1e-5)


@every_read
@pytest.mark.filterwarnings("error::anynan.AnynanWarning")
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 6e4), (torch.bfloat16, 1e38), (torch.float32, 1e30), (torch.float64, 1e300)],
    ids=str,
)
def test_a_norm_that_overflows_condemns_no_finite_gradient(read, dtype, size) -> None:
    model = nn.Linear(64, 1, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    policy = Policy(vanishing=1e-9)
    with anynan.torch.track(model, advanced=anynan.Advanced(read=read), policy=policy) as tracker:
        model(torch.full((1, 64), size, dtype=dtype)).sum().backward()
        optimizer.step()
    assert tracker.events == ()
    if read == 3 and dtype in (torch.bfloat16, torch.float64):
        # Beyond the slot's own range, and the gradient is gone: not known.
        assert tracker.history.norms() == ()
        return
    ((_, norm),) = tracker.history.norms()
    assert norm == pytest.approx(size * 8, rel=1e-2)


def train_demo(bug: str, steps: int) -> Any:
    train_step, loader = demo.setup("lr", bug, 0)
    for step in range(steps):
        train_step(step, *loader.batch(step))
    return train_step


@pytest.mark.tier(2)
@pytest.mark.filterwarnings("ignore::anynan.AnynanWarning")
def test_an_explosion_alone_is_told_before_the_first_nan_with_how_far_since_when_and_where():
    assert train_demo("", 60).events == ()
    with pytest.raises(anynan.NonFiniteError) as caught:
        train_demo("lr", 120)
    struck = caught.value.event
    told = [event for event in caught.value.tracker.events if event.severity == "suspect"]
    assert {event.kind for event in told} == {"spike"}
    first, evidence = told[0], told[0].cause.evidence
    assert first.step <= struck.step - 5
    assert first.cause.tag == "exploding_gradient"
    assert f"times the median of the {first.step} updates before" in evidence
    assert "; largest in " in evidence
    assert "is usual; norm " in evidence
    assert evidence.endswith(f" at step {first.step}"), "steps are the training's"


@every_read
def test_a_jump_is_told_whatever_the_read_point(read: Any) -> None:
    model = net()
    step = trainer(model, torch.optim.SGD(model.parameters(), 0.0))
    advanced, policy = anynan.Advanced(read=read), Policy(spike=20)
    with anynan.torch.track(model, advanced=advanced, policy=policy) as tracker:
        for _ in range(8):
            step(torch.full((3, 4), 0.1))
        with torch.no_grad():
            model[3].weight *= 100.0
        with pytest.warns(AnynanWarning, match="times the median of the 8 updates before"):
            step(torch.full((3, 4), 0.1))
            tracker.flush()
    (event,) = tracker.events
    assert (event.kind, event.severity, event.step, event.layer) == ("spike", "suspect", 8, "")


@pytest.mark.parametrize("read", ["immediate", "end"])
def test_a_jump_made_bad_stops_before_the_update(read: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    step = trainer(model)
    policy = Policy(spike=20, bad=("spike",))
    with anynan.torch.track(model, advanced=anynan.Advanced(read=read), policy=policy):
        for _ in range(6):
            step(torch.ones(1, 2))
        before = model.weight.detach().clone()
        with pytest.raises(anynan.AnomalyError) as caught:
            step(torch.full((1, 2), 1e3))
    assert not isinstance(caught.value, anynan.NonFiniteError)
    assert torch.equal(model.weight, before)


def test_with_a_scaler_norms_are_those_without_the_scale() -> None:
    norms = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with anynan.torch.track(model, policy=Policy(spike=3, vanishing=1e-9)) as tracker:
            for _ in range(9):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert tracker.events == ()
        norms.append([norm for _, norm in tracker.history.norms()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_guard_that_sees_no_gradient_says_so() -> None:
    model = nn.Linear(2, 1)
    tracker = anynan.torch.track(model, policy=Policy(spike=10))
    with tracker, pytest.warns(AnynanWarning, match="no optimizer has updated weights"):
        for _ in range(8):
            model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
    assert any("spike" in note for note in tracker.notes)


@circumstance("vanishing_gradient")
@every_read
def test_a_deep_sigmoid_net_is_told_that_its_first_layers_learn_nothing(read: Any) -> None:
    layers = [layer for _ in range(9) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    step = trainer(model, torch.optim.SGD(model.parameters(), 1e-6))
    advanced, policy = anynan.Advanced(read=read), Policy(vanishing=1e-6)
    tracker = anynan.torch.track(model, advanced=advanced, policy=policy)
    x = torch.randn(8, 16)
    with pytest.warns(AnynanWarning, match="vanishing gradient") as warned, tracker:
        for _ in range(5):
            step(x)
    assert len(warned) == 1, "once, not at every step"
    (event,) = tracker.events
    assert (event.kind, event.layer, event.step) == ("vanishing", "0", 0)
    assert tracker.count("suspect") == 5
    names = [name for name, _ in event.trail]
    sizes = [size for _, size in event.trail if size is not None]
    assert names == [str(i) for i in range(0, 19, 2)]
    assert sizes == sorted(sizes), "it fades from the last layer to the first"
    assert event.cause.tag == "vanishing_gradient"
    assert "over all weights" in event.cause.evidence
