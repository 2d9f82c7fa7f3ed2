"""Where two PyTorch models part: the layer, the operation, the line; and what is only rounding."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from anynan.torch.messages import COMPILED_ENDS
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import assert_same, everything, hooks_on, stepping

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), 1.0
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        h = h * self.scale
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Routed(nn.Module):
    """Send each row to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 2)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).topk(1)
        x = torch.einsum("bi,bij->bj", x, self.experts[chosen[:, 0]]) * weight
        return self.out(x)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def port(model: Net) -> Net:
    return copy.deepcopy(model)


def test_a_copy_is_identical(model: Net, port: Net) -> None:
    found = anynan.compare(model, port, X)
    assert found.place is None
    assert found.ratio == 0
    assert found.sentence() == "no difference: everything that was compared is identical"


def test_the_layer_whose_eps_differs_is_named(model: Net, port: Net) -> None:
    port.blocks[1].norm.eps = 1e-4
    found = anynan.compare(model, port, X)
    assert (found.place.layer, found.place.way) == ("blocks.1.norm", "forward")
    assert str(found).startswith("First in `blocks.1.norm`, ")
    assert "everything before is identical" in str(found)
    assert "  setting eps is 1e-05 in the first, 0.0001 in the second\n" in str(found)


def test_a_layers_own_arithmetic_is_named_with_its_line(model: Net, port: Net) -> None:
    port.blocks[2].scale = 1.01
    found = anynan.compare(model, port, X)
    operation = found.operation
    assert (found.place.layer, operation.last, operation.name) == ("blocks.2", "gelu", "multiply")
    assert operation.source.text == "h = h * self.scale"
    assert found.settings == (("scale", 1.0, 1.01),)


def test_a_weight_that_differs_is_the_reason(model: Net, port: Net) -> None:
    port.blocks[0].up.weight.data = port.blocks[0].up.weight.data.flip(0)
    found = anynan.compare(model, port, X)
    assert (found.place.layer, found.weights[0][0]) == ("blocks.0.up", "blocks.0.up.weight")
    assert "weight  blocks.0.up.weight differs by" in str(found)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def test_a_wrong_gradient_is_found_where_the_forward_pass_agrees(model: Net, port: Net) -> None:
    norm = port.blocks[1].norm
    forward = norm.forward
    norm.forward = lambda x: Halved.apply(forward(x))
    found = anynan.compare(model, port, X)
    assert (found.place.layer, found.place.way) == ("blocks.1.norm", "backward")
    assert "of the backward pass in `blocks.1.norm`" in found.sentence()
    assert anynan.compare(model, port, X, backward=False).place is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_precision_is_rounding(model: Net, port: Net, dtype: torch.dtype) -> None:
    found = anynan.compare(model, port.to(dtype), X)
    assert found.place is None, str(found)
    assert 0 < found.ratio < 8


def test_a_layer_that_loses_digits_by_itself_is_told_from_its_heirs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Body(lambda x: x + 100 - 100), nn.Linear(16, 4))
    found = anynan.compare(model, copy.deepcopy(model).bfloat16(), X, limit=200)
    assert found.place is None
    local = {row.layer: row.local for row in found.rows if row.local is not None}
    assert local["1"] > 10 * local["0"]
    assert local["2"] < 8


def test_names_lead_from_one_to_the_other(model: Net) -> None:
    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h, self.lm = copy.deepcopy(model.blocks), copy.deepcopy(model.head)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.h:
                x = block(x)
            return self.lm(x)

    port = Port()
    port.h[1].norm.eps = 1e-3
    for names in ({"blocks.*": "h.*", "head": "lm"}, {}):
        found = anynan.compare(model, port, X, names=names)
        assert (found.place.layer, found.place.other) == ("blocks.1.norm", "h.1.norm")
        assert "`blocks.1.norm` (`h.1.norm` of the second)" in found.sentence()
    with pytest.raises(ValueError, match="fits no layer of the first model"):
        anynan.compare(model, port, X, names={"layers.*": "h.*"})
    with pytest.raises(ValueError, match="leads to no layer of the second model"):
        anynan.compare(model, port, X, names={"blocks.*": "layers.*"})


