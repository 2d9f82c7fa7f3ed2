"""What is MLX's own: lazy values, compiled steps, gradients, functions that were imported."""

import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import anynan
from tests.failing import failure
from tests.flat import split

mx = pytest.importorskip("mlx.core")
from mlx import nn, optimizers  # noqa: E402
from mlx.core import log  # noqa: E402


class Root(nn.Module):
    def __call__(self, x: Any) -> Any:
        return mx.sqrt(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.root = nn.Linear(2, 2), Root()
        self.first.weight, self.first.bias = mx.ones((2, 2)), mx.zeros(2)

    def __call__(self, x: Any) -> Any:
        return self.root(self.first(x))


GOOD, ZERO = mx.array([[1.0, 2.0]]), mx.zeros((1, 2))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the evaluations that the adapter asks for by itself."""
    from anynan.mlx import session

    seen: list[int] = []
    real = session.EVALUATE
    monkeypatch.setattr(session, "EVALUATE", lambda *x: (seen.append(1), real(*x))[1])
    return seen


def test_a_clean_step_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = Net(), optimizers.SGD(0.1)
    gradients = nn.value_and_grad(net, lambda x: net(x).sum())

    @anynan.mlx.track
    def evaluation(x: Any) -> Any:
        return net(x).sum()

    @anynan.mlx.track
    def training(x: Any) -> Any:
        loss, slopes = gradients(x)
        optimizer.update(net, slopes)
        return loss

    seen = counted(monkeypatch)
    with evaluation, training:
        evaluation(GOOD)
        assert len(seen) == 1
        seen.clear()
        training(GOOD)
        # Before the update, and the loss that is known only after it.
        assert len(seen) == 2


def test_a_read_adds_two_reductions_for_each_value_and_no_array() -> None:
    from anynan.mlx.reading import ends

    x = mx.random.normal((512, 512))
    mx.eval(x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ends(x))
    assert mx.get_peak_memory() - before < x.nbytes / 8


def test_the_gradient_of_a_layer_is_named_with_its_operation() -> None:
    net = Net()
    gradients = nn.value_and_grad(net, lambda x: net(x).sum())
    with anynan.mlx.track(lambda x: gradients(x)) as step:
        step(GOOD)
        event = failure(step, ZERO)
    assert (event.phase, event.layer, event.kind) == ("backward", "root", "posinf")
    assert event.operation is not None and event.cause is not None
    assert (event.operation.name, event.cause.tag) == ("sqrt", "sqrt_gradient_at_zero")
    assert "mx.sqrt(x)" in event.operation.source.text
    assert event.tried is not None and event.tried.outcome == "finite"


def test_the_gradient_of_a_tracked_model_is_named_though_its_loss_is_not_known() -> None:
    net, optimizer = Net(), optimizers.SGD(0.0)
    gradients = nn.value_and_grad(net, lambda x: net(x).sum())
    with anynan.mlx.track(net):

        def step(x: Any) -> None:
            _, slopes = gradients(x)
            optimizer.update(net, slopes)
            mx.eval(net.parameters())

        step(GOOD)
        event = failure(step, ZERO)
    assert (event.phase, event.operation and event.operation.name) == ("backward", "sqrt")
    assert event.step == 1


@pytest.mark.parametrize("wrapped", ["compiled", "partial", "mx.value_and_grad"])
def test_a_step_is_named_however_it_is_wrapped(wrapped: str) -> None:
    net = Net()

    def loss(x: Any) -> Any:
        return mx.log(net(x) - 1.0).sum()

    made: Any = {
        "compiled": lambda: mx.compile(loss, inputs=[net.state]),
        "partial": lambda: functools.partial(loss),
        "mx.value_and_grad": lambda: mx.value_and_grad(loss),
    }[wrapped]()
    with anynan.mlx.track(made) as step:
        event = failure(step, GOOD * 0.25)
    assert event.phase == "loss"
    assert event.operation is not None and event.operation.name == "log"
    assert event.operation.source.function == "loss"


@pytest.mark.parametrize(
    ("spoils", "found"),
    [
        ("slope", ("backward", "sqrt", "return mx.sqrt(x)")),
        ("hidden", ("loss", "log", "return mx.where(x > 9, mx.log(x), 0.0).sum()")),
        ("rate", ("optimizer", "subtract", "optimizer.update(net, slopes)")),
    ],
)
def test_what_spoils_weights_in_compiled_code_is_named(spoils: str, found: tuple[str, ...]) -> None:
    net, optimizer = Net(), optimizers.SGD(0.0)

    def hidden(x: Any) -> Any:
        return mx.where(x > 9, mx.log(x), 0.0).sum()

    of, loss = (net.first, hidden) if spoils == "hidden" else (net, mx.sum)
    gradients = nn.value_and_grad(net, lambda x: loss(of(x)))

    @anynan.mlx.track
    @functools.partial(mx.compile, inputs=[net.state, optimizer.state], outputs=net.state)
    def step(x: Any) -> Any:
        loss, slopes = gradients(x)
        optimizer.update(net, slopes)
        return loss

    step(GOOD)
    if spoils == "rate":
        optimizer.learning_rate = mx.inf
    event = failure(step, GOOD if spoils == "rate" else ZERO)
    assert (event.phase, event.operation.name, event.operation.source.text) == found


def test_what_a_compiled_step_gives_is_what_it_gives_untracked() -> None:
    def program() -> tuple[Any, Any]:
        net, optimizer = Net(), optimizers.Adam(0.1)
        gradients = nn.value_and_grad(net, lambda x: net(x).sum())
        state = [net.state, optimizer.state]

        @functools.partial(mx.compile, inputs=state, outputs=state)
        def step(x: Any) -> Any:
            loss, slopes = gradients(x)
            optimizer.update(net, slopes)
            return loss

        return net, step

    net, step = program()
    plain = [step(GOOD).item() for _ in range(3)]
    other, step = program()
    with anynan.mlx.track(step, advanced=anynan.Advanced(ignore="inside-unseen")) as tracked:
        assert [tracked(GOOD).item() for _ in range(3)] == plain
    np.testing.assert_array_equal(np.array(net.first.weight), np.array(other.first.weight))


def test_a_model_that_only_runs_compiled_is_told_so() -> None:
    net = Net()
    run = mx.compile(lambda x: net(x))
    with (
        pytest.warns(anynan.AnynanWarning, match="track the step function"),
        anynan.mlx.track(net) as tracker,
    ):
        run(GOOD)
        tracker.flush()


def test_a_function_that_was_imported_by_its_name_is_seen() -> None:
    event = failure(anynan.mlx.track(lambda x: log(x)), mx.array([-1.0]))
    assert event.operation is not None and event.operation.name == "log"


def test_a_number_beside_the_loss_is_not_told_as_the_loss_nor_a_stride_as_an_input() -> None:
    net = Net()
    net.conv = nn.Conv2d(1, 1, 1)
    gradients = nn.value_and_grad(net, lambda x: net.root(net.conv(x)).sum())
    step = anynan.mlx.track(lambda x: (*gradients(x), mx.mean(x > 9)))
    net.conv.weight, net.conv.bias = mx.zeros((1, 1, 1, 1)), mx.zeros(1)
    event = failure(step, mx.ones((1, 2, 2, 1)))
    assert event.operation.name == "sqrt"
    assert "the step is finite: gradient norm" in str(event)

    event = failure(step, mx.full((1, 2, 2, 1), mx.nan))
    assert event.operation.name == "convolution"
    assert all(x.dtype == "float32" for x in event.operation.inputs)


def test_a_softmax_of_a_masked_row_in_half_and_brain_floats() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        x = mx.full((2, 2), -mx.inf, dtype)
        event = failure(anynan.mlx.track(lambda x: mx.softmax(x, axis=-1)), x)
        assert event.cause.tag == "softmax_fully_masked"


def test_a_write_in_place_is_found_as_it_was_by_the_second_run() -> None:
    x = mx.array([1.0, -1.0])

    def step(x: Any) -> Any:
        y = mx.log(x)
        x[1] = 1.0
        return y

    event = failure(anynan.mlx.track(step), x)
    assert event.operation is not None and event.operation.name == "log"
    assert x.tolist() == [1.0, 1.0]


def test_an_update_at_indices_hands_on_what_it_was_given() -> None:
    def step(x: Any) -> Any:
        return mx.zeros(3).at[mx.array([0, 1])].add(mx.log(x)).sum()

    with anynan.mlx.track(mx.value_and_grad(step)) as tracked:
        event = failure(tracked, mx.array([1.0, 0.0]))
    assert event.operation is not None and event.operation.name == "log"


def test_a_gradient_that_a_step_uses_itself_is_named() -> None:
    slope = mx.grad(lambda w, x: mx.sqrt(w * x).sum())

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * slope(w, x)

    event = failure(anynan.mlx.track(step), mx.array([1.0, 1.0]), mx.array([1.0, 0.0]))
    assert (event.phase, event.operation and event.operation.name) == ("backward", "sqrt")


def test_a_bad_weight_is_named_as_tracking_begins() -> None:
    net = Net()
    net.first.bias = mx.array([np.nan, 0.0])
    event = failure(anynan.mlx.track, net)
    assert (event.phase, event.parameter) == ("parameter", "first.bias")


def test_two_models_of_one_step_have_the_names_that_the_program_gives_them() -> None:
    encoder, decoder = Net(), Net()

    def step(x: Any) -> Any:
        return decoder(encoder(x) * -1.0)

    event = failure(anynan.mlx.track(step), GOOD)
    assert event.layer == "decoder.root"


def test_a_batch_norms_running_statistics_are_buffers_and_what_they_were() -> None:
    net = nn.Sequential(nn.BatchNorm(2), Root())
    with anynan.mlx.track(lambda x: net(x).sum(), action="record") as step:
        step(mx.array([[1.0, 2.0], [3.0, 5.0]]))
        plain = nn.Sequential(nn.BatchNorm(2), Root())
        plain(mx.array([[1.0, 2.0], [3.0, 5.0]]))
        assert step.events
    for name in ("running_mean", "running_var"):
        np.testing.assert_array_equal(
            np.array(net.layers[0][name]), np.array(plain.layers[0][name])
        )


def test_a_tracker_keeps_no_model_alive() -> None:
    net = Net()
    tracker = anynan.mlx.track(net)
    mx.eval(net(GOOD))
    ref = weakref.ref(net)
    del net
    gc.collect()
    assert ref() is None
    tracker.remove()


@pytest.mark.parametrize("options", [{"stats": "mean"}, {"read": "end"}, {"keep": 3}], ids=str)
def test_an_option_that_is_not_there_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        anynan.mlx.track(lambda x: x, **split(options))


def test_the_common_track_leads_a_model_here() -> None:
    with pytest.raises(TypeError, match="anynan.mlx.track"):
        anynan.track(Net())


class Reading(nn.Module):
    def __call__(self, x: Any) -> Any:
        mx.eval(x)
        return mx.sqrt(x) if x.sum().item() < 10 else x


def test_a_model_that_reads_values_itself_is_run_again_once() -> None:
    net = nn.Sequential(Reading())
    with anynan.mlx.track(net):
        event = failure(lambda x: mx.eval(net(x)), mx.array([-1.0]))
    assert (event.layer, event.operation and event.operation.name) == ("layers.0", "sqrt")


READS = {"item": lambda x: x.item(), "tolist": lambda x: x.tolist(), "repr": repr, "float": float}


@pytest.mark.parametrize("read", READS)
def test_a_model_is_judged_where_the_program_reads_what_it_gave(read: str) -> None:
    net = Root()  # the model's own code, and no layer's
    before = mx.array.item
    tracker = anynan.mlx.track(net)
    event = failure(lambda x: READS[read](net(x).sum()), mx.array([-1.0]))
    assert (event.layer, event.operation.name) == ("", "sqrt")
    assert event.cause.tag == "sqrt_of_negative"
    tracker.remove()
    assert mx.array.item is before
