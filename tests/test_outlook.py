"""What the readings suggest: forecasts that do not cry wolf, dead layers, contained overflows."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import anynan
from anynan._readings.history import Ring
from anynan._runs.forecast import WINDOW, forecasts
from anynan._runs.overview import outlook
from anynan._runs.run import Run
from tests.steps import run_of, sites_of, step_of

TOP = 16.0  # bits: of a dtype whose largest number is 2**16
LENGTH, MORE, MANY = 400, 200, 200  # steps that are asked about, those after them; histories
NOISE = 0.25


def exponential(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    return random.uniform(2, 10) + random.uniform(0.01, 0.1) * t


def polynomial(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    grown = np.log2(1 + t / random.uniform(10, 100))
    return random.uniform(2, 10) + random.uniform(1, 4) * grown


def settling(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    start, end = random.uniform(2, 10), random.uniform(11, 15)
    return end - (end - start) * np.exp(-t / random.uniform(20, 200))


def walk(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    return random.uniform(2, 10) + np.cumsum(random.normal(0, 0.1, t.size))


def outlier(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    start = random.uniform(2, 10)
    held = np.full(t.size, start)
    held[random.integers(WINDOW, LENGTH)] += random.uniform(3, 15 - start)
    return held


def jump(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    start = random.uniform(2, 11)
    return np.where(t < random.integers(50, LENGTH - 50), start, start + random.uniform(1, 4))


def steady(random: np.random.Generator, t: NDArray[Any]) -> NDArray[Any]:
    return np.full(t.size, random.uniform(6, 14))


def history_of(sizes: NDArray[Any], every: int) -> Any:
    """Give the history as it is after each ``every`` steps; a layer is a history of its own."""
    history = Ring(WINDOW, math.inf)
    sites = sites_of(map(str, range(len(sizes))), 2.0**TOP)
    for step, column in enumerate(sizes.T):
        high = np.where(column < TOP, 2.0**column, np.inf).tolist()
        history.append(step_of(step, *((site, -x, x) for site, x in zip(sites, high, strict=True))))
        if step % every == 0:
            yield step, history


def counted(kind: Any) -> tuple[int, int, float, int, int]:
    """Count overflows, those foretold, the middle lead; histories that stay below, and alarms."""
    random, t = np.random.default_rng(0), np.arange(LENGTH + MORE)
    noise = random.normal(0, NOISE, (MANY, t.size))
    bits = np.stack([kind(random, t) for _ in range(MANY)]) + noise
    over = np.where((bits >= TOP).any(axis=1), (bits >= TOP).argmax(axis=1), -1)
    first: dict[int, int] = {}
    for step, history in history_of(bits[:, :LENGTH], 4):
        for found in forecasts(history):
            first.setdefault(int(found.layer or 0), step)
    late = [i for i in range(MANY) if WINDOW < over[i] < LENGTH]
    lead = [over[i] - first[i] for i in late if i in first]
    calm = [i for i in range(MANY) if over[i] < 0]
    return (
        len(late), len(lead), float(np.median(lead)) if lead else 0.0,
        len(calm), sum(i in first for i in calm),
    )  # fmt: skip


# kind: overflows, of these foretold, the middle lead in steps; calm histories, false alarms.
# A history is asked every fourth step: one false alarm anywhere counts.
COUNTS = {
    exponential: (174, 174, 55.0, 10, 0),
    polynomial: (61, 53, 64.0, 108, 0),
    settling: (0, 0, 0.0, 200, 3),
    walk: (0, 0, 0.0, 200, 0),
    outlier: (0, 0, 0.0, 200, 0),
    jump: (0, 0, 0.0, 200, 0),
    steady: (0, 0, 0.0, 200, 0),
}


@pytest.mark.parametrize("kind", COUNTS, ids=lambda kind: kind.__name__)
def test_what_a_forecast_finds_and_how_often_it_is_wrong(kind: Any) -> None:
    assert counted(kind) == COUNTS[kind]


def test_the_page_of_the_docs_has_these_counts() -> None:
    text = (Path(__file__).parents[1] / "docs" / "forecast.md").read_text(encoding="utf-8")
    for kind, (late, told, lead, calm, wrong) in COUNTS.items():
        found = f"{told} of {late}, {lead:.0f} steps before" if late else "none"
        assert f"| {found} | {wrong} of {calm} |" in text, kind.__name__


def run_with(steps: int, top: float = 65504.0, **ends: Callable[[int], tuple[float, float]]) -> Run:
    """Make a run whose layers give these ends at each step."""
    pairs = list(zip(sites_of(ends, top), ends.values(), strict=True))
    made = (step_of(step, *((site, *at(step)) for site, at in pairs)) for step in range(steps))
    return run_of(list(ends), made)


def test_a_forecast_is_a_line_of_the_report_the_all_clear_and_the_page(tmp_path: Path) -> None:
    growing: dict[str, Any] = {"layers.7": lambda step: (0.0, 2.0 ** (step / 10))}
    run = run_with(140, embed=lambda _: (-1.0, 2.0), **growing)
    (line,) = outlook(run)
    said = "at this rate float16 overflows in layers.7 in about 21 steps: 2.1 bits are left"
    assert line.startswith(f"  forecast  {said}")
    assert line in run.report()
    run.to_html(tmp_path / "page.html")
    assert said in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_layer_that_gives_one_number_is_a_line_and_no_alarm() -> None:
    layers: dict[str, Any] = {
        "relu": lambda _: (0.0, 0.0),
        "gate": lambda _: (0.5, 0.5),
        "head": lambda step: (1.0 / (step + 1), 1.0 / (step + 1)),
    }
    said = "  dead      every number of {} was {} in the last 10 steps"
    assert outlook(run_with(10, **layers)) == [said.format("relu", "0"), said.format("gate", "0.5")]
    assert not outlook(run_with(5, **layers))


def test_an_overflow_that_was_contained_is_a_line() -> None:
    run = run_with(
        9,
        proj=lambda step: (-3e3, 2e3) if step in (3, 5) else (-1.0, 1.0),
        norm=lambda step: (0.0, 0.0) if step in (3, 5) else (-2.0, 2.0),
    )
    (line,) = outlook(run)
    assert "norm gave only zeros in step 3, and in 1 step more, right after proj reached" in line
    assert not outlook(run_with(7, proj=lambda _: (-90.0, 90.0), relu=lambda _: (0.0, 0.0)))


def test_headroom_ranks_layers_by_how_safely_they_would_run_narrower() -> None:
    run = run_with(
        5,
        top=3.4e38,
        large=lambda step: (-(10.0 ** (step + 1)), 1.0),
        middle=lambda _: (-1.0, 1.0),
        tiny=lambda step: (0.0, 1e-6 if step else 1e-9),
        zero=lambda _: (0.0, 0.0),
        unread=lambda _: (1.0, 0.0),
    )
    found = anynan.reports.headroom(run, "float16")
    assert [each.layer for each in found] == ["tiny", "large", "middle", "zero", "unread"]
    tiny, large, middle, zero, unread = found
    assert (large.over_step, tiny.under_step) == (4, 0)
    assert large.over == pytest.approx(math.log2(65520 / 1e5))
    assert tiny.under == pytest.approx(math.log2(1e-9) + 25)
    assert (middle.bits or 0) > 15
    assert (zero.bits, unread.bits) == (math.inf, None)
    said = str(large)
    assert said.startswith("large: overflows at the top (forward, step 4), 28.3 at the bottom")
    assert str(middle).endswith("; module outputs only")
    assert anynan.reports.headroom(run, np.float16) == found
    with pytest.raises(ValueError, match="dtype='int8' is unknown; choose from float16, bfloat16"):
        anynan.reports.headroom(run, "int8")


def test_headroom_of_module_outputs_never_says_that_a_model_fits() -> None:
    torch = pytest.importorskip("torch")

    class Square(torch.nn.Module):  # type: ignore[name-defined]
        def forward(self, x: Any) -> Any:
            return (x * 400).square() * 1e-4

    model, x = torch.nn.Sequential(Square(), Square()), torch.ones(2, 1)
    with anynan.torch.track(model) as tracker, torch.no_grad():
        model(x)
    found = anynan.reports.headroom(tracker, "float16")
    assert all(str(each).endswith("; module outputs only") for each in found)
    assert "module outputs only: what is computed inside may need more" in tracker.report()
    assert model.half()(x.half()).isinf().all()  # what it says nothing of


def test_updates_are_looked_at_every_so_many_steps(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    truth = {}
    with anynan.torch.track(model, advanced=anynan.Advanced(updates=4)) as tracker:
        for step in range(30):
            if step == 28:
                optimizer.param_groups[0]["lr"] = 0.1
            before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
            after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            truth[step] = float((after - before).norm()), float(before.norm())
        seen = tracker.history.updates()
        assert [step for step, _, _ in seen] == list(range(0, 30, 4))
        for step, update, size in seen:
            assert (update, size) == pytest.approx(truth[step], rel=0.1)  # from a sample
        assert not {"anynan/update_norm", "anynan/update_ratio"} & set(tracker.metrics())
        assert len(tracker.history.updates("1")) == len(seen)
        tracker.to_jsonl(tmp_path / "run.jsonl")
        (line,) = (x for x in tracker.report().split("\n") if x.startswith("  update "))
    assert "times the median of the 5 before" in line
    assert anynan.load(tmp_path / "run.jsonl").history.updates() == seen
    with pytest.raises(ValueError, match="updates=0 is too small"):
        anynan.torch.track(model, advanced=anynan.Advanced(updates=0))


def test_a_step_of_which_only_the_arguments_were_read_gets_no_all_clear() -> None:
    cases: list[tuple[Any, Any, str]] = [
        (lambda x: None, np.ones(3), "nothing bad was read in 1 step"),
        (lambda x: x + 1, np.ones(3), "nothing went bad in 1 step"),
        (str.upper, "text", "nothing was read in 1 step"),  # or of another framework
    ]
    for function, x, said in cases:
        tracker = anynan.track(function)
        tracker(x)
        assert said in tracker.report()
