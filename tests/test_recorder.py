"""``anynan.track`` on array code: it runs as before, and a bad value is named where it began."""

import copy
import functools
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import anynan
from anynan._recorder import floatflags, live
from anynan._recorder.tracked import TrackedArray

NAN, INF = float("nan"), float("inf")
Array = np.ndarray[Any, Any]

# The recorder itself; what the default makes of it is in test_recorder_ends.
track: Any = functools.partial(anynan.track, level="layer")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def caught(function: Callable[..., Any], *args: Any, **options: Any) -> anynan.Event:
    with pytest.raises(anynan.NonFiniteError) as error:
        track(function, **options)(*args)
    return error.value.event


def recorded(function: Callable[..., Any], *args: Any, **options: Any) -> anynan.Tracker:
    tracker: anynan.Tracker = track(function, action="record", **options)
    tracker(*args)
    return tracker


# The function runs as it would without a tracker.


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class State:
    weight: Any
    bias: Any


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


def same(a: Any, b: Any) -> bool:
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert all(same(a[key], b[key]) for key in a)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        assert all(same(x, y) for x, y in zip(a, b, strict=True))
    elif isinstance(a, State):
        return same(vars(a), vars(b))
    else:
        assert a == b
    return True


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("read", ["immediate", "step"])
def test_results_are_the_same(program: Callable[..., Any], read: Any) -> None:
    before = X.copy()
    tracker = track(program, read=read)
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
    inner = ours[0]["w"], ours[2][0]
    track(step)(*ours)
    step(*plain)
    assert same(ours, plain)
    assert (ours[0]["w"], ours[2][0]) == inner or ours[0]["w"] is inner[0]
    assert ours[2][0] is inner[1]


def test_containers_are_as_they_were_when_the_function_fails() -> None:
    def broken(params: dict[str, Any]) -> None:
        params["w"] = params["w"] + 1
        raise KeyError("mine")

    params = {"w": np.ones(2)}
    with pytest.raises(KeyError, match="mine"):
        track(broken)(params)
    assert type(params["w"]) is np.ndarray
    assert params["w"].tolist() == [2.0, 2.0]


def test_an_array_given_twice_is_given_back_as_itself() -> None:
    x = np.ones(3)
    first, second = track(lambda a, b: (a, [b]))(x, x)
    assert first is x
    assert second[0] is x


def test_a_kept_array_is_an_array_still() -> None:
    kept: list[Any] = []
    track(lambda x: kept.append(x * 2))(np.ones(3))
    left: Any = kept[0]
    assert isinstance(left, TrackedArray)
    left = kept[0]
    assert type(left + 1) is np.ndarray
    assert np.exp(left).tolist() == np.exp([2.0] * 3).tolist()
    assert type(pickle.loads(pickle.dumps(left))) is np.ndarray
    left[0] = 5.0
    assert np.asarray(left).tolist() == [5.0, 2.0, 2.0]


def test_copies_inside_are_copies() -> None:
    def program(x: Array) -> Any:
        y, z = copy.copy(x), copy.deepcopy([x])[0]
        y[0] = z[0] = 9.0
        return x, y, z

    x, y, z = track(program)(np.ones(2))
    assert (x.tolist(), y.tolist(), z.tolist()) == ([1, 1], [9, 1], [9, 1])


# NumPy's own warnings and errors are the user's business.


def test_numpy_warns_as_it_would_and_at_the_users_line() -> None:
    def program(x: Array) -> Any:
        first = np.log(x)
        second = x / x
        third = np.add.reduce(np.full_like(x, 1.7e308))
        return first, second, third, np.sqrt(-x - 1), (-x - 1) ** 0.5

    def warned(function: Callable[..., Any]) -> list[tuple[str, str, int]]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            function(np.zeros(3))
        return [(str(item.message), item.filename, item.lineno) for item in seen]

    expected = warned(program)
    assert len(expected) == 5
    assert warned(track(program, action="record")) == expected


def test_the_users_errstate_holds() -> None:
    def raising(x: Array) -> Any:
        with np.errstate(divide="raise"):
            return np.log(x)

    with pytest.raises(FloatingPointError, match="divide by zero encountered in log"):
        track(raising)(np.zeros(3))
    calls: list[str] = []

    def calling(x: Array) -> Any:
        with np.errstate(all="call", call=lambda kind, _: calls.append(kind)):
            return np.nan_to_num(np.log(x))

    track(calling)(np.zeros(3))
    assert calls == ["divide by zero"]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        assert track(lambda x: np.nan_to_num(np.log(x)))(np.zeros(2)).tolist()[0] < -1e300


