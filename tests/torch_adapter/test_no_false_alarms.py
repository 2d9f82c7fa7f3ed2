"""Programs that use Inf and NaN on purpose, and work: nothing may be reported of them.

Every program here runs under the default policy, and a warning is an error, so that a single
false alarm fails. ``test_these_programs_are_watched`` shows that the silence is no blindness.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from anynan._steps.tracked import inside
from tests.flat import split

pytestmark = pytest.mark.tier(2)

os.environ["HF_HUB_OFFLINE"] = "1"

INF = math.inf
STEPS = 3

# How a program is tracked: the model or the step, read at once or once a step, by operation.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("model", {}),
    "model-deferred": ("model", {"read": "end"}),
    "model-operation": ("model", {"level": "operation"}),
    "step": ("step", {}),
    "step-deferred": ("step", {"read": "end"}),
    "step-operation": ("step", {"level": "operation"}),
}
every_mode = pytest.mark.parametrize("mode", MODES)


def half(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Combine each kind with each option once, for the model and the step in turn."""
    modes = list(MODES)
    return [
        (kind, modes[(nth + 3 * (at + nth)) % 6])
        for at, kind in enumerate(kinds)
        for nth in range(3)
    ]


def watched(
    net: nn.Module, step: Callable[[], object], mode: str, *, steps: int = STEPS
) -> anynan.Tracker:
    """Run some steps, and hold that nothing bad was seen in them."""
    what, options = MODES[mode]
    with anynan.torch.track(net if what == "model" else step, **split(options)) as tracker:
        for _ in range(steps):
            step() if what == "model" else tracker()
    bad = [event for event in tracker.events if event.severity == "bad"]
    assert not bad
    assert tracker.count("bad") == 0
    assert not inside(tracker).notes
    return tracker


def training(net: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)

    def step() -> Tensor:
        assert net is not None  # found by its name
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return step


# Transformers.


# Masks.


class Attention(nn.Module):
    """Attend with an additive mask that comes from somewhere."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = mask
        hidden = torch.ones(5, 5).triu(1).bool()
        self.register_buffer("allowed", (~hidden).float())
        self.register_buffer("mask", torch.zeros(5, 5).masked_fill(hidden, -INF))
        # A bias and a mask in one, as ALiBi has it.
        self.register_buffer("bias", self.mask - torch.arange(5.0) / 2)
        self.kept = [self.bias.clone()]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        if self.kind == "buffer":
            scores = scores + self.mask
        elif self.kind == "bias":
            scores = scores + self.bias
        elif self.kind == "closure":
            scores = scores + self.kept[0]
        elif self.kind == "input":
            scores = scores + mask
        elif self.kind == "log":
            scores = scores + self.allowed.log()
        elif self.kind == "full":
            scores = scores + torch.full((5, 5), -INF).triu(1)
        elif self.kind == "written":
            scores = scores.clone()
            scores[..., self.allowed == 0] = -INF
        elif self.kind == "padded":
            scores = F.pad(scores, (0, 2), value=-INF)[..., :6]
        elif self.kind == "lowest":
            scores = scores.masked_fill(self.allowed == 0, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        return weights[..., :5] @ x


MASKS = ["buffer", "bias", "closure", "input", "log", "full", "written", "padded", "lowest"]


@pytest.mark.parametrize(("kind", "mode"), half(MASKS))
def test_additive_masks(kind: str, mode: str) -> None:
    net = nn.ModuleDict({"attend": Attention(kind), "last": nn.Linear(8, 1)})
    x, hidden = torch.randn(2, 5, 8), torch.ones(5, 5).triu(1).bool()
    mask = torch.zeros(5, 5).masked_fill(hidden, -INF)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.parts["last"](self.parts["attend"](x, mask))  # type: ignore[no-any-return]

    whole = Net()
    watched(whole, training(whole, lambda: whole(x, mask).sum()), mode)


class Marked(nn.Module):
    """Put a mark where nothing was measured: it leaves the layer on purpose."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.tensor([False, True, False]), self.mark, x)


class Unmarked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), x, 0)


@every_mode
def test_marks_that_another_layer_takes_away(mode: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Marked(INF), Unmarked(), nn.Linear(3, 1))
    x = torch.randn(4, 3)
    tracker = watched(net, training(net, lambda: net(x).square().sum()), mode)
    assert tracker.events, "it is noted, but only as suspect"
    assert {event.layer for event in tracker.events} == {"1"}


@every_mode
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(mode: str, *, weights: bool) -> None:
    net = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = torch.ones(5, 5).triu(1).bool()

    def loss() -> Tensor:
        out, _ = net(x, x, x, key_padding_mask=padding, attn_mask=causal, need_weights=weights)
        return out.square().sum()  # type: ignore[no-any-return]

    watched(net, training(net, loss), mode)


