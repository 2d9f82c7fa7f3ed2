"""``anynan.track`` on array code: it runs as before, and a bad value is named where it began."""

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import anynan
from anynan.arrays.tracked import TrackedArray
from tests.recording import ONES, READS, ZEROS, Array, State, caught, recorded, same, track

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Pair(NamedTuple):
    first: Any
    second: Any


X = np.linspace(-2.0, 3.0, 12).reshape(3, 4)
SQUARE = X[:, :3] + 3 * np.eye(3)


def changed(x: Array) -> Array:
    x = x.copy()
    x[0] = 7.0
    x[:, 1] += 2.0
    x[x < 0] = 0.0
    x[[0, 2], [1, 1]] = -1.0
    x *= 2
    x -= x.mean()
    x **= 2
    return x


def iterated(x: Array) -> Any:
    total = 0.0
    for row in x:
        for item in row:
            total = total + item * 2
    return total


def sliced(x: Array) -> Any:
    return x[1:, ::2], x[..., None, 0], x[np.array([True, False, True])], x[-1][-1], x[x > 0]


def asked(x: Array) -> Any:
    return (
        x.shape, x.ndim, x.size, x.dtype, len(x), x.T.shape, x.nbytes, x.flags.c_contiguous,
        float(x[0, 0]), int(x[1, 1]), bool((x > 100).any()), x.tolist(), 3.0 in x, x.strides,
        isinstance(x.sum().item(), float), f"{x[0, 0]:.3f}", str(x[0]), repr(x[0]),
        range(5)[(x > 0).sum() * 0 + 2], list(x[0] > 0),
    )  # fmt: skip


def operators(x: Array) -> Any:
    n = (x * 10).astype(int)
    return (
        2 + x, x + 2, 2 - x, x / 3, 3 / (x + 9), x // 2, x % 2, divmod(x, 2), x**2, 2**x, -x, +x,
        abs(x), x @ x.T, X @ x.T, x @ X.T, ~(x > 0), (x > 0) & (x < 2), (x > 0) | (x < -1),
        (x > 0) ^ (x < 1), n << 1, n >> 1, x == X, x != X, X + x, X * x, x <= 0, np.float64(2) * x,
        round(x[0, 0], 2),
    )  # fmt: skip


def methods(x: Array) -> Any:
    y = x.copy()
    y.sort()
    z = x.copy()
    z.fill(3.0)
    w = x.copy()
    w.shape = (4, 3)
    w.flat[0] = 5.0
    c = x + 1j * x
    c.real = 0.0
    return (
        x.sum(), x.sum(0), x.mean(axis=1, keepdims=True), x.std(), x.var(ddof=1), x.min(), x.max(),
        x.argmax(), x.cumsum(), x.prod(), x.reshape(4, 3), x.ravel(), x.T, x.transpose(1, 0),
        x.astype("f4"), x.dot(x.T), x.clip(0, 1), x.round(1), x.copy(), x.flatten(), x.take([0, 1]),
        x.repeat(2), x.squeeze(), x.nonzero(), x.any(), x.all(), y, z, w, c, c.imag, c.conj(),
        x.view("i8"), x.swapaxes(0, 1), x.diagonal(), x.trace(), x.searchsorted,
    )[:-1]  # fmt: skip