# The operation is named.

ZEROS, ONES, SINGULAR = np.zeros(3), np.ones(3), np.ones((2, 2))
HUGE = np.full(3, 1e308)

NAMED: list[tuple[str, Callable[..., Any], Array]] = [
    ("log", lambda x: np.log(-x - 1), ZEROS),
    ("divide", lambda x: x / x, ZEROS),
    ("divide", lambda x: np.divide(1.0, x), ZEROS),
    ("divide", lambda x: 1 / x, ZEROS),
    ("sqrt", lambda x: np.sqrt(x - 1), ZEROS),
    ("pow", lambda x: x**-1.0, ZEROS),
    ("pow", lambda x: np.power(x, -1.0), ZEROS),
    ("reciprocal", lambda x: np.reciprocal(x), ZEROS),
    ("acos", lambda x: np.arccos(x + 2), ZEROS),
    ("exp", lambda x: np.exp(x + 1000), ZEROS),
    ("expm1", lambda x: np.expm1(x + 1000), ZEROS),
    ("sum", lambda x: x.sum(), HUGE),
    ("sum", lambda x: np.sum(x), HUGE),
    ("sum", lambda x: np.add.reduce(x), HUGE),
    ("prod", lambda x: x.prod(), HUGE),
    ("cumsum", lambda x: np.cumsum(x), HUGE),
    ("mean", lambda x: x.mean(), HUGE),
    ("mean", lambda x: np.mean(x[:0]), ZEROS),
    ("std", lambda x: np.std(x), HUGE),
    ("var", lambda x: x[:1].var(ddof=1), ONES),
    ("multiply", lambda x: x * x, HUGE),
    ("add", lambda x: x + x, HUGE),
    ("subtract", lambda x: x - (-x), HUGE),
    ("multiply", lambda x: np.outer(x, x), HUGE),
    ("matmul", lambda x: x @ x, HUGE),
    ("matmul", lambda x: np.dot(x, x), HUGE),
    ("matmul", lambda x: np.inner(x, x), HUGE),
    ("einsum", lambda x: np.einsum("i,i->", x, x), HUGE),
    ("fft", lambda x: np.fft.fft(x), HUGE),
    ("vector_norm", lambda x: np.linalg.norm(x), HUGE),
    ("det", lambda x: np.linalg.det(np.diag(x)), HUGE),
    ("remainder", lambda x: np.mod(x + 1, x), ZEROS),
    ("astype", lambda x: x.astype("f4"), HUGE),
    ("log", lambda x: np.log(x, out=np.empty(3)), ZEROS - 1),
    ("multiply", lambda x: x.__imul__(x), HUGE.copy()),
]


@pytest.mark.parametrize("read", ["immediate", "step"])
@pytest.mark.parametrize(
    ("name", "program", "x"), NAMED, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(NAMED)]
)
def test_operation_is_named(name: str, program: Any, x: Array, read: Any) -> None:
    x = x.copy()
    event = caught(program, x, read=read)
    assert event.operation is not None
    assert event.operation.name == name
    assert event.operation.source is not None
    assert event.operation.source.file == __file__
    assert event.backend == "numpy"
    assert (event.layer, event.phase) == ("", "forward")


def test_functions_of_numpys_own_are_one_operation_with_the_users_line() -> None:
    def program(x: Array) -> Any:
        y = np.linalg.norm(x, axis=-1)
        return np.average(x[:, 0], weights=y * 0)  # here

    with pytest.raises(ZeroDivisionError):
        track(program)(X)
    event = caught(lambda x: np.cov(x[:1, :1]), X)
    assert event.operation is not None
    assert event.operation.name == "cov"


# What counts, and what does not.


def guard_with_where(x: Array) -> Any:
    return np.where(x > 0, np.log(x), 0.0)


def guard_with_mask(x: Array) -> Any:
    y = 1 / x
    y[~np.isfinite(y)] = 0.0
    return y


def guard_with_nan_to_num(x: Array) -> Any:
    return np.nan_to_num(x / x)


def guard_in_view(x: Array) -> Any:
    y = np.log(x)
    inside = y[:]
    inside[np.isinf(inside)] = 0.0
    return y


def guard_with_nanmean(x: Array) -> Any:
    return np.nanmean(x / x)