def test_what_has_no_partner_is_said_and_is_no_error(model: Net, port: Net) -> None:
    port.blocks = nn.ModuleList(list(port.blocks)[:2])
    found = anynan.compare(model, port, X)
    assert any("blocks.2" in hole for hole in found.holes)
    assert found.place.layer in ("head", "")


def test_a_choice_that_differs_ends_the_comparison() -> None:
    torch.manual_seed(0)
    model = Routed()
    x = torch.randn(6, 8)
    torch.nn.init.zeros_(model.gate.weight)
    model.gate.bias.data = torch.tensor([1.0, 1.0 + 1.2e-7, 0.0, 0.0])  # nearly a tie
    port = copy.deepcopy(model)
    port.gate.bias.data = model.gate.bias.data[[1, 0, 2, 3]]
    found, held = (anynan.compare(model, port, x, follow=follow) for follow in (False, True))
    for each in (found, held):
        assert (each.place, each.differs) == (None, True)
        assert "`topk` in the model's own code chooses otherwise" in each.sentence()
        assert any("follow=True" in hole for hole in each.holes) == (each is found)
    assert found.turns[0].choice.name == "topk"
    assert "the second model was held to the first one's choices" in str(held)
    assert [row.layer for row in held.rows if row.way == "forward"] == ["gate", "out", ""]


class Dropping(nn.Module):
    """Drop, with or without another draw before it."""

    def __init__(self, before: bool = False) -> None:
        super().__init__()
        self.up, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            torch.manual_seed(7)
        return self.head(self.drop(self.up(x)))


def test_dropout_that_draws_otherwise_ends_the_comparison_or_is_followed() -> None:
    torch.manual_seed(0)
    model, port = Dropping(), Dropping(before=True)
    port.load_state_dict(model.state_dict())
    x = torch.randn(6, 8)
    found = anynan.compare(model, port, x)
    assert found.place is None, str(found)
    assert "`dropout` in `drop` draws otherwise" in found.sentence()
    assert [row.layer for row in found.rows] == ["up"]
    held = anynan.compare(model, port, x, follow=True)
    assert (held.place, held.differs) == (None, False), str(held)
    assert {row.layer for row in held.rows if row.ratio is not None} == {"up", "drop", "head", ""}
    assert "of its draws differ; the second model was held to the first one's draws" in str(held)
    port.head.weight.data *= 1.01
    assert anynan.compare(model, port, x, follow=True).place.layer == "head"
    assert anynan.compare(model, port.eval(), x).place.layer == "drop"  # of one side alone
    assert anynan.compare(model.eval(), port, x).place.layer == "head"


def test_a_relu_that_rounding_turns_ends_the_backward_pass_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with torch.no_grad():
        model[0].bias -= model[0](x)[0]  # one row lies at the limit
    port = copy.deepcopy(model)
    port[0].bias.data += 1e-7
    found = anynan.compare(model, port, x)
    assert found.place is None, str(found)
    assert any("lies on its other side" in hole for hole in found.holes)


