"""Where two PyTorch models part: the layer, the operation, the line; and what is only rounding."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from anynan.torch.messages import COMPILED_ENDS


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = 1.0

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
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).topk(1)
        x = torch.einsum("bi,bij->bj", x, self.experts[chosen[:, 0]]) * weight
        return self.out(x)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def test_a_copy_is_identical(model: Net, x: torch.Tensor) -> None:
    found = anynan.compare(model, copy.deepcopy(model), x)
    assert found.place is None
    assert found.ratio == 0
    assert found.sentence() == "no difference: everything that was compared is identical"


def test_the_layer_whose_eps_differs_is_named(model: Net, x: torch.Tensor) -> None:
    port = copy.deepcopy(model)
    port.blocks[1].norm.eps = 1e-4
    found = anynan.compare(model, port, x)
    assert (found.place.layer, found.place.way) == ("blocks.1.norm", "forward")
    assert str(found).startswith("First in `blocks.1.norm`, ")
    assert "everything before is identical" in str(found)
    assert "  setting eps is 1e-05 in the first, 0.0001 in the second\n" in str(found)


def test_a_layers_own_arithmetic_is_named_with_its_line(model: Net, x: torch.Tensor) -> None:
    port = copy.deepcopy(model)
    port.blocks[2].scale = 1.01
    found = anynan.compare(model, port, x)
    assert found.place.layer == "blocks.2"
    assert (found.operation.last, found.operation.name) == ("gelu", "multiply")
    assert found.operation.source.text == "h = h * self.scale"
    assert found.settings == (("scale", 1.0, 1.01),)


def test_a_weight_that_differs_is_the_reason(model: Net, x: torch.Tensor) -> None:
    port = copy.deepcopy(model)
    port.blocks[0].up.weight.data = port.blocks[0].up.weight.data.flip(0)
    found = anynan.compare(model, port, x)
    assert found.place.layer == "blocks.0.up"
    assert [name for name, _ in found.weights] == ["blocks.0.up.weight"]
    assert "weight  blocks.0.up.weight differs by" in str(found)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def test_a_wrong_gradient_is_found_where_the_forward_pass_agrees(
    model: Net, x: torch.Tensor
) -> None:
    port = copy.deepcopy(model)
    tanh = port.blocks[1].norm
    forward = tanh.forward
    tanh.forward = lambda x: Halved.apply(forward(x))
    found = anynan.compare(model, port, x)
    assert (found.place.layer, found.place.way) == ("blocks.1.norm", "backward")
    assert "of the backward pass in `blocks.1.norm`" in found.sentence()
    assert anynan.compare(model, port, x, backward=False).place is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_precision_is_rounding(model: Net, x: torch.Tensor, dtype: torch.dtype) -> None:
    found = anynan.compare(model, copy.deepcopy(model).to(dtype), x)
    assert found.place is None, str(found)
    assert 0 < found.ratio < 8


class Cancelling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 100) - 100


def test_a_layer_that_loses_digits_by_itself_is_told_from_its_heirs(x: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Cancelling(), nn.Linear(16, 4))
    found = anynan.compare(model, copy.deepcopy(model).bfloat16(), x, limit=200)
    assert found.place is None
    local = {row.layer: row.local for row in found.rows if row.local is not None}
    assert local["1"] > 10 * local["0"]
    assert local["2"] < 8


def test_names_lead_from_one_to_the_other(model: Net, x: torch.Tensor) -> None:
    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = copy.deepcopy(model.blocks)
            self.lm = copy.deepcopy(model.head)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.h:
                x = block(x)
            return self.lm(x)

    port = Port()
    port.h[1].norm.eps = 1e-3
    for names in ({"blocks.*": "h.*", "head": "lm"}, {}):
        found = anynan.compare(model, port, x, names=names)
        assert (found.place.layer, found.place.other) == ("blocks.1.norm", "h.1.norm")
        assert "`blocks.1.norm` (`h.1.norm` of the second)" in found.sentence()
    with pytest.raises(ValueError, match="fits no layer of the first model"):
        anynan.compare(model, port, x, names={"layers.*": "h.*"})
    with pytest.raises(ValueError, match="leads to no layer of the second model"):
        anynan.compare(model, port, x, names={"blocks.*": "layers.*"})


def test_what_has_no_partner_is_said_and_is_no_error(model: Net, x: torch.Tensor) -> None:
    port = copy.deepcopy(model)
    port.blocks = nn.ModuleList(list(port.blocks)[:2])
    found = anynan.compare(model, port, x)
    assert any("blocks.2" in hole for hole in found.holes)
    assert found.place.layer in ("head", "")


def test_a_choice_that_differs_ends_the_comparison() -> None:
    torch.manual_seed(0)
    model = Routed()
    x = torch.randn(6, 8)

    def near_tie(first: float, second: float) -> Routed:
        port = copy.deepcopy(model)
        with torch.no_grad():
            port.gate.weight.zero_()
            port.gate.bias.copy_(torch.tensor([first, second, 0.0, 0.0]))
        return port

    a, b = near_tie(1.0, 1.0 + 1.2e-7), near_tie(1.0 + 1.2e-7, 1.0)
    found = anynan.compare(a, b, x)
    assert found.place is None
    assert found.turns
    assert found.turns[0].choice.name == "topk"
    assert "`topk` in the model's own code chooses otherwise" in found.sentence()
    assert "topk in the model's own code" in str(found)
    assert any("follow=True" in hole for hole in found.holes)
    assert found.differs
    held = anynan.compare(a, b, x, follow=True)
    assert held.place is None
    assert held.differs
    assert "`topk` in the model's own code chooses otherwise" in held.sentence()
    assert "the second model was held to the first one's choices" in str(held)
    assert not any("follow=True" in hole for hole in held.holes)
    assert [row.layer for row in held.rows if row.way == "forward"] == ["gate", "out", ""]


class Dropping(nn.Module):
    """Drop, with or without another draw before it, in either of two ways."""

    def __init__(self, before: bool = False, share: float = 0.5) -> None:
        super().__init__()
        self.up, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(share), nn.Linear(8, 2)
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
    assert held.place is None, str(held)
    assert not held.differs
    assert {row.layer for row in held.rows if row.ratio is not None} == {"up", "drop", "head", ""}
    assert "of its draws differ; the second model was held to the first one's draws" in str(held)
    port.head.weight.data *= 1.01
    assert anynan.compare(model, port, x, follow=True).place.layer == "head"
    assert anynan.compare(model.eval(), port.eval(), x).place.layer == "head"


def test_dropout_of_one_side_alone_is_a_difference() -> None:
    torch.manual_seed(0)
    model, port = Dropping(), Dropping()
    port.load_state_dict(model.state_dict())
    found = anynan.compare(model, port.eval(), torch.randn(6, 8))
    assert found.place.layer == "drop"


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


def test_nothing_is_changed(model: Net, x: torch.Tensor) -> None:
    model = nn.Sequential(model, nn.BatchNorm1d(5), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x.requires_grad_(True)
    state = torch.get_rng_state()
    found = anynan.compare(model, copy.deepcopy(model), x)
    assert found.place is None, str(found)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert x.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


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


def test_a_step_goes_back_by_itself_and_is_not_taken() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(4, 6)
    step(x)
    state = optimizer.state[model.weight]
    before = state["step"].item(), model.weight.tolist(), model.weight.grad.clone()
    found = anynan.compare(step, step, x)
    assert (state["step"].item(), model.weight.tolist()) == before[:2]
    assert torch.equal(model.weight.grad, before[2])
    assert any("gradient-failed" in note for note in found.holes + found.notes)


def test_a_scripted_model_has_no_layers_to_compare() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 3)))
    assert "Nothing could be compared" in str(anynan.compare(scripted, scripted, torch.ones(2, 6)))


def test_a_model_that_fails_leaves_nothing(model: Net) -> None:
    with pytest.raises(RuntimeError, match="expected input with shape"):
        anynan.compare(model, copy.deepcopy(model), torch.ones(2, 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_capture_of_another_process_is_compared(model: Net, x: torch.Tensor, tmp_path) -> None:
    port = copy.deepcopy(model)
    port.blocks[1].norm.eps = 1e-4
    anynan.comparing.capture(port, x).save(tmp_path / "port.npz")
    found = anynan.compare(model, anynan.comparing.Capture.load(tmp_path / "port.npz"), x)
    assert found.place.layer == "blocks.1.norm"


@pytest.mark.tier(2)
def test_compiled_code_is_compared_at_its_ends(model: Net, x: torch.Tensor) -> None:
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    found = anynan.compare(model, compiled, x)
    assert found.place is None, str(found)
    assert found.notes == (COMPILED_ENDS(),)
    assert any(row.layer == "" and row.ratio is not None for row in found.rows)


def test_the_page_shows_the_place_and_every_layer(
    model: Net, x: torch.Tensor, tmp_path: Path
) -> None:
    port = copy.deepcopy(model)
    port.blocks[1].norm.eps = 1e-4
    found = anynan.compare(model, port, x)
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "First in `blocks.1.norm`" in page
    assert page.count("<rect") == len([row for row in found.rows if row.ratio is not None])
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert len(page) < 100_000


def test_nan_on_both_sides_is_no_silent_agreement() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.data[0, 0] = torch.nan
    found = anynan.compare(model, copy.deepcopy(model), torch.ones(2, 4))
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


def test_nan_in_one_weight_is_told_as_that_and_not_as_a_number_of_times() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    other = copy.deepcopy(model)
    other[0].weight.data[0, 0] = torch.nan
    text = str(anynan.compare(model, other, torch.ones(2, 4)))
    assert "First in `0`, which makes NaN or Inf in the second model alone" in text
    assert "weight  0.weight holds NaN or Inf in one of the two, and not in the other" in text
    assert "nowhere" not in text


def test_shapes_that_differ_are_told_as_shapes() -> None:
    found = anynan.compare(nn.Linear(4, 3), nn.Linear(4, 5), torch.ones(2, 4))
    assert found.differs
    assert "makes (2, 3) in the first model and (2, 5) in the second" in found.sentence()
    assert "backward" not in found.sentence()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, *, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.inner(ids) * scale
        return out


def test_a_batch_is_given_by_name() -> None:
    model = Named()
    other = copy.deepcopy(model)
    other.inner.bias.data += 1
    inputs = {"ids": torch.ones(2, 4), "scale": 2.0}
    assert not anynan.compare(model, copy.deepcopy(model), inputs=inputs).differs
    found = anynan.compare(model, other, inputs=inputs)
    assert found.place is not None and found.place.layer == "inner"
    ready = anynan.comparing.capture(other, inputs=inputs)
    assert anynan.compare(model, ready, inputs=inputs).differs
