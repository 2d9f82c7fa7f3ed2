"""A hunt over array code and scripts: margins, rules, what is told, and what is kept of it."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._apps.stress.batches import Batches
from anynan._apps.stress.hunt import lab_of
from anynan._apps.stress.inputs import Input
from anynan._apps.stress.rules import trials
from anynan._apps.stress.script import HUNT, READ, NoLoopError, hunt_in, stepped

X = np.random.default_rng(0).random((6, 3))


def _shares(x: Any) -> Any:
    return x / x.sum(axis=1, keepdims=True)


def _standard(x: Any) -> Any:
    return (x - x.mean()) / x.std()


def test_the_example_run_lists_each_edge_with_its_distance() -> None:
    def fn(x: Any) -> Any:
        return np.log(x) + np.exp(x)

    log, exp = sorted(anynan.stress(fn, X).margins, key=lambda margin: -margin.bits)
    assert log.site.operation == "log"
    assert log.distance == X.min()
    assert str(log).startswith(f"log at test_stress.py:{fn.__code__.co_firstlineno + 1}: smallest")
    assert exp.distance == pytest.approx(np.log(np.finfo(float).max) - X.max(), abs=1e-3)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (np.log, "log: smallest argument 0.25 "),
        (lambda x: 1 / x, "divide: divisor nearest 0 0.25 "),
        (np.sqrt, "sqrt: smallest argument 0.25 "),
        (lambda x: x**0.5, "pow: smallest base 0.25 "),
        (lambda x: x**-2, "pow: base nearest 0 0.25 "),
        (np.arcsin, "asin: largest argument 0.75 "),
        (np.exp, "exp: largest argument 0.75 "),
        (np.linalg.norm, "vector_norm: smallest result (its gradient) 0.9354 "),
        (np.std, "std: smallest result (its gradient) 0.2041 "),
        (lambda x: np.outer(x, x[:2]).var(axis=0, ddof=1), "var: fewest elements 3 "),
        (lambda x: x.astype(np.float16), "astype: largest result 0.75 "),
        (lambda x: x.astype(np.float16).sum(), "sum: largest result 1.5 "),
    ],
)
def test_an_operation_with_an_edge_is_listed(fn: Any, told: str) -> None:
    margins = anynan.stress(lambda x: fn(x), np.array([0.25, 0.5, 0.75]), budget=1e-9).margins
    found = [f"{x.site.operation}: {x.site.edge.what} {x.number:.4g} " for x in margins]
    assert told in found


def test_inputs_by_rule_are_made_of_every_kind_of_input() -> None:
    rows, labels = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    given = {"x": rows, "z": rows + 1, "y": labels, "seen": labels == 0}
    inputs = [Input.of(name, x, None) for name, x in given.items()]
    words = {trial.words for trial in trials(inputs)}
    of_rows = ["a row of zeros", "a row of ones", "two rows alike", "all rows alike", "all equal"]
    of_rows += ["zeros", "ones", "a row of equal numbers", "100 times as far apart"]
    of_rows += ["at the low end of the range", "a row at the high end of the range"]
    assert {f"x: {text}" for text in of_rows} <= words
    assert {"y: all labels are ignored", "y: all are 0", "y: all are 1"} <= words
    assert {"seen: the mask is False throughout", "seen: the mask is True throughout"} <= words
    assert "seen: nothing is left of the first row of the mask" in words
    assert {"z: the same as x", "one row only", "an empty batch", "length one"} <= words


def test_a_sample_that_spoils_the_others_is_told_outside_of_the_range() -> None:
    (finding,) = anynan.stress(lambda x: x - x.mean(axis=0), X).findings
    assert finding.words == "x: a NaN in the first row spoils other rows"
    assert finding.group == "outside"
    assert anynan.stress(lambda x: x - x.mean(axis=1, keepdims=True), X).findings == []


def test_equal_numbers_are_found_with_line_cause_and_fix() -> None:
    report = anynan.stress(_standard, X)
    (finding,) = [each for each in report.findings if each.group == "inside"]
    event = finding.event
    assert finding.words == "x: all equal"
    assert finding.numbers == f"18 of 18 numbers of x are 0.5291, and were {X.min():.4g} to 0.9351"
    assert f"   inputs   {finding.numbers}\n" in str(report)
    assert (event.operation.name, event.cause.tag) == ("divide", "divide_by_zero")
    assert event.operation.source.text == "return (x - x.mean()) / x.std()"
    assert event.tried.outcome == "finite"
    assert not report.ok


def test_what_a_step_prints_counts_as_what_it_returns() -> None:
    def step(x: Any) -> None:
        print(np.log(np.abs(x).sum(axis=1)).mean())

    def hidden(x: Any) -> None:
        print(np.where(x > 0, np.log(np.abs(x)), 0).sum())

    first = anynan.stress(step, X - 0.5).findings[0]
    assert (first.words, first.group) == ("x: a row of zeros", "inside")
    assert (first.event.severity, first.event.operation.name) == ("bad", "log")
    assert "contained" not in str(first.event)
    assert anynan.stress(hidden, X - 0.5).ok


def test_a_domain_says_what_can_come_in_and_nothing_else_is_tried() -> None:
    assert anynan.stress(_shares, X + 1, domain=(0, 2)).findings[0].group == "inside"
    assert anynan.stress(_shares, X + 1, domain={"x": (0.5, 2)}).findings == []


def test_an_input_that_the_code_refuses_does_no_harm() -> None:
    def careful(x: Any) -> Any:
        if not x.any(axis=1).all():
            raise ValueError("an empty row")
        return _shares(x)

    assert anynan.stress(careful, X, domain=(0, 1)).findings == []


def test_the_same_seed_gives_the_same_answer() -> None:
    one, two = (anynan.stress(_standard, X, seed=3) for _ in range(2))
    assert (str(one), one.runs) == (str(two), two.runs)


def test_a_hunt_leaves_no_trace() -> None:
    weights, x = np.ones(3), X.copy()

    def fn(x: Any) -> Any:
        weights[:] += x[0]
        x[0] = 7
        return _shares(x * weights)

    drawn = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert anynan.stress(fn, x).runs > 10
    assert weights.tolist() == [1, 1, 1]
    assert np.array_equal(x, X)
    assert np.random.get_state()[1].tolist() == drawn  # type: ignore[index]  # noqa: NPY002


def test_what_cannot_be_stressed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"stress\(\) cannot run a int on this example"):
        anynan.stress(3, X)
    with pytest.raises(ValueError, match="budget=0 leaves no time"):
        anynan.stress(np.log, X, budget=0)
    with pytest.raises(ValueError, match="domain= names 'y', and the inputs are x"):
        anynan.stress(_shares, X, domain={"y": (0, 1)})
    with pytest.raises(ValueError, match="domain= of x is empty"):
        anynan.stress(_shares, X, domain=(1, 0))


def test_an_infinity_that_is_returned_is_found_and_one_that_a_mask_hides_is_not() -> None:
    found: Any = anynan.stress(lambda x: np.log(np.abs(x).sum(axis=1)), X - 0.5).findings[0]
    assert (found.words, found.event.operation.name) == ("x: a row of zeros", "log")

    def masked(x: Any) -> Any:
        with np.errstate(divide="ignore"):
            scores = x @ x.T + np.log(np.tri(6))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return shares / shares.sum(axis=1, keepdims=True)

    report = anynan.stress(masked, X)
    assert [x.words for x in report.findings if x.group == "inside"] == []


def test_where_no_operation_is_seen_nothing_is_known() -> None:
    report = anynan.stress(lambda x: float(np.log(x.tolist()[0][0])), X)
    assert str(report).startswith("stress of <lambda>: not known: no operation of it was seen")
    assert not report.ok


LOSSES = """
import numpy as np