class Counting(nn.Module):
    """Change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.inner, self.calls, self.last = nn.Linear(6, 3), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.calls, self.last = self.calls + 1, x
        return self.inner(x / self.mean)


@pytest.mark.parametrize("product", ["compare", "precision", "stress"])
def test_a_model_that_changes_in_each_call_is_as_before(product: str) -> None:
    a = Counting()
    b, mean = copy.deepcopy(a), a.mean
    given = (a, b) if product == "compare" else (a,)
    getattr(anynan, product)(*given, torch.randn(4, 6))
    assert (a.mean is mean, a.calls, a.last) == (True, 0, None)
    assert torch.equal(mean, torch.ones(6))


PRODUCTS: dict[str, Any] = {
    "compare models": lambda model, step, x: anynan.compare(model, copy.deepcopy(model), x),
    "compare": lambda model, step, x: anynan.compare(step, step, x),
    "precision": lambda model, step, x: anynan.precision(step, x),
    "precision autocast": lambda model, step, x: anynan.precision(step, x, how="autocast"),
    "stress": lambda model, step, x: anynan.stress(step, x),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_training_step_is_not_taken_and_all_is_as_before_bit_for_bit(product: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(4, 6)
    step = stepping(model, optimizer)

    def held() -> Any:
        states = [x for state in optimizer.state.values() for x in state.values()]
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
        kept = [(id(x), x._version, x.dtype) for x in tensors]
        return kept, everything([model], [optimizer]), x.clone(), x.requires_grad, hooks_on(model)

    step(x)
    before = held()
    found = PRODUCTS[product](model, step, x)
    assert_same(before, held())
    if product == "compare":  # the step goes back by itself
        assert any("gradient-failed" in note for note in found.holes + found.notes)


def test_a_scripted_model_has_no_layers_to_compare() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 3)))
    assert "Nothing could be compared" in str(anynan.compare(scripted, scripted, torch.ones(2, 6)))


def test_a_model_that_fails_leaves_nothing(model: Net) -> None:
    with pytest.raises(RuntimeError, match="expected input with shape"):
        anynan.compare(model, copy.deepcopy(model), torch.ones(2, 3))
    assert not hooks_on(model)


def test_a_capture_of_another_process_is_compared(model: Net, port: Net, tmp_path) -> None:
    port.blocks[1].norm.eps = 1e-4
    anynan.comparing.capture(port, X).save(tmp_path / "port.npz")
    found = anynan.compare(model, anynan.comparing.Capture.load(tmp_path / "port.npz"), X)
    assert found.place.layer == "blocks.1.norm"


@pytest.mark.tier(2)
def test_compiled_code_is_compared_at_its_ends(model: Net, port: Net) -> None:
    compiled = torch.compile(port, backend="aot_eager")
    found = anynan.compare(model, compiled, X)
    assert found.place is None, str(found)
    assert found.notes == (COMPILED_ENDS(),)
    assert any(row.layer == "" and row.ratio is not None for row in found.rows)


def test_the_page_shows_the_place_and_every_layer(model: Net, port: Net, tmp_path: Path) -> None:
    port.blocks[1].norm.eps = 1e-4
    found = anynan.compare(model, port, X)
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "First in `blocks.1.norm`" in page
    assert page.count("<rect") == len([row for row in found.rows if row.ratio is not None])


def test_nan_in_one_weight_is_told_as_that_and_on_both_sides_is_no_silent_agreement() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    other, x = copy.deepcopy(model), torch.ones(2, 4)
    other[0].weight.data[0, 0] = torch.nan
    text = str(anynan.compare(model, other, x))
    assert "First in `0`, which makes NaN or Inf in the second model alone" in text
    assert "weight  0.weight holds NaN or Inf in one of the two, and not in the other" in text
    assert "nowhere" not in text
    found = anynan.compare(other, copy.deepcopy(other), x)
    assert not found.differs
    assert "both made NaN or Inf, first in `0`" in found.sentence()


@pytest.mark.parametrize("other", [1.0, 1.5])
def test_nan_of_both_backward_passes_is_said_with_its_place(other: float) -> None:
    class Root(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.out, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            return self.out((h * 0).sqrt() + h) * self.scale

    found = anynan.compare(Root(1.0), Root(other), torch.ones(2, 4))
    assert found.differs == (other != 1)
    assert "both made NaN or Inf, first of the backward pass in `inner`" in found.sentence()


def test_shapes_that_differ_are_told_as_shapes() -> None:
    found = anynan.compare(nn.Linear(4, 3), nn.Linear(4, 5), torch.ones(2, 4))
    assert "makes (2, 3) in the first model and (2, 5) in the second" in found.sentence()
    assert "backward" not in found.sentence()


def test_a_batch_is_given_by_name() -> None:
    model, inputs = nn.Linear(4, 2), {"input": torch.ones(2, 4)}
    other = copy.deepcopy(model)
    assert not anynan.compare(model, other, inputs=inputs).differs
    other.bias.data += 1
    assert anynan.compare(model, other, inputs=inputs).differs
    ready = anynan.comparing.capture(other, inputs=inputs)
    assert anynan.compare(model, ready, inputs=inputs).differs
