"""What anynan does on a device that is not the CPU: see test_device, which runs this file."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import anynan
from anynan import NonFiniteError, Policy
from anynan.torch.doctor import devices
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter import device
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import Fault, assert_same, bad, seed, stepping

SLATE = device.NAME
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "in one call": partial(torch.optim.Adam, fused=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "factored": torch.optim.Adafactor,
}


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    device.begin()


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    seed()
    yield
    torch.set_default_device(None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(80, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5)
        self.fault = Fault()
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fault(self.drop(self.norm(self.first(x)).relu())))


@dataclass
class Run:
    """Train a model on the device, and note how often each step made the host wait."""

    tracked: str = ""  # the model, the step, or nothing
    scale: float = 0.0  # the scaler's first; without one nothing is cast
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    reads: list[list[device.Read]] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed()
        self.model = Net().to(SLATE)
        self.updates = self.optimizer(self.model.parameters(), lr=0.01)
        scale = {"init_scale": self.scale or 1.0, "enabled": bool(self.scale)}
        self.scaler = torch.amp.GradScaler(SLATE, **scale)
        self.loss = nn.CrossEntropyLoss()
        self.call: Any = self.step
        self.batches = torch.Generator().manual_seed(1)
        if self.tracked:
            target = self.model if self.tracked == "model" else self.step
            self.tracker = anynan.torch.track(target, **self.options)
            if self.tracked == "step":
                self.call = self.tracker

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.updates.zero_grad()
        with torch.autocast(SLATE, dtype=torch.float16, enabled=bool(self.scale)):
            loss: torch.Tensor = self.loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.updates)
        self.scaler.update()
        return loss

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            x = torch.randn(500, 80, generator=self.batches).to(SLATE)
            y = torch.randint(0, 4, (500,), generator=self.batches).to(SLATE)
            with device.counted() as reads:
                try:
                    self.call(x, y)
                finally:
                    self.reads.append(reads)
        return self

    def end(self) -> dict[str, Any]:
        """Stop tracking, and give all that training has left."""
        if self.tracked:
            with device.counted() as reads:
                self.tracker.remove()
            assert not reads
        self.updates.zero_grad()
        return {
            "weights": [p.detach().cpu() for p in self.model.parameters()],
            "optimizer": copy.deepcopy(self.updates.state_dict()["state"]),
            "scale": self.scaler.get_scale(),
            "drawn": numbers(),
        }


def numbers() -> torch.Tensor:
    """Give the random state of the device."""
    return torch.get_device_module(SLATE).get_rng_state()


def added(run: Run, plain: Run) -> list[int]:
    """Count the reads of each step that tracking added."""
    return [len(one) - len(other) for one, other in zip(run.reads, plain.reads, strict=True)]


def beside(count: int, tracked: str = "model", **how: Any) -> tuple[Run, list[int]]:
    """Train as without a tracker, bit for bit; give the reads of each step that it added."""
    run = Run(tracked, **how).steps(count)
    plain = Run(**{**how, "options": {}}).steps(count)
    assert_same(run.end(), plain.end())
    return run, added(run, plain)


def test_the_device_counts_what_an_accelerator_would_wait_for() -> None:
    x = torch.ones(3, 4, device=SLATE, requires_grad=True)
    with device.counted() as reads:
        y = (x * 2).softmax(-1).view(4, 3)[1:].sum()
        y.backward()
    assert not reads
    for look in (
        y.item, y.cpu, y.tolist, lambda: bool(y), lambda: y.to("cpu", torch.float64), x.nonzero,
        lambda: x[x > 0], lambda: torch.equal(x, x), lambda: torch.zeros(3, 4).copy_(x.detach()),
    ):  # fmt: skip
        with device.counted() as reads:
            look()
        assert len(reads) == 1, (look, reads)
    with pytest.raises(TypeError, match="numpy"):
        x.detach().numpy()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)


@pytest.mark.parametrize("scale", [2.0**4, 0.0])
@pytest.mark.parametrize("tracked", ["model", "step"])
@pytest.mark.parametrize("level", ["step", "layer"])
def test_a_clean_step_adds_one_read_and_changes_no_bit(level, tracked, scale) -> None:
    with device.counted() as reads:
        Run(tracked, scale, options={"level": level}).tracker.remove()
    assert len(reads) == 1  # the weights, as tracking finds them
    run, counts = beside(4, tracked, scale=scale, options={"level": level})
    assert counts == [1, 1, 1, 1]
    assert max(read.size for step in run.reads for read in step) <= 2 * 30
    assert not run.tracker.events


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whatever_optimizer_updates_the_weights_one_read_is_added(name: str) -> None:
    assert beside(2, optimizer=OPTIMIZERS[name])[1] == [1, 1]


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"stats": ("mean", "norm")}, [1, 1, 1, 1]),
        ({"read": 2}, [0, 1, 0, 1]),
        ({"updates": 2}, [2, 1, 2, 1]),  # how far it moved the weights is known after it alone
        ({"parameters": True}, [2, 2, 2, 2]),  # once before and once after the update
        ({"action": "warn"}, [1, 1, 1, 1]),
        ({"policy": Policy(spike=50, vanishing=1e-12, headroom=1, large=1e9)}, [1, 1, 1, 1]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_asked_for_beside_the_readings_comes_along_where_it_can(options, reads) -> None:
    assert beside(4, options=split(options))[1] == reads


def test_at_the_level_of_operations_each_result_is_read_once() -> None:
    run, counts = beside(2, options={"level": "operation"})
    assert max(read.size for step in run.reads for read in step) <= 2 * 30
    assert max(counts) <= 90


def test_a_compiled_model_adds_one_read() -> None:
    run = Run("model")
    run.model = torch.compile(run.model, backend="aot_eager")  # type: ignore[assignment]
    run.steps(3)
    assert [len(reads) for reads in run.reads] == [1, 1, 1]
    assert {r.layer for r in run.tracker.history.last()} > {"first", "norm", "last"}
    run.tracker.remove()


def test_a_call_without_gradients_adds_one_read() -> None:
    run = Run("model")
    with torch.no_grad(), device.counted() as reads:
        run.model(torch.randn(5, 80, device=SLATE))
    assert len(reads) == 1


@pytest.mark.parametrize("level", [None, "step"])
@pytest.mark.parametrize("tracked", ["step", "model"])
@pytest.mark.parametrize(
    ("fault", "name", "cause"),
    [("forward", "log", "log_of_negative"), ("backward", "sqrt", "sqrt_gradient_at_zero")],
)
def test_a_failing_step_is_told_of_in_small_reads(fault, name, cause, tracked, level) -> None:
    options = {} if level is None else {"level": level}
    run = Run(tracked, options=options).steps(2)
    run.model.fault.armed = fault
    drawn = numbers()
    event = failure(run.steps, 1)
    assert (event.layer or "").endswith("fault")
    assert (event.phase, event.operation.name, event.cause.tag) == (fault, name, cause)
    assert (event.summary.device, event.notes) == ("slate:0", ())
    assert event.tried is not None
    # Summaries and ends, no array: the batch alone has 40 000 numbers.
    assert max(read.size for read in run.reads[-1]) <= 2 * 30
    assert len(run.reads[-1]) <= 300
    assert not torch.equal(numbers(), drawn)


def test_a_batch_that_came_in_bad_is_told_of_with_its_rows() -> None:
    run = Run("model").steps(1)
    x = torch.ones(500, 80)
    x[3], x[7, 2] = torch.nan, torch.inf
    with pytest.raises(NonFiniteError) as caught, device.counted() as reads:
        run.call(x.to(SLATE), torch.zeros(500, dtype=torch.long, device=SLATE))
    assert caught.value.event.phase == "input"
    assert "2 of 500 rows are bad: 3, 7" in str(caught.value)
    assert max(read.size for read in reads) <= 2 * 30


def test_the_second_run_draws_the_numbers_of_the_first() -> None:
    rare = Body(lambda x: torch.log(nn.functional.dropout(x.abs() + 1, 0.001)))
    model = nn.Sequential(nn.Linear(8, 8), rare).to(SLATE)
    tracker = anynan.torch.track(model)
    with pytest.raises(NonFiniteError) as caught:
        for _ in range(500):
            before = numbers()
            model(torch.ones(4, 8, device=SLATE)).sum().backward()
            tracker.flush()
    event = caught.value.event
    assert (event.operation.name, event.notes) == ("log", ())
    assert not torch.equal(numbers(), before)


def test_the_second_run_casts_as_the_first() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(SLATE)

    def step() -> None:
        with torch.autocast(SLATE, dtype=torch.float16):
            loss = model(1e5 * torch.ones(4, 8, device=SLATE)).float().sum()
        loss.backward()

    event = failure(anynan.torch.track(step))
    assert (event.operation.name, event.cause.tag) == ("astype", "overflow_in_dtype")


def test_what_an_update_makes_bad_is_an_event_of_the_optimizer() -> None:
    run = Run("model", optimizer=torch.optim.SGD).steps(1)
    run.updates.param_groups[0]["lr"] = torch.inf
    run.steps(1)
    assert len(run.reads[-1]) == 1
    event = failure(run.steps, 1)
    assert (event.phase, event.cause.tag) == ("optimizer", "optimizer_setting_bad")
    assert max(read.size for read in run.reads[-1]) <= 2 * 30


@pytest.mark.parametrize("tracked", ["model", "step"])
def test_a_scale_that_is_being_found_is_no_event_and_costs_a_few_reads(tracked: str) -> None:
    run, counts = beside(9, tracked, scale=2.0**20, optimizer=torch.optim.SGD)
    skipped = run.tracker.count("expected")
    assert 2 <= skipped <= 7
    assert max(counts[: skipped + 1]) <= 6
    # The last of these is judged where the next step begins, unless the step has an end itself.
    assert set(counts[skipped + 1 :]) == {1}
    assert not bad(run.tracker)


def test_the_steps_after_a_reported_one_ask_for_one_weight_and_no_more() -> None:
    run = Run("model", options={"action": "record"}, optimizer=torch.optim.SGD).steps(2)
    run.model.fault.armed = "forward"
    run.steps(1)
    run.model.fault.armed = None
    run.steps(4)  # all weights once, for what they hold now
    assert max(len(reads) for reads in run.reads[-3:]) <= 4
    assert max(read.size for reads in run.reads for read in reads) <= 2 * 30
    assert run.tracker.count("bad") == 1


def test_what_is_made_for_the_host_is_not_made_on_the_default_device() -> None:
    torch.set_default_device(SLATE)
    step = anynan.torch.track(stepping(nn.Linear(4, 4)))
    for _ in range(2):
        with device.counted() as reads:
            step(torch.ones(3, 4))
        assert len(reads) == 2  # what the step returns is read by itself
    assert failure(step, torch.full((3, 4), 1e30)).operation is not None


def test_check_reads_two_numbers_and_summarize_one_summary() -> None:
    x = torch.linspace(-1, 1, 3_000_000, device=SLATE).reshape(3, -1)
    for dtype in (torch.float32, torch.bfloat16):
        values = x.to(dtype)
        values[1, 7], values[2, 3], values[0, 5] = torch.nan, torch.inf, 0
        with device.counted() as reads, pytest.raises(NonFiniteError):
            anynan.check(values)
        assert max(read.size for read in reads) <= 64
        with device.counted() as reads:
            found = anynan.summarize(values)
        assert len(reads) == 1
        known = anynan.summarize(values.cpu())
        names = ("shape", "nan", "posinf", "zero", "subnormal", "min", "max", "first_bad")
        for name in (*names, "headroom"):
            assert getattr(found, name) == getattr(known, name), name
        assert (found.mean, found.rms) == pytest.approx((known.mean, known.rms))


def test_a_failing_call_is_kept_with_the_random_state_of_its_device(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Fault()).to(SLATE)
    tracker = anynan.torch.track(model, save=tmp_path / "bundle")
    model[1].armed = "forward"
    with pytest.raises(NonFiniteError):
        model(torch.ones(3, 8, device=SLATE)).sum().backward()
        tracker.flush()
    tracker.remove()
    held = (tmp_path / "bundle" / "tensors.safetensors").read_bytes()
    assert b"random.torch_slate_0" in held


def test_doctor_lists_the_device() -> None:
    assert devices()[1:] == ["slate:0"]


def test_the_cpu_and_the_device_are_compared() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.5), nn.Linear(64, 8))
    other = copy.deepcopy(model).to(SLATE)
    x = torch.randn(8, 64)
    assert anynan.compare(model, other, x).place is None
    other[1].eps = 1e-3
    assert anynan.compare(model, other, x).place.layer == "1"


def rank(number: int, folder: Path) -> None:
    """Be one of two ranks that average their gradients on the host; only the last one fails."""
    device.begin()
    group = {"init_method": f"file://{folder / 'store'}", "rank": number, "world_size": 2}
    distributed.init_process_group("gloo", **group)
    run = Run("model", optimizer=torch.optim.SGD)
    real = run.updates.step

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        run.updates.zero_grad()
        run.loss(run.model(x), y).backward()
        for p in run.model.parameters():
            mean = p.grad.cpu()
            distributed.all_reduce(mean)
            p.grad.copy_(mean / 2)
        real()

    run.call = step
    run.steps(3)
    clean = [len(reads) - len(list(run.model.parameters())) for reads in run.reads]
    run.model.fault.armed = "forward" if number else None
    event = failure(run.steps, 1)
    told = [event.layer, event.operation and event.operation.name, event.rank, event.step]
    largest = max(read.size for read in run.reads[-1])
    print(json.dumps({"clean": clean, "told": told, "largest": largest}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank(int(sys.argv[1]), Path(sys.argv[2]))