@every_mode
@pytest.mark.parametrize("evaluating", [True, False])
def test_transformer_encoder(mode: str, *, evaluating: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(2, 5).masked_fill(padding, -INF)

    def loss() -> Tensor:
        return net(x, causal, padding).square().sum()  # type: ignore[no-any-return]

    if not evaluating:
        watched(net, training(net, loss), mode)
        return
    net.eval()
    with torch.no_grad():
        watched(net, lambda: net is not None and loss(), mode)


# Bad values that are made and removed again.


class Guarded(nn.Module):
    """Make NaN or Inf of values without a gradient, and take it away again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        kind, missing = self.kind, x == 0
        if kind == "where":
            x = torch.where(missing, 0, x.log())
        elif kind == "division":
            x = torch.where(missing, 0, x.square() / x)
        elif kind == "double where":
            x = x * self.weight
            x = torch.where(missing, 0, torch.where(missing, 1, x).sqrt())
        elif kind == "nan_to_num":
            x = torch.nan_to_num(x / x)
        elif kind == "masked_fill":
            x = (1 / x).masked_fill_(missing, 0)
        elif kind == "indexed":
            x = x.log()
            x[missing] = 0
        elif kind == "nanmean":
            known = x.masked_fill(missing, math.nan)
            x = (x - known.nanmean(0)) / 2
        elif kind == "nanquantile":
            known = torch.where(missing, math.nan, x)
            x = x - torch.nanquantile(known, 0.5, dim=0)
        elif kind == "nansum":
            known = torch.full_like(x, math.nan)
            known[~missing] = x[~missing]
            x = x - known.nansum() / known.isfinite().sum()
        elif kind == "clamped":
            x = (1 / x).clamp(max=10)
        elif kind == "smallest":
            distances = torch.full((4,), INF)
            for row in x:
                distances = torch.minimum(distances, row.sum())
            x = x + distances.mean()
        elif kind == "compared":
            x = x + (x.log() > -1)
        elif kind == "exponential":
            x = x + torch.exp(-x.reciprocal())
        elif kind == "tangent":
            x = x + torch.atan(1 / x)
        elif kind == "unguarded":
            x = 1 / x
        return x * self.weight


GUARDS = [
    "where", "division", "double where", "nan_to_num", "masked_fill", "indexed", "nanmean",
    "nanquantile", "nansum", "clamped", "smallest", "compared", "exponential", "tangent",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), half(GUARDS))
def test_guards(kind: str, mode: str) -> None:
    net = nn.Sequential(Guarded(kind), nn.Linear(3, 1))
    x = torch.tensor([[1.0, 0.0, 2.0], [3.0, 1.0, 4.0]])
    tracker = watched(net, training(net, lambda: net(x).sum()), mode)
    if mode.endswith("operation") and kind in ("where", "nan_to_num", "clamped", "exponential"):
        assert tracker.events, "at operation level what is contained is shown"
        assert {event.severity for event in tracker.events} == {"suspect"}


@every_mode
def test_without_a_guard_it_is_reported(mode: str) -> None:
    net = nn.Sequential(Guarded("unguarded"), nn.Linear(3, 1))
    x = torch.tensor([[1.0, 0.0, 2.0]])
    with pytest.raises(anynan.NonFiniteError) as caught:
        watched(net, training(net, lambda: net(x).sum()), mode)
    assert (caught.value.event.layer, caught.value.event.phase) == ("0", "forward")


@every_mode
def test_max_pooling_over_inf_padding(mode: str) -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-INF), 3, 2)

    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2, padding=1), Pool())
    x = torch.randn(2, 1, 9, 9)
    watched(net, training(net, lambda: net(x).square().sum()), mode)


@every_mode
def test_ctc_loss_of_impossible_targets(mode: str) -> None:
    net = nn.Linear(4, 5)
    x = torch.randn(3, 2, 4)  # 3 frames cannot hold 4 targets
    targets, lengths = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 0]]), torch.tensor([4, 2])

    def loss() -> Tensor:
        logs = net(x).log_softmax(-1)
        return F.ctc_loss(logs, targets, torch.tensor([3, 3]), lengths, zero_infinity=True)

    watched(net, training(net, loss), mode)


@every_mode
def test_attention_function_with_every_key_masked(mode: str) -> None:
    # PyTorch defines its result as 0.
    net = nn.Linear(8, 8)
    x, mask = torch.randn(1, 2, 3, 8), torch.ones(3, 3).tril().bool()
    mask[1] = False

    def loss() -> Tensor:
        return F.scaled_dot_product_attention(net(x), x, x, attn_mask=mask).square().sum()

    watched(net, training(net, loss), mode)


@every_mode
def test_policy_with_forbidden_actions(mode: str) -> None:
    net = nn.Linear(3, 4)
    x, forbidden = torch.randn(5, 3), torch.tensor([False, True, False, True])

    def loss() -> Tensor:
        choice = torch.distributions.Categorical(logits=net(x).masked_fill(forbidden, -INF))
        action = choice.sample()  # type: ignore[no-untyped-call]
        return (choice.log_prob(action) - choice.entropy()).sum()  # type: ignore[no-untyped-call,no-any-return]

    watched(net, training(net, loss), mode)


@every_mode
def test_forward_algorithm_of_a_chain(mode: str) -> None:
    net = nn.Linear(3, 3)
    x, moves = torch.randn(4, 3), torch.zeros(3, 3, requires_grad=True)

    def loss() -> Tensor:
        total = torch.full((3,), -INF)
        total[0] = 0
        for scores in net(x):
            total = (total[:, None] + moves).logsumexp(0) + scores
        return total.logsumexp(0)

    watched(net, training(net, loss), mode)


@every_mode
def test_beam_search(mode: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.LogSoftmax(-1))

    @torch.no_grad()
    def search() -> Tensor:
        beams, totals = torch.randn(3, 4), torch.tensor([0.0, -INF, -INF])
        for _ in range(3):
            logs = net(beams).clone()
            logs[:, 0] = -INF  # a word that may not come
            best = logs.topk(2, -1).values[:, -1:]
            logs = logs.masked_fill(logs < best, -INF)
            chances = (totals[:, None] + logs).flatten()
            totals, chosen = chances.topk(3)
            beams = beams[chosen // 6] + 0.1
        torch.multinomial(logs.softmax(-1), 1)
        return totals

    watched(net, search, mode)


@every_mode
def test_empty_memory_that_is_filled_before_it_is_read(mode: str) -> None:
    class Cache(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.empty(4, 3)
            for i, row in enumerate(x):
                rows[i] = row
            more = torch.empty_like(x)
            torch.mul(x.detach(), 2, out=more)
            other = x.new_empty(4, 6)
            other[:, :3], other[:, 3:] = x, rows
            return other + more.repeat(1, 2)

    net = nn.Sequential(nn.Linear(3, 3), Cache())
    x = torch.randn(4, 3)
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    try:
        assert torch.empty(2).isnan().all()
        watched(net, training(net, lambda: net(x).sum()), mode)
    finally:
        torch.use_deterministic_algorithms(False)


# Loss scaling.


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_an_encoder_that_nests_its_padded_rows(read: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    x, padded = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        expected = net(x, src_key_padding_mask=padded)
        with anynan.torch.track(net, advanced=anynan.Advanced(read=read)) as tracker:
            for _ in range(2):
                got = net(x, src_key_padding_mask=padded)
            assert torch.allclose(got, expected, atol=1e-6)
            assert tracker.events == ()
            x[0, 0] = math.nan
            with pytest.raises(anynan.NonFiniteError):
                net(x, src_key_padding_mask=padded)
                tracker.flush()


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("level", ["step", "layer", "operation"])
@pytest.mark.parametrize("read", ["immediate", "end"])
def test_an_output_that_cannot_be_reduced_is_said_and_let_pass(level: Any, read: Any) -> None:
    class Masking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.given = torch.masked.masked_tensor(x.detach(), x.detach() > 0)
            return self.given

    net = Masking()
    with (
        pytest.warns(
            anynan.AnynanWarning, match="anynan cannot reduce the values of a MaskedTensor"
        ),
        anynan.torch.track(net, level=level, advanced=anynan.Advanced(read=read)) as tracker,
    ):
        assert net(torch.randn(2, 3)) is net.given
    assert tracker.events == ()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_more_statistics_of_eight_bits(dtype: torch.dtype) -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(dtype)

    net = Narrow()
    with anynan.torch.track(
        net, advanced=anynan.Advanced(stats=["mean", "norm", "rms"])
    ) as tracker:
        net(torch.ones(4))
    assert tracker.events == ()


def test_each_layer_with_an_optimizer_of_its_own() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizers = [torch.optim.Adam(net[0].parameters()), torch.optim.SGD(net[2].parameters())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with anynan.torch.track(net) as tracker:
            for _ in range(3):
                net(torch.randn(2, 3)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
    assert tracker.notes == ()


def test_a_buffer_that_was_bad_from_the_beginning_has_no_step_at_which_it_was_good() -> None:
    crit = nn.CrossEntropyLoss(weight=1 / torch.tensor([5.0, 3.0, 0.0]))
    net = nn.Linear(3, 3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = crit(net(x), y)
        return loss

    with anynan.torch.track(step) as tracker:
        tracker(torch.randn(2, 3), torch.tensor([0, 1]))  # the class of the Inf is not there
        with pytest.raises(anynan.NonFiniteError) as caught:
            tracker(torch.randn(2, 3), torch.tensor([0, 2]))
    event = caught.value.event
    assert (event.parameter, event.since) == ("crit.weight", None)
    assert "go back to the weights of step" not in str(caught.value)
