"""Programs that use Inf and NaN on purpose, and work: nothing may be reported of them.

Every program here runs under the default policy, and a warning is an error, so that a single
false alarm fails. ``test_without_a_guard_it_is_reported`` shows that the silence is no blindness.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anynan
from anynan._steps.tracked import inside
from tests.failing import failure
from tests.flat import split

INF, NAN = math.inf, math.nan

# How a program is tracked: the model or the step, read at once or once a step, by operation.
MODES: list[tuple[str, dict[str, Any]]] = [
    ("model", {}),
    ("step", {"read": "end"}),
    ("model", {"level": "operation"}),
    ("step", {}),
    ("model", {"read": "end"}),
    ("step", {"level": "operation"}),
]


def in_turn(kinds: Any) -> list[Any]:
    """Combine each kind with three of the modes; all but the first are variants."""
    return [
        pytest.param(
            kind, *MODES[(at + 2 * nth) % 6], id=f"{getattr(kind, '__name__', kind)}-{nth}",
            marks=[pytest.mark.tier(2)] if nth else [],
        )
        for at, kind in enumerate(kinds)
        for nth in range(3)
    ]  # fmt: skip


def watched(net: nn.Module, loss_of: Callable[[], Tensor], what: str, options) -> anynan.Tracker:
    """Train for some steps, and hold that nothing bad was seen in them."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)

    def step() -> Tensor:
        assert net is not None  # found by its name
        optimizer.zero_grad()
        loss = loss_of()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        return loss

    with anynan.torch.track(net if what == "model" else step, **split(options)) as tracker:
        for _ in range(3):
            step() if what == "model" else tracker()
    assert tracker.count("bad") == 0
    assert not inside(tracker).notes
    return tracker


class Body(nn.Module):
    """Run a function and weigh its results, if they have a size, as a layer of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor], size: int = 3) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(size)) if size else 1

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.weight


# Masks.

HIDDEN = torch.ones(5, 5).triu(1).bool()
MASK = torch.zeros(5, 5).masked_fill(HIDDEN, -INF)


def written(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., HIDDEN] = -INF
    return scores


MASKS: dict[str, Callable[[Tensor, nn.Module, Tensor], Tensor]] = {
    "buffer": lambda scores, layer, _: scores + layer.mask,
    "closure": lambda scores, layer, _: scores + MASK,
    "input": lambda scores, layer, mask: scores + mask,
    "log": lambda scores, layer, _: scores + (~HIDDEN).float().log(),
    "full": lambda scores, layer, _: scores + torch.full((5, 5), -INF).triu(1),
    "written": lambda scores, layer, _: written(scores),
    "padded": lambda scores, layer, _: F.pad(scores, (0, 2), value=-INF)[..., :6],
}


class Attention(nn.Module):
    """Attend with an additive mask that comes from somewhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query, self.key, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.kind = kind
        self.register_buffer("mask", MASK.clone())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = MASKS[self.kind](self.query(x) @ self.key(x).mT, self, mask)
        return self.last(scores.softmax(-1)[..., :5] @ x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "what", "options"), in_turn(MASKS))
def test_additive_masks(kind: str, what: str, options: Any) -> None:
    net, x = Attention(kind), torch.randn(2, 5, 8)
    watched(net, lambda: net(x, MASK).sum(), what, options)


@pytest.mark.parametrize(("what", "options"), MODES)
def test_marks_that_another_layer_takes_away(what: str, options: Any) -> None:
    mark = Body(lambda x: torch.where(torch.tensor([False, True, False]), INF, x), 0)
    unmark = Body(lambda x: torch.where(x.isfinite(), x, 0), 0)
    net, x = nn.Sequential(nn.Linear(3, 3), mark, unmark, nn.Linear(3, 1)), torch.randn(4, 3)
    tracker = watched(net, lambda: net(x).square().sum(), what, options)
    assert {event.severity for event in tracker.events} == {"suspect"}
    assert {event.layer for event in tracker.events} == {"1"}


# Bad values that are made and removed again.


GUARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x == 0, 0, x.log()),
    "double where": lambda x: torch.where(x == 0, 0, torch.where(x == 0, 1, x).sqrt()),
    "nan_to_num": lambda x: torch.nan_to_num(x / x),
    "masked_fill": lambda x: (1 / x).masked_fill_(x == 0, 0),
    "indexed": lambda x: x.log().index_put_((x == 0,), torch.zeros(())),
    "nanmean": lambda x: (x - x.masked_fill(x == 0, NAN).nanmean(0)) / 2,
    "nanquantile": lambda x: x - torch.nanquantile(torch.where(x == 0, NAN, x), 0.5, dim=0),
    "clamped": lambda x: (1 / x).clamp(max=10),
    "exponential": lambda x: x + torch.exp(-x.reciprocal()),
}