def guard_with_minimum(x: Array) -> Any:
    return np.minimum(1 / x, 9.0)


def masked_scores(x: Array) -> Any:
    scores = np.where(x > 0, x, -INF)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    "program",
    [
        guard_with_where, guard_with_mask, guard_with_nan_to_num, guard_in_view,
        guard_with_nanmean, guard_with_minimum, masked_scores,
    ],
    ids=lambda p: p.__name__,
)  # fmt: skip
@pytest.mark.parametrize("read", ["immediate", "step"])
@pytest.mark.parametrize("level", ["layer", "operation"])
def test_what_the_code_removes_itself_is_no_failure(program: Any, read: Any, level: Any) -> None:
    tracker = track(program, read=read, level=level)
    assert same(tracker(np.array([0.0, 1.0, 2.0])), program(np.array([0.0, 1.0, 2.0])))
    assert all(event.severity == "suspect" for event in tracker.events)
    assert not tracker.notes
    if level == "layer":
        assert not tracker.events


def test_removed_after_it_left_its_scope_is_too_late() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("share"):
            y = x / x
        return np.nan_to_num(y)

    event = caught(program, ZEROS)
    assert (event.layer, event.phase, event.kind) == ("share", "forward", "nan")


def test_a_scope_is_left_by_what_is_used_outside_of_it() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("block"):
            with anynan.scope("inner"):
                y = x / x
            return np.nan_to_num(y)  # uses it outside of inner

    event = caught(program, ZEROS)
    assert event.layer == "block.inner"
    history = recorded(program, ONES).history.last()
    assert [(r.layer, r.phase) for r in history] == [
        (None, "input"), ("block.inner", "forward"), ("block", "forward"), (None, "forward"),
    ]  # fmt: skip


def test_expected_where_it_is_made() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("sensors"), anynan.expect(nan=True, reason="a missing sensor"):
            y = x / x
        return np.nan_to_num(y)

    tracker = track(program)
    tracker(ZEROS)
    assert [event.expected for event in tracker.events] == ["a missing sensor"]


def test_a_bad_argument_is_named_with_its_rows() -> None:
    batch = {"image": np.array([[1.0, 2.0], [NAN, 1.0], [1.0, INF]]), "n": np.arange(3)}
    event = caught(lambda batch, k: batch["image"] * k, batch, 2.0)
    assert (event.phase, event.tensor, event.kind) == ("input", "batch['image']", "nan")
    assert event.cause is not None
    assert event.cause.evidence == "2 of 3 rows are bad: 1, 2"


def test_the_trail_is_that_of_the_scopes() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("embed"):
            x = x * 3.0
        with anynan.scope("norm"):
            return x / (x - x)

    event = caught(program, ONES)
    assert event.trail == (("embed", 3.0), ("norm", None))
    assert event.layer == "norm"


def test_in_place_operations_know_what_was_there_before() -> None:
    def program(x: Array) -> Any:
        x /= x - x
        return x

    event = caught(program, np.ones(3))
    assert event.cause is not None
    assert (event.cause.tag, event.cause.evidence) == (
        "divide_by_zero", "1.0 / 0.0 at [0], 3 zero divisors in all",
    )  # fmt: skip


def test_a_write_through_a_view_spoils_its_base() -> None:
    def program(x: Array) -> Any:
        y = x + 1
        part = y[1:]
        part[...] = np.log(x[1:] - 2)
        return y

    event = caught(program, ONES)
    assert event.operation is not None
    assert event.operation.name == "log"


def test_what_a_view_wrote_is_followed_through_a_copy_of_its_base() -> None:
    def program(x: Array) -> Any:
        y = x + 1
        y[1:][...] = np.log(x[1:] - 2)
        return y.copy().sum()

    event = caught(program, ONES)
    assert event.operation is not None
    assert event.operation.name == "log"


def test_the_origin_is_followed_through_many_operations() -> None:
    def program(x: Array) -> Any:
        y = np.exp(x * 1000)  # made here
        z = np.concatenate([y, x]).reshape(2, -1).T.copy()
        w = np.einsum("ij,ij->i", z, z)
        return (w - w).sum()

    for read in ("immediate", "step"):
        event = caught(program, ONES, read=read)
        assert event.operation is not None
        assert (event.operation.name, event.kind) == ("exp", "posinf")
        assert event.operation.source is not None
        assert event.operation.source.text.endswith("# made here")
        assert event.then is not None
        assert event.then.name == "subtract"


# Floating point flags.


