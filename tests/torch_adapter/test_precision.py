"""What breaks first in half precision, and what to keep in float32."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anynan
from anynan._cli.commands import main
from anynan.torch.observe import Sight
from anynan.torch.replay.operands import Operation


class Gated(nn.Module):
    """Overflow between the modules: 400 * 400 is beyond float16."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        for layer in (self.gate, self.up):
            nn.init.zeros_(layer.weight)
            nn.init.constant_(layer.bias, 400.0)
        nn.init.constant_(self.down.weight, 2.5e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp, self.last = nn.Linear(8, 8), Gated(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mlp(self.first(x)) / 1000)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_a_product_between_two_modules_is_found_by_operation_layer_and_line() -> None:
    report = anynan.precision(Net(), X)
    found = report.first()
    assert (found.name, found.layer, found.phase) == ("multiply", "mlp", "forward")
    assert found.kind == "overflow"
    assert found.bits == pytest.approx(-1.29, abs=0.01)
    assert found.source.text == "return self.down(F.silu(self.gate(x)) * self.up(x))"
    assert not report.fits
    assert "in the forward pass it overflows first at multiply in mlp" in report.sentence()
    worst = anynan.reports.headroom(report, "float16")[0]
    assert (worst.layer, worst.over) == ("mlp", pytest.approx(-1.29, abs=0.01))
    assert "module outputs only" not in str(worst)


def test_the_plan_keeps_the_module_and_its_code_makes_the_model_finite() -> None:
    model = Net()
    report = anynan.precision(model, X)
    assert report.plan.layers == {"mlp.up": False, "mlp.down": True}
    assert report.plan.sizes == {"mlp.up": 72, "mlp.down": 72}
    assert "keep in float32 mlp.up (144 bytes more), mlp.down (144 bytes more)" in str(report)
    assert report.plan.finite and report.plan.distance < 0.01
    half = copy.deepcopy(model).half()
    assert not torch.isfinite(half(X.half())).any()
    exec(report.code, {"model": half, "torch": torch})
    assert torch.isfinite(half(X.half())).all()
    assert half.mlp.up.weight.dtype is torch.float32


def test_what_reads_a_result_beyond_the_dtype_is_kept_and_not_all_around_it() -> None:
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    nn.init.constant_(block[1].weight, 1e4)
    nn.init.constant_(block[1].bias, 4e5)
    nn.init.constant_(block[3].weight, 1e-5)
    report = anynan.precision(nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8)), X)
    assert report.plan.finite
    assert set(report.plan.layers) == {"1.1", "1.3"}


def test_what_shows_no_operation_is_not_said_to_fit() -> None:
    report = anynan.precision(lambda x: x.numpy().sum(), X)
    assert not report.fits
    assert "not known: no operation of it was seen" in str(report)


def test_code_that_asks_for_float32_is_run_as_it_asks() -> None:
    def careful(x: torch.Tensor) -> torch.Tensor:  # as the norms of language models are
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True))).to(x.dtype)

    assert anynan.precision(careful, X * 1000).sentence() == "fits"


def test_a_gradient_that_overflows_is_told_by_its_forward_line_and_cured_by_a_loss_scale() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x: torch.Tensor) -> None:
        (model(x).float().sum() * 1e6).backward()

    report = anynan.precision(step, X, how="autocast")
    assert report.first("forward", "loss") is None
    assert report.first("backward").layer in ("2", None)
    assert report.plan.finite and report.plan.scale < 1 and report.plan.layers == {}


def test_gradients_that_vanish_are_told_with_their_share() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    report = anynan.precision(lambda x: (model(x) * 1e-7).sum().backward(), X)
    assert report.flushed().phase == "backward" and "flushes" in report.sentence()


def test_an_update_whose_epsilon_becomes_0_is_told() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x).sum() * 0).backward()
        optimizer.step()

    assert anynan.precision(step, X).first("optimizer").name == "addcdiv"
    assert anynan.precision(step, X, how="autocast").fits