@pytest.mark.parametrize(("kind", "what", "options"), in_turn(GUARDS))
def test_guards(kind: str, what: str, options: Any) -> None:
    net = nn.Sequential(Body(GUARDS[kind]), nn.Linear(3, 1))
    x = torch.tensor([[1.0, 0.0, 2.0], [3.0, 1.0, 4.0]])
    tracker = watched(net, lambda: net(x).sum(), what, options)
    if "level" in options and kind in ("where", "nan_to_num", "clamped", "exponential"):
        assert {event.severity for event in tracker.events} == {"suspect"}, "what is contained"


@pytest.mark.parametrize(("what", "options"), MODES)
def test_without_a_guard_it_is_reported(what: str, options: Any) -> None:
    net = nn.Sequential(Body(lambda x: 1 / x), nn.Linear(3, 1))
    x = torch.tensor([[1.0, 0.0, 2.0]])
    event = failure(watched, net, lambda: net(x).sum(), what, options)
    assert (event.layer, event.phase) == ("0", "forward")


# Whole programs.

PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def multihead_attention() -> Any:
    net, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    masks = {"key_padding_mask": PADDED, "attn_mask": HIDDEN}
    return net, lambda: sum(
        net(x, x, x, need_weights=weights, **masks)[0].square().sum() for weights in (True, False)
    )


def ctc_loss_of_impossible_targets() -> Any:
    net, x = nn.Linear(4, 5), torch.randn(3, 2, 4)  # 3 frames cannot hold 4 targets
    targets, lengths = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 0]]), torch.tensor([4, 2])
    frames = torch.tensor([3, 3])
    return net, lambda: F.ctc_loss(
        net(x).log_softmax(-1), targets, frames, lengths, zero_infinity=True
    )


def attention_function_with_every_key_masked() -> Any:
    """PyTorch defines its result as 0."""
    net, x, mask = nn.Linear(8, 8), torch.randn(1, 2, 3, 8), torch.ones(3, 3).tril().bool()
    mask[1] = False
    return net, lambda: F.scaled_dot_product_attention(net(x), x, x, mask).square().sum()


def policy_with_forbidden_actions() -> Any:
    net, x, forbidden = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([False, True, False, True])

    def loss() -> Any:
        choice: Any = torch.distributions.Categorical(logits=net(x).masked_fill(forbidden, -INF))
        return (choice.log_prob(choice.sample()) - choice.entropy()).sum()

    return net, loss


def empty_memory_that_is_filled_before_it_is_read() -> Any:
    def fill(x: Tensor) -> Tensor:
        rows = torch.empty(4, 3)
        for i, row in enumerate(x):
            rows[i] = row
        more = torch.empty_like(x)
        torch.mul(x.detach(), 2, out=more)
        other = x.new_empty(4, 6)
        other[:, :3], other[:, 3:] = x, rows
        return other + more.repeat(1, 2)

    net, x = nn.Sequential(nn.Linear(3, 3), Body(fill, 6)), torch.randn(4, 3)
    return net, lambda: net(x).sum()


WHOLE = [
    multihead_attention, ctc_loss_of_impossible_targets, policy_with_forbidden_actions,
    attention_function_with_every_key_masked, empty_memory_that_is_filled_before_it_is_read,
]  # fmt: skip


@pytest.mark.parametrize(("program", "what", "options"), in_turn(WHOLE))
def test_programs_that_work(program: Any, what: str, options: Any) -> None:
    empty = program is empty_memory_that_is_filled_before_it_is_read
    torch.use_deterministic_algorithms(empty)  # torch.empty then holds NaN
    try:
        assert not empty or torch.empty(2).isnan().all()
        watched(*program(), what, options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_that_nests_its_padded_rows() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    x, padded = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        expected = net(x, src_key_padding_mask=padded)
        with anynan.torch.track(net) as tracker:
            for _ in range(2):
                got = net(x, src_key_padding_mask=padded)
            assert torch.allclose(got, expected, atol=1e-6)
            assert tracker.events == ()
            x[0, 0] = math.nan
            failure(net, x, src_key_padding_mask=padded)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("level", ["step", "layer", "operation"])
def test_an_output_that_cannot_be_reduced_is_said_and_let_pass(level: Any) -> None:
    class Masking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.given = torch.masked.masked_tensor(x.detach(), x.detach() > 0)
            return self.given

    net, said = Masking(), "anynan cannot reduce the values of a MaskedTensor"
    with pytest.warns(anynan.AnynanWarning, match=said), anynan.torch.track(net, level=level) as t:
        assert net(torch.randn(2, 3)) is net.given
    assert t.events == ()


def test_a_buffer_that_was_bad_from_the_beginning_has_no_step_at_which_it_was_good() -> None:
    crit, net = nn.CrossEntropyLoss(weight=1 / torch.tensor([5.0, 3.0, 0.0])), nn.Linear(3, 3)
    with anynan.torch.track(lambda x, y: crit(net(x), y)) as tracker:
        tracker(torch.randn(2, 3), torch.tensor([0, 1]))  # the class of the Inf is not there
        event = failure(tracker, torch.randn(2, 3), torch.tensor([0, 2]))
    assert (event.parameter, event.since) == ("crit.weight", None)
    assert "go back to the weights of step" not in anynan.reports.render(event)