def functions(x: Array) -> Any:
    out = np.empty_like(x)
    np.exp(x, out=out)
    np.add(out, 1.0, out=out, where=x > 0)
    y = x.copy()
    np.copyto(y, 1.0, where=y < 0)
    np.putmask(y, y > 2, 9.0)
    return (
        out, y, np.log1p(np.abs(x)), np.where(x > 0, x, 0.0), np.concatenate([x, X]),
        np.stack([x[0], x[1]]), np.vstack((x, x)), np.einsum("ij,kj->ik", x, X), np.clip(x, 0, 1),
        np.linalg.norm(x), np.linalg.svd(x), np.linalg.inv(x[:, :3] + 3 * np.eye(3)),
        np.linalg.solve(SQUARE, x), np.fft.fft(x), np.fft.irfft(np.fft.rfft(x)), np.sort(x),
        np.add.reduce(x), np.multiply.outer(x[0], x[1]), np.maximum.accumulate(x), np.mean(x),
        np.nanmean(x), np.median(x), np.quantile(x, 0.3), np.split(x, 3), np.array_equal(x, X),
        np.allclose(x, X), np.zeros_like(x), np.full_like(x, 2.0), np.pad(x, 1), np.tile(x, 2),
        np.dot(x, x.T), np.inner(x, x), np.outer(x[0], x[1]), np.diff(x), np.unique(x),
        np.interp(0.5, x[0], x[1]), np.cov(x), np.modf(x), np.frexp(x), np.tensordot(x, x),
        np.apply_along_axis(np.sum, 0, x), np.polyfit(x[0], x[1], 1), np.cross(x[0, :3], x[1, :3]),
        np.meshgrid(x[0], x[1]), np.broadcast_arrays(x, x[0]), np.shape(x), np.ndim(x),
        np.linalg.qr(x).Q, np.linalg.slogdet(x[:, :3]), np.trapezoid(x), np.iscomplexobj(x),
    )  # fmt: skip


def containers(x: Array) -> Any:
    return {"a": [x + 1, (x * 2, "text")], "b": Pair(x, None), "c": State(x[0], 3), "d": {1: x}}


PROGRAMS = [changed, iterated, sliced, asked, operators, methods, functions, containers]


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # NumPy 2.5's own
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@READS
def test_results_are_the_same(program: Callable[..., Any], read: Any) -> None:
    before = X.copy()
    tracker = track(program, advanced=anynan.Advanced(read=read))
    assert same(tracker(X), program(X))
    assert np.array_equal(before, X)
    assert not tracker.events
    assert not tracker.notes


def test_what_the_function_writes_into_its_arguments_arrives() -> None:
    def step(params: dict[str, Any], state: State, history: list[Any], x: Array) -> None:
        gradient = x.sum(0)
        params["w"] -= 0.1 * gradient
        params["b"] = params["b"] - 1.0
        params["new"] = gradient
        state.weight = state.weight * 2
        history.append(gradient)
        x[0] = 0.0

    def arguments() -> tuple[Any, ...]:
        return OrderedDict(w=np.ones(4), b=np.ones(2)), State(np.ones(2), 1), [X.copy()], X.copy()

    ours, plain = arguments(), arguments()
    weight, first = ours[0]["w"], ours[2][0]
    track(step)(*ours)
    step(*plain)
    assert same(ours, plain)
    assert ours[0]["w"] is weight and ours[2][0] is first


def test_containers_are_as_they_were_when_the_function_fails() -> None:
    def broken(params: dict[str, Any]) -> None:
        params["w"] = params["w"] + 1
        raise KeyError("mine")

    params = {"w": np.ones(2)}
    with pytest.raises(KeyError, match="mine"):
        track(broken)(params)
    assert type(params["w"]) is np.ndarray
    assert params["w"].tolist() == [2.0, 2.0]


def test_a_kept_array_is_an_array_still() -> None:
    kept: list[Any] = []
    track(lambda x: kept.append(x * 2))(np.ones(3))
    left: Any = kept[0]
    assert type(left) is TrackedArray
    left = kept[0]
    assert type(left + 1) is np.ndarray
    assert np.exp(left).tolist() == np.exp([2.0] * 3).tolist()
    assert type(pickle.loads(pickle.dumps(left))) is np.ndarray
    left[0] = 5.0
    assert np.asarray(left).tolist() == [5.0, 2.0, 2.0]


def test_numpy_warns_as_it_would_and_at_the_users_line() -> None:
    def program(x: Array) -> Any:
        total = np.add.reduce(np.full_like(x, 1.7e308))
        return np.log(x), x / x, total, np.sqrt(-x - 1), (-x - 1) ** 0.5

    def warned(function: Callable[..., Any]) -> list[tuple[str, str, int]]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            function(np.zeros(3))
        return [(str(item.message), item.filename, item.lineno) for item in seen]

    def choosing(x: Array) -> Any:
        with np.errstate(all="warn"):
            return np.log(x), x / x

    for fn, count in ((program, 5), (choosing, 2)):
        expected = warned(fn)
        assert len(expected) == count
        late = anynan.Advanced(read="end")
        for options in ({}, {"level": "step"}, {"advanced": late}):
            assert warned(track(fn, action="record", **options)) == expected