def test_large_clean_arrays_are_not_read_at_all_between_the_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    really = live.is_finite

    def counted(x: Array) -> bool:
        looks.append(x.size)
        return really(x)

    monkeypatch.setattr(live, "is_finite", counted)

    def program(x: Array) -> Any:
        y = np.exp(x) / (1 + x * x)
        return np.log(y).reshape(2, -1).T.sum(axis=0)

    large = np.linspace(0, 1, floatflags.WORTH * 2)
    recorded(program, large)
    assert looks == [2]
    recorded(lambda x: np.linalg.norm(np.fft.ifft(x)), large)
    assert looks[1:] == [large.size, 1]  # nothing is taken on trust that has no flags of its own


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
@pytest.mark.parametrize("name", sorted(floatflags._ASKED))
def test_a_trusted_ufunc_raises_a_flag_for_all_it_makes(name: str, dtype: str) -> None:
    ufunc = getattr(np, name)
    info: Any = np.finfo(dtype)
    values = [0, 1, -1, 0.5, 3, -7.5, 1e4, -1e4, info.max, -info.max, info.max / 3, info.tiny]
    pairs = [(a, b) for a in values for b in values] if ufunc.nin == 2 else [(a,) for a in values]
    for pair in pairs:
        for size in (1, 7, 64, 1000):
            args = [np.full(size, value, dtype) for value in pair]
            flags = floatflags.Flags()
            result = flags.run(ufunc, args, {})
            assert flags.seen or np.isfinite(result).all() or not floatflags.honest(
                ufunc, "__call__", np.dtype(dtype)
            ), (pair, size)  # fmt: skip


def test_what_flags_cannot_see_is_seen() -> None:
    large = np.ones(floatflags.WORTH * 2)
    outside = large.copy()
    outside[-1] = NAN
    for program in (
        lambda x: x + outside,  # only passed on
        lambda x: np.where(x > 0, outside, x),
        lambda x: np.linalg.inv((x * 0).reshape(128, -1)[:, :128] + np.diag(outside[-128:])),
        lambda x: np.maximum(x, outside),
        lambda x: np.einsum("i,i->i", x * 1e300, x * 1e300),
        lambda x: np.multiply(x * 1e200, x * 1e200, out=np.empty(x.shape)),
    ):
        with np.errstate(all="ignore"):
            assert caught(program, large).kind in ("nan", "posinf")


def test_ufuncs_of_other_packages_are_not_trusted() -> None:
    special = pytest.importorskip("scipy.special")
    assert not floatflags.honest(special.gammaln, "__call__", np.dtype("f8"))
    event = caught(lambda x: special.gammaln(x * 0), np.ones(floatflags.WORTH * 2))
    assert event.operation is not None
    assert (event.operation.name, event.operation.raw) == ("lgamma", "numpy.gammaln")


# What is out of sight is said.


def test_a_plain_array_that_is_taken_out_is_said() -> None:
    def program(x: Array) -> Any:
        y = np.asarray(x / x)
        return y + 1

    tracker = track(program, action="record")
    with pytest.warns(anynan.AnynanWarning, match="taken out of a tracked one at test_recorder"):
        tracker(ZEROS)
    (event,) = tracker.events
    assert event.operation is not None
    assert event.operation.name == "divide"


def test_a_number_that_was_taken_out_is_blamed_for_what_it_spoils() -> None:
    def program(x: Array) -> Any:
        out = np.zeros(3)
        for i in range(3):
            out[i] = x[i] / (x[i] - 1)  # here
        return out

    for read in ("immediate", "step"):
        event = caught(program, ONES, read=read)
        assert event.operation is not None
        assert event.operation.name == "divide"
        assert event.operation.source is not None
        assert event.operation.source.text.endswith("# here")


def test_what_runs_after_the_call_is_refused() -> None:
    def generator(x: Array) -> Any:
        yield x

    async def coroutine(x: Array) -> Any:
        return x

    for target in (generator, coroutine):
        with pytest.raises(TypeError, match="runs after the call; track the function"):
            track(target)


def test_options_of_an_operation_are_not_taken_on_trust() -> None:
    large = np.full(floatflags.WORTH * 2, 1e300)
    for program in (
        lambda x: np.concatenate([x, x], dtype="f4", casting="unsafe"),
        lambda x: x.sum(dtype="f4"),
        lambda x: np.add(x, x, dtype="f4", casting="unsafe"),
    ):
        assert caught(program, large).kind == "posinf"