def standard(x):
    return (x - x.mean()) / x.std()

def mended(x):
    apart, spread = x - x.mean(), x.std()
    return np.where(spread == 0, 0, apart / np.where(spread == 0, 1, spread))

def scaled(options, *parts):
    return options["times"] * parts[0] / parts[0].sum(axis=1, keepdims=True)

def batch():
    return np.linspace(0, 1, 6).reshape(3, 2)
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give a module of the user's, and go where it is."""
    (tmp_path / "kept_losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import kept_losses  # type: ignore[import-not-found]

    yield kept_losses
    del sys.modules["kept_losses"]


def _run(path: str) -> None:
    """Run the tests of a file."""
    for test in [x for name, x in runpy.run_path(path).items() if name.startswith("test_")]:
        test()


def test_a_finding_is_a_test_that_fails_until_the_fault_is_mended(losses: Any) -> None:
    anynan.stress(losses.standard, X).to_pytest("test_found.py")
    text = Path("test_found.py").read_text()
    assert "from kept_losses import standard\n" in text
    assert 'x = np.full((6, 3), 0.529146569158256, dtype="float64")\n' in text
    with pytest.raises(AssertionError, match="1. the example itself"):
        _run("test_found.py")
    losses.standard = losses.mended
    _run("test_found.py")


def test_a_test_writes_containers_and_keeps_large_arrays_beside_it(losses: Any) -> None:
    x = np.random.default_rng(0).random((40, 3))
    report = anynan.stress(losses.scaled, {"times": 2}, x, domain=(0, 1))
    report.to_pytest("test_found.py")
    text = Path("test_found.py").read_text()
    assert "anynan.stress(scaled, {'times': 2}, x0, found={})" in text
    assert 'LARGE["1.x0"]' in text
    with np.load("test_found.npz") as kept:
        assert np.array_equal(kept["1.x0"], report.open[0].inputs["args[1]"])
    with pytest.raises(AssertionError, match="divide"):
        _run("test_found.py")


def test_a_target_without_a_name_needs_one(losses: Any) -> None:
    report = anynan.stress(lambda x: losses.standard(x), X)
    with pytest.raises(ValueError, match=r'name it, as in target="module:name"'):
        report.to_pytest("test_found.py")
    report.to_pytest("test_found.py", target="kept_losses:standard")
    with pytest.raises(AssertionError):
        _run("test_found.py")
    with pytest.raises(FileExistsError):
        report.to_pytest("test_found.py", target="kept_losses:standard")
    with pytest.raises(ValueError, match="nothing was found"):
        anynan.stress(losses.mended, X, domain=(0, 1)).to_pytest("test_other.py")


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("import torch", "torch.ones(2, dtype=torch.bfloat16, requires_grad=True)"),
        ("import jax.numpy as jnp", "jnp.ones(2, dtype='bfloat16')"),
        ("import tensorflow as tf", "tf.ones(2, tf.bfloat16)"),
        ("import mlx.core as mx", "mx.ones(2, dtype=mx.bfloat16)"),
        ("import array_api_strict", "array_api_strict.ones(2, dtype=array_api_strict.float32)"),
    ],
)
def test_an_array_is_written_in_the_words_of_its_framework(line: str, made: str) -> None:
    pytest.importorskip(line.split()[1])
    scope: dict[str, Any] = {"np": np}
    exec(line, scope)
    x = eval(made, scope)
    lab = lab_of(lambda x: x * 1, (x,))
    again = eval(lab.code(x).format('np.array([1.0, 1.0], dtype="float32")'), scope)
    assert lab.imports == (line,)
    assert (again.dtype, type(again)) == (x.dtype, type(x))
    assert lab.host(again).tolist() == [1, 1]
    assert getattr(again, "requires_grad", None) == getattr(x, "requires_grad", None)