def test_a_step_that_cannot_run_in_half_is_told_from_float32_and_never_fits() -> None:
    model, batch = nn.Linear(8, 8), X  # the batch is the step's own: nobody casts it

    report = anynan.precision(lambda: model(batch) * 1e6)
    assert not report.ran
    assert any("the target does not run in float16" in note for note in report.notes)
    assert report.first().name == "multiply"
    small = anynan.precision(lambda: model(batch))
    assert small.first() is None and not small.fits and "not known" in small.sentence()


def test_a_mask_is_no_fault_whether_it_is_inf_or_the_smallest_number() -> None:
    def attend(x: torch.Tensor, smallest: bool) -> torch.Tensor:
        least = torch.finfo(x.dtype).min if smallest else -torch.inf
        return (x @ x.T + torch.full((4, 4), least, dtype=x.dtype).triu(1)).softmax(-1)

    for how in ("cast", "autocast"):
        assert anynan.precision(attend, X, True, how=how).fits  # type: ignore[arg-type]
    assert anynan.precision(attend, X, False).fits


def test_a_step_runs_once_in_float32_and_once_in_the_dtype(monkeypatch) -> None:
    steps, again = list[str](), list[str]()
    run, rerun = Sight.run, Operation.rerun
    monkeypatch.setattr(Sight, "run", lambda *a, **k: steps.append("") or run(*a, **k))
    monkeypatch.setattr(
        Operation, "rerun", lambda op, *a, **k: again.append(op.kernel) or rerun(op, *a, **k)
    )
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    def step(x: torch.Tensor, factor: float = 1.0) -> None:
        (model(x) * factor).square().mean().backward()

    assert anynan.precision(step, X, plan=False).fits
    assert len(steps) == 2 and not again  # sums and products are bounded by their sizes
    steps.clear()
    assert not anynan.precision(step, X, 1e6, plan=False).fits
    assert len(steps) == 2
    steps.clear()  # near the edge it fits in both ways: float32 arithmetic is asked first
    assert anynan.precision(lambda x: x * 4e4, torch.ones(2), plan=False).fits
    assert len(steps) == 3


@pytest.mark.parametrize("factor", [1.0, 200.0])
def test_a_product_whose_partial_sums_may_be_beyond_the_dtype_is_run(factor: float) -> None:
    signs = torch.tensor([1.0, -1.0] * 4)  # 40000 - 40000 + ... is 0
    report = anynan.precision(lambda x, y: x @ y, signs * factor, torch.full((8,), 200.0))
    assert report.fits
    assert report.rows[-1].partial == pytest.approx(8 * 200 * factor)


def test_rounding_errors_stand_beside_those_of_the_inputs() -> None:
    report = anynan.precision(nn.Linear(8, 8), X, dtype="bfloat16", errors=True)
    row = next(row for row in report.rows if row.kernel == "linear")
    assert 1e-5 < row.rounding < 1e-2 and 1e-5 < row.error < 1e-2


def test_a_float8_is_judged_by_the_operands_of_products() -> None:
    report = anynan.precision(nn.Linear(8, 8), X * 1000, dtype="float8_e4m3fn")
    assert {row.kernel for row in report.rows} == {"linear"}
    assert "fits with a scale for each operand; without one 1 operands overflow" in str(report)


def test_the_command_runs_a_function_and_its_status_tells(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "narrow_step.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "def wide():\n"
        "    x = model.weight.new_full((2,), 400.0)\n"
        "    return model(x / 400) + x * x\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["precision", "narrow_step:wide", "--no-plan"]) == 1
    assert "overflows first at multiply" in capsys.readouterr().out
    assert main(["precision", "narrow_step:wide", "--dtype", "bfloat16"]) == 0
    assert main(["precision", "narrow_step:nothing"]) == 2
    assert "narrow_step:nothing" in capsys.readouterr().err


def test_unfit_input_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='float99' is unknown"):
        anynan.precision(Net(), X, dtype="float99")
    with pytest.raises(ValueError, match="how='magic' is unknown; choose from cast"):
        anynan.precision(Net(), X, how="magic")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="precision\\(\\) cannot run a int"):
        anynan.precision(3)