def test_what_is_no_plain_array_is_said() -> None:
    tracker = track(lambda x, m: (x + 1, m.mean()))
    masked = np.ma.masked_invalid([1.0, NAN])
    with pytest.warns(anynan.AnynanWarning, match="MaskedArray: operations on it are not watched"):
        _, mean = tracker(ONES, masked)
    assert mean == 1.0


def test_text_and_objects_pass() -> None:
    tracker = track(lambda x, names, day: (x, names, day))
    tracker(ONES, np.array(["a", "b"]), np.datetime64("2020-01-01"))
    assert not tracker.notes


# The tracker.


def test_decorator_method_and_metadata() -> None:
    class Model:
        scale = 2.0

        @track(action="record")
        def forward(self, x: Array) -> Any:
            """Do it."""
            return x * self.scale

    assert Model().forward(ONES).tolist() == [2, 2, 2]
    assert Model.forward.__doc__ == "Do it."
    assert Model.forward.fn.__name__ == "forward"


def test_pause_resume_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []

    def program(x: Any) -> Any:
        kinds.append(type(x))
        return x / x

    with track(program, action="record") as tracker:
        tracker.pause()
        tracker(ZEROS)
        tracker.resume()
        tracker(ZEROS)
    tracker(ZEROS)
    assert kinds == [np.ndarray, TrackedArray, np.ndarray]
    assert len(tracker.events) == 1
    monkeypatch.setenv("ANYNAN", "off")
    track(program)(ZEROS)
    assert kinds[-1] is np.ndarray


def test_actions() -> None:
    def program(x: Array) -> Any:
        return x / x

    with pytest.warns(anynan.AnynanWarning, match="0/0 is NaN"):
        assert np.isnan(track(program, action="warn")(ZEROS)).all()
    events: list[anynan.Event] = []
    track(program, action=events.append)(ZEROS)
    assert [event.kind for event in events] == ["nan"]
    with pytest.raises(anynan.NonFiniteError) as error:
        track(program, replay=False)(ZEROS)
    assert error.value.event.operation is None


def test_nested_and_recursive_calls_are_one_step() -> None:
    inner = track(lambda x: x / x, action="record")

    @track(action="record")
    def outer(x: Array, depth: int = 2) -> Any:
        return inner(x) if depth == 0 else outer(x, depth - 1)

    outer(ZEROS)
    assert len(outer.events) == 1
    assert not inner.events
    assert len(outer.history) == 1