HUGE = np.full(3, 1e308)

NAMED: list[tuple[str, Callable[..., Any], Array]] = [
    ("log", lambda x: np.log(-x - 1), ZEROS),
    ("divide", lambda x: x / x, ZEROS),
    ("pow", lambda x: x**-1.0, ZEROS),
    ("sum", lambda x: x.sum(), HUGE),
    ("sum", lambda x: np.add.reduce(x), HUGE),
    ("cumsum", lambda x: np.cumsum(x), HUGE),
    ("mean", lambda x: np.mean(x[:0]), ZEROS),
    ("var", lambda x: x[:1].var(ddof=1), ONES),
    ("subtract", lambda x: x - (-x), HUGE),
    ("multiply", lambda x: np.outer(x, x), HUGE),
    ("matmul", lambda x: x @ x, HUGE),
    ("matmul", lambda x: np.dot(x, x), HUGE),
    ("einsum", lambda x: np.einsum("i,i->", x, x), HUGE),
    ("fft", lambda x: np.fft.fft(x), HUGE),
    ("vector_norm", lambda x: np.linalg.norm(x), HUGE),
    ("det", lambda x: np.linalg.det(np.diag(x)), HUGE),
    ("remainder", lambda x: np.mod(x + 1, x), ZEROS),
    ("astype", lambda x: x.astype("f4"), HUGE),
    ("log", lambda x: np.log(x, out=np.empty(3)), ZEROS - 1),
    ("multiply", lambda x: x.__imul__(x), HUGE.copy()),
]


@READS
@pytest.mark.parametrize(
    ("name", "program", "x"), NAMED, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(NAMED)]
)
def test_operation_is_named(name: str, program: Any, x: Array, read: Any) -> None:
    event = caught(program, x.copy(), read=read)
    assert event.operation.name == name
    assert event.operation.source.file == __file__
    assert event.backend == "numpy"
    assert (event.layer, event.phase) == ("", "forward")


def guard_with_where(x: Array) -> Any:
    return np.where(x > 0, np.log(x), 0.0)


def guard_with_mask(x: Array) -> Any:
    y = 1 / x
    y[~np.isfinite(y)] = 0.0
    return y


def guard_in_view(x: Array) -> Any:
    y = np.log(x)
    inside = y[:]
    inside[np.isinf(inside)] = 0.0
    return y


def masked_scores(x: Array) -> Any:
    scores = np.where(x > 0, x, -np.inf)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    "program", [guard_with_where, guard_with_mask, guard_in_view, masked_scores]
)
@READS
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_what_the_code_removes_itself_is_no_failure(program: Any, read: Any, level: Any) -> None:
    tracker = track(program, advanced=anynan.Advanced(read=read), level=level)
    assert same(tracker(np.array([0.0, 1.0, 2.0])), program(np.array([0.0, 1.0, 2.0])))
    assert all(event.severity == "suspect" for event in tracker.events)
    assert not tracker.notes
    if level == "layer":
        assert not tracker.events


def test_a_scope_is_left_by_what_is_used_outside_of_it() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("block"):
            with anynan.scope("inner"):
                y = x / x
            return np.nan_to_num(y)  # uses it outside of inner

    assert caught(program, ZEROS).layer == "block.inner"
    history = recorded(program, ONES).history.last()
    assert [r.layer for r in history] == [None, "block.inner", "block", None]


def test_what_a_view_wrote_is_followed_through_a_copy_of_its_base() -> None:
    def program(x: Array) -> Any:
        y = x + 1
        y[1:][...] = np.log(x[1:] - 2)
        return y.copy().sum()

    assert caught(program, ONES).operation.name == "log"