def test_a_finding_is_saved_as_a_bundle(losses: Any, command: Any) -> None:
    finding = anynan.stress(losses.standard, X).findings[0]
    finding.save("bundle")
    assert "gives the same NaN here" in command("replay", "bundle")[1]
    with pytest.raises(FileExistsError):
        finding.save("bundle")
    losses.standard.__code__ = losses.mended.__code__
    with pytest.raises(ValueError, match="nothing goes bad in standard this time"):
        finding.save("other")


def test_a_file_of_accepted_findings_is_written_and_read(losses: Any, anynan_stress: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="1. x: all equal"):
        anynan_stress(losses.standard, X)
    report = anynan.stress(losses.standard, X)
    path = Path("accepted.toml")
    with pytest.raises(ValueError, match="say why"):
        report.accept(path, "")
    report.accept(path, 'batches are "shuffled"')
    path.write_text("# mine\n" + path.read_text())
    report.accept(path, "again")
    assert path.read_text().startswith("# mine\n")
    known = anynan_stress(losses.standard, X, accept=path).findings[0]
    assert known.reason == 'batches are "shuffled"'
    with pytest.raises(pytest.fail.Exception):  # it is another target's
        anynan_stress(losses.scaled, {"times": 2}, X, domain=(0, 1), accept=path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "is no TOML"),
        ("y = 1", r"holds more than tables \[\[accepted\]\]: y"),
        ('[[accepted]]\nfinding = "x"\nreason = ""', "has a finding, a reason and maybe a target"),
    ],
)
def test_a_bad_file_of_accepted_findings_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "accepted.toml"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        anynan.stress(np.log, X, accept=path)
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        anynan.stress(np.log, X, accept=path)