def test_threads_have_their_own_steps() -> None:
    tracker = track(lambda x: np.log(x), action="record")
    barrier = threading.Barrier(4)

    def work(value: float) -> None:
        barrier.wait()
        for _ in range(20):
            tracker(np.full(5, value))

    threads = [threading.Thread(target=work, args=(v,)) for v in (1.0, -1.0, 2.0, -3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.count("bad") == 40
    assert len(tracker.history) == 80


def test_numbers_are_kept() -> None:
    tracker = track(lambda x: x * 2)
    for i in range(3):
        tracker(np.full(2, i + 1.0))
    assert [(r.step, r.hi) for r in tracker.dump(phase="forward")] == [(0, 2), (1, 4), (2, 6)]
    assert tracker.metrics(layers=True)["anynan/absmax/forward/model"] == 6.0


def test_limits_hold_where_values_leave() -> None:
    policy = anynan.Policy(large=100.0, bad=("large",))

    def program(x: Array) -> Any:
        with anynan.scope("grow"):
            y = x * 1000
        return y / 1000

    with pytest.raises(anynan.AnomalyError) as error:
        track(program, policy=policy)(ONES)
    assert (error.value.event.layer, error.value.event.kind) == ("grow", "large")


@pytest.mark.parametrize("read", ["immediate", "step"])
def test_nothing_is_kept_alive(read: Any) -> None:
    refs: list[Any] = []

    def program(x: Any) -> Any:
        with anynan.scope("a"):
            y: Any = np.exp(x)
        refs.append(weakref.ref(y._raw))
        refs.append(weakref.ref(x._raw))
        return float((y / y).sum())

    tracker = track(program, read=read, action="record")
    gc.disable()
    try:
        for value in (1.0, 1000.0, 1.0):
            tracker(np.full(10, value))
            assert [ref() for ref in refs] == [None] * len(refs)
            refs.clear()
    finally:
        gc.enable()


def test_a_kept_array_keeps_no_other_alive() -> None:
    kept: list[Any] = []
    x = np.ones(10)
    held = weakref.ref(x)
    track(lambda x: kept.append(x * 2))(x)
    del x
    assert held() is None
    assert kept[0].tolist() == [2.0] * 10


def test_direct_checks_see_through_a_tracked_array() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("layer"):
            y = x / x
            assert anynan.summarize(y).nan == 3
            assert anynan.check(x, "x") is x
            return anynan.check({"y": y}, "values")

    for read in ("immediate", "step"):
        tracker = track(program, read=read)
        with pytest.raises(anynan.NonFiniteError) as error:
            tracker(ZEROS)
        event = error.value.event
        assert (event.backend, event.layer, event.phase) == ("numpy", "layer", "forward")
        assert event.spread.surfaced == "the check of values['y']"
        assert not tracker.notes


def test_patterns_choose_scopes() -> None:
    def program(x: Array) -> Any:
        with anynan.scope("a"), anynan.scope("b"):
            y = x / x
        with anynan.scope("c"):
            return np.nan_to_num(y)

    assert not recorded(program, ZEROS, exclude="a").events
    assert len(recorded(program, ZEROS, layers="a.b").events) == 1
    with pytest.warns(anynan.AnynanWarning, match="matched no scope .* the scopes were: a, a.b, c"):
        recorded(program, ZEROS, layers=["*", "encoder"])


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"colour": 1}, TypeError, "no option 'colour'; the options are policy"),
        ({"action": "skip"}, ValueError, "array code does not say what its update is"),
        ({"patience": 2}, ValueError, "patience=2 drops the update"),
        ({"parameters": True}, ValueError, "which arrays are weights"),
        ({"stats": ["rms"]}, ValueError, "'rms' is not read from array code"),
        ({"read": "later"}, ValueError, "read='later' is unknown"),
    ],
)
def test_wrong_options_are_named(options: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        track(lambda x: x, **options)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (3, "takes a function, not int"),
        (np.ones(3), "takes a function, not numpy.ndarray"),
        (State, "takes a function, not the class State"),
    ],
)
def test_wrong_targets_are_named(target: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        track(target)
    with pytest.raises(TypeError, match="a tracker already"):
        track(track(len))


def test_a_model_is_sent_to_its_adapter() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"anynan.torch.track\(model\)"):
        track(torch.nn.Linear(2, 2))


def test_namespace() -> None:
    xp = anynan.namespace(np)
    assert anynan.namespace(np) is xp
    assert anynan.namespace(xp) is xp
    assert type(xp.zeros(3)) is np.ndarray
    assert xp.pi == np.pi
    assert xp.float32 is np.float32
    assert xp.linalg.norm(np.ones(4)) == 2.0
    assert "exp" in dir(xp)
    event = caught(lambda x: xp.log(xp.zeros(3) - 1) + x, ONES)
    assert event.operation is not None
    assert (event.operation.name, event.operation.raw) == ("log", "numpy.log")
    for wrong in (np.ones(3), 3, "numpy"):
        with pytest.raises(TypeError, match="takes an array library's module, not a"):
            anynan.namespace(wrong)


def test_array_namespace_gives_the_recording_one() -> None:
    compat = pytest.importorskip("array_api_compat")

    def program(x: Any) -> Any:
        xp = compat.array_namespace(x)
        return xp.sqrt(x) / xp.linalg.vector_norm(x)

    event = caught(program, ZEROS)
    assert event.operation is not None
    assert event.operation.name == "divide"
    assert inspect.getsource(program)


@pytest.mark.parametrize("read", ["auto", "step"])
def test_level_operation_runs_nothing_a_second_time(read: Any) -> None:
    calls: list[bool] = []

    def step(x: Any) -> Any:
        calls.append(anynan.replaying())
        return np.log(x - len(calls) - 1)

    tracker = track(step, level="operation", read=read, action="record")
    tracker(np.ones(3))
    (event,) = tracker.events
    assert event.operation is not None
    assert (event.operation.name, event.operation.inputs[0].min) == ("log", -1.0)
    assert calls == [False]


def test_where_scopes_are_chosen_they_are_read() -> None:
    def program(x: Any) -> Any:
        with anynan.scope("a"):
            return np.log(x)

    tracker = track(program, exclude="a", action="record")
    tracker(np.ones(2))
    assert tracker.events == ()
    assert tracker.judge.level == "layer"
    with pytest.raises(ValueError, match="layers= chooses scopes, and level='step' reads none"):
        track(program, layers="a", level="step")
