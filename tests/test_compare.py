"""The parts of a comparison that know no framework, and comparing files."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._apps.compare.captures import Capture, Choice, Taken
from anynan._apps.compare.distances import apart, holds, nearest, relative
from anynan._apps.compare.pairs import pairs

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def taken(layer: str, made: np.ndarray = X, call: int = 0) -> Taken:
    return Taken(layer, "Layer", call, "forward", (made,), (made,))


def test_a_distance_is_a_share_of_the_first_ones_size() -> None:
    assert relative(X, X * np.float32(1.5)) == pytest.approx(0.5)
    assert relative(np.zeros(2), np.ones(2)) == math.inf


def test_bad_values_agree_only_at_the_same_places() -> None:
    bad = np.array([1.0, np.nan, np.inf])
    assert relative(bad, bad) == 0
    assert relative(bad, np.array([1.0, np.inf, np.inf])) == math.inf
    assert relative(bad, np.array([np.nan, 1.0, np.inf])) == math.inf


def test_the_order_of_dimensions_is_found() -> None:
    assert nearest(X, X.transpose(2, 0, 1)) == 0
    square = np.arange(9.0).reshape(3, 3)
    assert nearest(square, square.T) == 0
    assert nearest(X, X[..., :2]) is None
    assert nearest(X, X[:, None]) == 0


def test_a_block_of_a_fused_weight_is_found() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 4, 6))
    fused = np.concatenate([q, k])
    assert holds(fused, k, 1e-7) and holds(fused.T, q, 1e-7)
    assert not holds(fused, k[::-1], 1e-7) and not holds(fused, k[:, :5], 1e-7)


def test_gradients_are_measured_by_the_size_of_all() -> None:
    nearly_nothing = np.full(2, 1e-9)
    a, b = (X, nearly_nothing), (X, -nearly_nothing)
    assert apart(a, b, layouts=False) == 2
    assert 0 < (apart(a, b, layouts=False, joint=True) or 0) < 1e-9


def test_partners_by_pattern_by_path_and_by_order() -> None:
    a = [taken("embed"), taken("layers.0"), taken("odd", X[0]), taken("head")]
    b = [taken("layers_0"), taken("strange", X[0]), taken("head"), taken("tokens")]
    found = {x.layer: y and y.layer for x, y in pairs(a, b, {"embed": "tokens"})}
    assert found == {"embed": "tokens", "layers.0": "layers_0", "odd": "strange", "head": "head"}


def test_a_capture_comes_back_from_its_file(tmp_path: Path) -> None:
    choice = Choice("topk", "gate", anynan.events.Source("a.py", 3, "f", "x"), np.array([1, 2]), 0)
    kept = Capture("torch", [taken("a")], {"w": X}, 0.5, [choice], notes=["n"])
    kept.save(tmp_path / "run.npz")
    found = Capture.load(tmp_path / "run.npz")
    assert (found.backend, found.unit, found.notes) == ("torch", 0.5, ["n"])
    assert found.taken[0].key == ("a", 0, "forward")
    assert (found.taken[0].made[0] == X).all() and (found.weights["w"] == X).all()
    assert found.choices[0].source == choice.source
    assert (found.choices[0].picked == [1, 2]).all()


def test_a_file_that_is_no_capture_is_refused_and_no_pickle_opened(tmp_path: Path) -> None:
    for content in (b"", b"nonsense", b"PK\x03\x04 cut"):
        (tmp_path / "run.npz").write_bytes(content)
        with pytest.raises(ValueError, match="no capture that anynan"):
            Capture.load(tmp_path / "run.npz")
    np.savez(tmp_path / "run.npz", said=np.array([{"form": 1}], dtype=object))
    with pytest.raises(ValueError, match="no capture"):
        Capture.load(tmp_path / "run.npz")


def test_what_nobody_can_run_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot run the first model: a int is no"):
        anynan.compare(3, 3, X)


# Files of weights.


def written(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def test_equal_files_do_not_differ_and_a_narrower_dtype_is_rounding(
    tmp_path: Path, command: Any
) -> None:
    x = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    a, b = written(tmp_path / "a.npz", w=x), written(tmp_path / "b.npz", w=x.astype(np.float16))
    assert command("compare", a, a)[:2] == (0, "No difference: 1 tensor is identical\n")
    status, said, _ = command("compare", a, b)
    assert status == 0
    assert "within 0.4 times what rounding explains" in said
    assert command("compare", a, b, "--max-ratio", "0.1")[0] == 1


def test_the_first_tensor_that_differs_is_named(tmp_path: Path, command: Any) -> None:
    changed = X.copy()
    changed[1, 2, 3] += 1
    a = written(tmp_path / "a.npz", u=X, v=X, w=X, old=X)
    b = written(tmp_path / "b.npz", u=X, v=changed, w=X[:1], new=X)
    status, said, _ = command("compare", a, b)
    assert status == 1
    assert said.startswith("1 of 2 tensors differ; first v: ")
    assert "what rounding to float32 explains" in said
    assert "  w: shape (2, 3, 4) in the first, (1, 3, 4) in the second" in said
    assert "  old: only the first file has it" in said
    assert "  new: only the second file has it" in said


@pytest.mark.parametrize("content", [None, b"", b"nonsense, and more of it"])
def test_a_file_that_cannot_be_read_gives_one_line(
    tmp_path: Path, command: Any, content: bytes | None
) -> None:
    a = written(tmp_path / "a.npz", w=X)
    if content is not None:
        (tmp_path / "b.npz").write_bytes(content)
    status, _, error = command("compare", a, tmp_path / "b.npz")
    assert status == 2
    assert re.fullmatch("anynan compare: .*b.npz.*\n", error)


def run(path: Path, slope: float) -> str:
    @anynan.track(action="record", level="operation")
    def step(x: np.ndarray) -> np.ndarray:
        return np.tanh(x * slope)

    step.to_jsonl(path)
    for i in range(4):
        step(X * (1 if i < 2 else slope))
    step.remove()
    return str(path)


def test_two_runs_part_at_a_step(tmp_path: Path, command: Any) -> None:
    a, b, c = (run(tmp_path / f"{i}.jsonl", slope) for i, slope in enumerate((0.01, 0.01, 0.02)))
    status, said, _ = command("compare", a, b)
    assert status == 0
    assert said.startswith("No gross difference in 4 steps")
    status, said, _ = command("compare", a, c)
    assert status == 1
    assert re.match("The runs first differ at step 0 (?s:.*)only gross differences show", said)