@pytest.mark.usefixtures("losses")
def test_the_command_writes_a_baseline_and_tests(command: Any) -> None:
    def hunt(*words: str) -> Any:
        return command("stress", *words, "--example", "kept_losses:batch", "kept_losses:standard")

    status, told, _ = hunt("--to-pytest", "test_found.py")
    assert status == 1
    assert told.startswith("stress of standard: ")
    assert "1. x: all equal (inside the example's range" in told
    with pytest.raises(AssertionError, match="divide"):
        _run("test_found.py")
    baseline, file = ("--write-baseline", "known"), ("--accept", "accepted.toml")
    assert "as --accept FILE" in hunt(*baseline)[2]
    assert hunt(*file, *baseline)[0] == 0
    status, told, _ = hunt(*file)
    assert status == 0
    assert "accepted\n  x: all equal\n    known\n" in told
    for wrong, said in (("losses", "give a script that ends in .py"), ("no.py", "no.py: No such")):
        status, _, error = command("stress", wrong)
        assert status == 2
        assert said in error


LOOP = """
import sys
count, rows = 0, [1, 2]

def backward(x):
    return x

def train(data):
    "Train."
    global count
    total = 0
    for epoch in range(3):
        for x in data:
            if x > 5:
                continue
            total = total + backward(x)
            count = count + 1
            for _ in data:
                break
            else:
                return "never"
            y = total
    return total, y
"""


def _hunted(source: str, hunt: Any, read: Batches) -> dict[str, Any]:
    code, _ = stepped(source, "train.py")
    scope: dict[str, Any] = {HUNT: hunt, READ: read, "__name__": "__main__"}
    exec(code, scope)
    return scope


def _stepped(source: str, call: str) -> dict[str, Any]:
    scope = _hunted(source, lambda step, *given: step(*given), Batches())
    exec(call, scope)
    return scope


def test_the_body_of_a_loop_works_on_the_very_names_of_its_function() -> None:
    scope = _stepped(LOOP, "out = train([1, 9, 2])")
    plain: dict[str, Any] = {}
    exec(LOOP + "\nout = train([1, 9, 2])", plain)
    assert (scope["out"], scope["count"]) == (plain["out"], plain["count"]) == ((9, 9), 6)


def test_a_loop_of_the_script_itself_works_on_its_globals() -> None:
    source = "total = 0\nfor x in (1, 2):\n    loss = x\n    total += loss\n    [i for i in (1,)]\n"
    scope = _stepped(source, "")
    assert (scope["total"], scope["loss"], scope["x"]) == (3, 2, 2)
    assert "i" not in scope


READERS = """
import numpy as np
w, rows = np.ones(2), iter([np.ones(2)] * 9)

def read():
    return np.zeros((4, 2))

def pair():
    return read(), [1, 2]

def train():
    w.backward()

class Model:
    def __call__(self):
        return read()

model = Model()
"""


@pytest.mark.parametrize(
    ("statement", "is_batch"),
    [
        ("x = read()", True),
        ("x, y = pair()", True),
        ("x = next(rows)", True),
        ("x = np.ones(2)", False),  # of the arrays' own library
        ("x = model()", False),
        ("x = i and read()", False),  # from what the loop hands on
        ("x = float(read().sum())", False),
        ("x, y = train(), read()", False),
        ("x = nothing()", False),
    ],
)
def test_a_batch_that_the_loop_reads_is_handed_to_the_step(statement: str, is_batch: bool) -> None:
    found = list[tuple[Any, ...]]()
    batches, source = Batches(), f"{READERS}\nfor i in (1,):\n    {statement}\n"
    _hunted(source, lambda *given: found.append(given), batches)
    ((step, *given),) = found
    assert bool(batches) == is_batch
    assert any(x is not None for x in given[1:]) == is_batch
    if is_batch:
        step(1, *[7] * len(given[1:]))
        assert step.__globals__["x"] == 7


def test_the_innermost_loop_that_trains_is_meant() -> None:
    source = "for e in ():\n  for x in ():\n    loss.backward()\n  for y in ():\n    print(y)\n"
    assert stepped(source, "train.py")[1] == 2
    assert stepped("for x in ():\n  pass\nfor y in ():\n  print(y)\n", "train.py")[1] == 3


def test_a_script_without_a_loop_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    for text, said in (
        ("print(1)\n", "has no loop"),
        ("for x in ():\n    print(1)\n", "ended before its loop at line 1 ran"),
    ):
        script.write_text(text)
        with pytest.raises(NoLoopError, match=said):
            hunt_in(str(script), lambda step, *given: step, lambda code, scope: exec(code, scope))
