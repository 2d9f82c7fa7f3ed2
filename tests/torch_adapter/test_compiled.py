"""Compiled models: readings from inside the graph, no breaks, no recompiles, the same report."""

import gc
import math
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import anynan
from anynan import AnynanWarning
from anynan._steps.tracked import inside
from anynan.torch.graphs.compiler import eager, whole
from tests.failing import failure
from tests.flat import split
from tests.torch_adapter.cause_parts import Body
from tests.torch_adapter.training import hooks_on, same, sgd, snapshot, stepping

pytestmark = pytest.mark.tier(2)


BACKEND = "aot_eager"  # traces as inductor does, forward and backward, and compiles in no time


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.log(self.linear(self.norm(x)) + 10)


class Net(nn.Module):
    def __init__(self, size: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(size, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(depth))
        self.head = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(call: Any, net: Net, steps: int, *, batch: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for i in range(steps):
        optimizer.zero_grad()
        call(torch.randn(batch + i % 2, 8)).square().mean().backward()
        optimizer.step()


def named(tracker: Any) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Give the last step's readings of layers by name."""
    return {
        (r.layer, r.phase, r.site.tensor): (r.lo, r.hi)
        for r in tracker.history.last()
        if r.site.parameter is None
    }


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
    torch.compiler.reset()


def in_one_graph(what: Any) -> Any:
    return torch.compile(what, backend=BACKEND, fullgraph=True)


def spoil(net: Net) -> None:
    """Let the logarithm in block 1 see negative numbers."""
    with torch.no_grad():
        net.blocks[1].linear.bias.sub_(20)


def watched(way: str, net: Any, **options: Any) -> tuple[Any, Any]:
    """Compile a model, or its blocks, before or after it is tracked."""
    call, chosen = net, split(options)
    tracker = anynan.torch.track(net, **chosen) if way in ("whole_before", "blocks") else None
    if way == "in_place":
        net.compile(backend=BACKEND, fullgraph=True)
    elif way == "blocks":
        for block in net.blocks:
            block.compile(backend=BACKEND, fullgraph=True)
    elif way == "wrapped_blocks":
        for i, block in enumerate(net.blocks):
            net.blocks[i] = in_one_graph(block)
    else:
        call = in_one_graph(net)
    return call, tracker or anynan.torch.track(call if way == "whole_after" else net, **chosen)


WAYS = ["whole_before", "whole_after", "inner_after", "in_place", "blocks", "wrapped_blocks"]


@cache
def eager_readings() -> dict[tuple[Any, ...], tuple[float, float]]:
    torch.manual_seed(1)
    net = Net()
    with anynan.torch.track(net) as tracker:
        train(net, net, 3)
        return named(tracker)


@cache
def untracked_graphs(*, by_block: bool) -> int:
    torch.compiler.reset()
    counters.clear()
    net = Net()
    call = net if by_block else in_one_graph(net)
    for block in net.blocks if by_block else ():
        block.compile(backend=BACKEND, fullgraph=True)
    train(call, net, 3)
    return counters["stats"]["unique_graphs"]


# One life of a model, as compiling it takes most of the time.
@pytest.mark.parametrize(
    ("way", "read"),
    [*((way, "auto") for way in WAYS), ("whole_before", "step"), ("blocks", "step")],
)
def test_readings_are_those_of_the_eager_model_in_as_many_graphs_and_the_origin_is_named(way, read):
    expected, plain = eager_readings(), untracked_graphs(by_block="blocks" in way)
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(1)
    net = Net()
    call, tracker = watched(way, net, read=read)
    train(call, net, 3)
    found = named(tracker)
    assert found.keys() == expected.keys()
    for key, (lo, hi) in expected.items():
        assert found[key] == pytest.approx((lo, hi), rel=1e-5, abs=1e-7), key
    assert counters["stats"]["unique_graphs"] == plain
    train(call, net, 6)
    assert counters["stats"]["unique_graphs"] == plain, "nothing is compiled again"
    assert not counters["graph_break"]
    assert len(tracker.history) == 9
    assert not tracker.notes
    spoil(net)
    event = failure(train, call, net, 2)
    assert (event.layer, event.phase, event.kind, event.step) == ("blocks.1", "forward", "nan", 9)
    assert event.operation.name == "log"
    assert event.operation.source.file == __file__
    assert event.cause.tag == "log_of_negative"


class Cache:
    """Set its attributes when it is first used, as transformers' caches do."""

    ready = False

    def fill(self, x: torch.Tensor) -> None:
        self.keys, self.ready = torch.tensor([], dtype=x.dtype), True


class Usual(nn.Module):
    """Walk a slice of its layers, and make a cache inside, as most transformers models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = Cache()
        for layer in self.layers[:3]:
            x = layer(x)
            if not cache.ready:
                cache.fill(x)
        logits = x + cache.keys.sum()
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.parametrize("way", [*WAYS[:3], "another is tracked"])
def test_one_graph_for_slices_objects_made_inside_and_an_output_nobody_uses(way: str) -> None:
    net = Usual()
    if way == "another is tracked":
        compiled, tracker = in_one_graph(net), anynan.torch.track(nn.Linear(2, 2))
    else:
        compiled, tracker = watched(way, net)
    for _ in range(12):
        compiled(torch.randn(2, 4))["loss"].backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not tracker.events
    read = {r.layer for r in tracker.history if r.phase == "backward"}
    assert read >= {"layers.0", "layers.2"} or way == "another is tracked"


def test_compiled_by_a_function_around_the_model() -> None:
    net = Net()
    with anynan.torch.track(net) as tracker:
        call = in_one_graph(lambda x: net(x) * 2)
        train(call, net, 2)
        assert ("blocks.1.linear", "backward", "grad") in named(tracker)
        spoil(net)
        event = failure(train, call, net, 1)
    assert event.layer == "blocks.1"
    assert "own call is part of the compiled code" in str(event)
    assert not counters["graph_break"]


def test_a_tracked_step_around_a_compiled_model() -> None:
    net = Net()
    call = in_one_graph(net)
    step: Any = anynan.torch.track(stepping(call, torch.optim.SGD(net.parameters(), lr=0.01)))
    for _ in range(3):
        step(torch.randn(4, 8))
    readings = named(step)
    assert ("blocks.1", "forward", "output") in readings
    assert (None, "loss", "loss") in readings
    spoil(net)
    before = snapshot(net)
    assert failure(step, torch.randn(4, 8)).operation.name == "log"
    assert same(before, net)


def test_a_fault_in_the_backward_pass() -> None:
    def distance(x: torch.Tensor) -> torch.Tensor:
        return (x - x.detach()).square().sum(-1).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Body(distance))
    anynan.torch.track(model)
    weight = model[0].weight.clone()
    event = failure(stepping(in_one_graph(model), sgd(model)), torch.randn(3, 4))
    assert (event.layer, event.phase, event.operation.name) == ("1", "backward", "sqrt")
    assert event.cause.tag == "norm_gradient_at_zero"
    assert torch.equal(model[0].weight, weight)


def test_the_second_of_several_calls_in_a_step() -> None:
    net = Net()
    anynan.torch.track(net)
    call, optimizer = in_one_graph(net), sgd(net)

    def step(*batches: torch.Tensor) -> None:
        for x in batches:
            call(x).mean().backward()
        optimizer.step()

    x, large = torch.randn(4, 8), torch.full((4, 8), 1e38)
    step(x, x, x)
    event = failure(step, x, large, x)
    assert (event.layer, event.call, event.step) == ("blocks.0.norm", 1, 1)


def test_a_graph_compiled_before_tracking_is_dropped_and_said() -> None:
    net = Net()
    call = in_one_graph(lambda x: net(x))
    train(call, net, 1)
    tracker = anynan.torch.track(net)  # nothing tells that `call` exists
    with pytest.warns(AnynanWarning, match=r"compiled before track\(\).*was not watched"):
        train(call, net, 1)
    assert ("blocks.1", "forward", "output") not in named(tracker)
    train(call, net, 1)
    assert ("blocks.1", "forward", "output") in named(tracker)
    assert "compiled before track()" in tracker.report()


def test_an_untracked_model_of_the_same_class() -> None:
    tracked, other = Net(), Net()
    tracker = anynan.torch.track(tracked)
    calls = [in_one_graph(net) for net in (tracked, other)]
    for _ in range(2):
        train(calls[0], tracked, 1)
        train(calls[1], other, 1)
        assert ("blocks.1", "forward", "output") in named(tracker)
    assert len(tracker.history) == 2
    assert not tracker.notes
    assert counters["stats"]["unique_graphs"] == 2


def test_the_setting_is_that_of_all_threads_and_comes_back_in_all() -> None:
    def now() -> bool:
        return torch._dynamo.config.skip_nnmodule_hook_guards

    with ThreadPoolExecutor() as another:
        tracker = anynan.torch.track(Net())
        assert (now(), another.submit(now).result()) == (False, False)
        another.submit(tracker.remove).result()
        assert (now(), another.submit(now).result()) == (True, True)


@pytest.mark.parametrize("way", [*WAYS[1:4], "wrapped_blocks"])
def test_a_compiled_model_that_ran_is_compiled_again(way: str) -> None:
    net = Net()
    call, tracker = watched(way, net)
    train(call, net, 1)
    tracker.remove()
    train(call, net, 1)
    with anynan.torch.track(call if way == "whole_after" else net) as tracker:
        assert any("compiles again" in remark for remark in tracker.notes)
        train(call, net, 1)
        assert ("blocks.1.linear", "backward", "grad") in named(tracker)


def test_a_fault_that_is_only_there_when_compiled() -> None:
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x / 0 if torch.compiler.is_compiling() else x

    model = nn.Sequential(nn.Linear(4, 4), Body(odd))
    call = torch.compile(model, backend=BACKEND)
    anynan.torch.track(call)
    event = failure(call, torch.randn(2, 4))
    assert event.layer == "1"
    assert "appears only in compiled code" in " ".join(event.notes)


def test_the_compiled_and_the_plain_model_are_one_target() -> None:
    net = Net()
    call = torch.compile(net, backend=BACKEND)
    anynan.torch.track(call)
    with pytest.raises(ValueError, match="this Net is tracked already"):
        anynan.torch.track(net)
    anynan.untrack(net)
    anynan.torch.track(net).remove()


def test_pausing_keeps_the_graph_and_reports_nothing() -> None:
    net = Net()
    tracker = anynan.torch.track(net)
    call = in_one_graph(net)
    with torch.no_grad():
        call(torch.randn(4, 8))
        graphs = counters["stats"]["unique_graphs"]
        tracker.pause()
        call(torch.full((4, 8), math.nan))
        tracker.resume()
        call(torch.randn(4, 8))
        assert (len(tracker.history), tracker.events) == (2, ())
        failure(call, torch.full((4, 8), math.inf))
    assert counters["stats"]["unique_graphs"] == graphs


def test_nothing_is_kept_alive() -> None:
    net = Net()
    tracker = anynan.torch.track(net)
    call = torch.compile(net, backend=BACKEND)
    train(call, net, 2)
    tracker.remove()
    torch.compiler.reset()
    gone = weakref.ref(tracker), weakref.ref(net.head.weight)
    del tracker, call, net
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_function_transforms_inside_a_graph_are_said(transform: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4)
    ways: Any = {"vmap": torch.vmap(model), "grad": torch.func.grad(lambda y: model(y).sum())}
    fn = ways[transform]
    expected = fn(x)
    tracker = anynan.torch.track(model)
    assert torch.allclose(in_one_graph(lambda x: fn(x))(x), expected)
    with pytest.warns(AnynanWarning, match="inside a function transform"):
        tracker.remove()


@dataclass
class Pair:
    one: torch.Tensor
    other: Any


class Boxes(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"a": x, "b": [x * 2, None, Pair(x * 3, x.detach().long())], "c": x[:0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(math.nan, "nan"), (math.inf, "posinf"), (-math.inf, "neginf"), ("large", None)],
)
def test_the_probe_law_holds_in_graphs(dtype: Any, value: Any, kind: str | None) -> None:
    model = Boxes()
    tracker = anynan.torch.track(model, action="record", advanced=anynan.Advanced(replay=False))
    call = in_one_graph(lambda x: model(x))
    x = torch.ones(3, 3, dtype=dtype)
    x[1, 1] = value if kind else 1e300 if dtype is torch.float64 else 1e4
    with torch.no_grad():
        call(x)
    tracker.flush()
    rows = inside(tracker).judge.rows()
    (reading,) = [rows.reading(i) for i in range(len(rows.lo))]
    assert (reading.kind, reading.site.dtype) == (kind, str(dtype).removeprefix("torch."))
    if kind is None and dtype is not torch.float64:  # whose slot holds no number as large
        assert reading.hi == pytest.approx(3e4, rel=0.01)


def test_statistics_beyond_the_ends_are_said_to_be_missing() -> None:
    net = Net()
    anynan.torch.track(net, advanced=anynan.Advanced(stats=("rms", "max")))
    said = r"compiled code measures only min, max and absmax, not Advanced\(stats=rms\)"
    with pytest.warns(AnynanWarning, match=said):
        train(torch.compile(net, backend=BACKEND), net, 1)


def test_inductor_fuses_the_probes() -> None:
    from torch._inductor.utils import run_and_get_code

    kernels, arrays, outputs = [], [], []
    x = torch.randn(64, 64)
    for tracked in (False, True):
        torch.compiler.reset()
        model = nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh())
        tracker = anynan.torch.track(model) if tracked else None
        call = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            output, (code,) = run_and_get_code(call, x)
        outputs.append(output)
        kernels.append(code.count("async_compile.cpp_pybinding("))
        arrays.append(code.count("empty_strided_cpu((64, 64)"))
        if tracker is not None:
            readings = named(tracker)
            tracker.remove()
    assert kernels == arrays == [1, 1]
    assert torch.equal(*outputs)
    for layer, y in [("0", x.relu()), ("2", x.relu().sigmoid().tanh())]:
        low, high = readings[(layer, "forward", "output")]
        assert (low, high) == pytest.approx((float(y.min()), float(y.max())), rel=1e-6)


@pytest.mark.parametrize("paused", [False, True])
def test_a_model_that_is_compiled_after_it_was_tracked_is_followed(paused: bool) -> None:
    # A class of PyTorch's own is compiled with hooks.
    model = nn.Sequential(nn.Linear(2, 2), Body(torch.log))
    tracker = anynan.torch.track(model, action="record")
    compiled: Any = torch.compile(model, backend="eager")
    if paused:
        tracker.pause()
        tracker.resume()
    nn.init.zeros_(model[0].weight)
    for bias in (1.0, -1.0):
        nn.init.constant_(model[0].bias, bias)
        compiled(torch.ones(3, 2)).sum().backward()
    tracker.flush()
    event = tracker.events[0]
    assert (event.layer, event.operation.name) == ("1", "log")
    assert [reading.layer for reading in tracker.history.select(phase="input")] == [""]
    tracker.remove()
    assert not hooks_on(compiled)


def test_of_second_runs_in_several_threads_the_last_lets_compiled_code_run_again() -> None:
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend=BACKEND)
    first, second = eager(), eager()
    with first:
        second.__enter__()
        assert not compiled(torch.ones(1))
    assert not compiled(torch.ones(1))
    second.__exit__(None, None, None)
    assert compiled(torch.ones(1))


class Descent(torch.optim.Optimizer):
    """An optimizer of somebody else's: PyTorch's own end a graph by themselves, this does not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=1e-4)


def updates(kind: Any, *, tracked: bool, fullgraph: bool) -> tuple[Any, list[str]]:
    """Train a model whose update is compiled; the third batch is too large. Give what is."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    net = Net()
    optimizer = kind(net.parameters())
    update = torch.compile(lambda: optimizer.step(), backend=BACKEND, fullgraph=fullgraph)
    tracker = anynan.torch.track(net, level="step", action="record") if tracked else None
    for i in range(5):
        net(torch.ones(3, 8) * (1e30 if i == 2 else 1)).square().mean().backward()
        update()
        optimizer.zero_grad()
    return tracker, [x.co_filename for x in get_compilation_metrics()]


def test_no_code_of_ours_is_compiled_where_an_update_is() -> None:
    tracker, files = updates(torch.optim.AdamW, tracked=True, fullgraph=False)
    assert files
    assert not [file for file in files if "anynan/torch" in file]
    assert (tracker.step, [event.step for event in tracker.events]) == (5, [2])


def test_an_update_that_is_compiled_whole_stays_whole_and_ends_its_step() -> None:
    _, untracked = updates(Descent, tracked=False, fullgraph=True)
    tracker, files = updates(Descent, tracked=True, fullgraph=True)
    assert files == untracked
    assert [event.step for event in tracker.events] == [2]
    whole.clear()  # it is known for as long as the process lives
