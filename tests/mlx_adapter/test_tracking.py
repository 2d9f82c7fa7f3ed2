"""What is MLX's own: lazy values, compiled steps, gradients, functions that were imported."""

import functools
import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers

import anynan
from anynan.mlx import session
from anynan.mlx.reading import ends
from tests.failing import failure


class Root(nn.Module):
    def __call__(self, x):
        return mx.sqrt(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.root = nn.Linear(2, 2), Root()
        self.first.weight, self.first.bias = mx.ones((2, 2)), mx.zeros(2)

    def __call__(self, x):
        return self.root(self.first(x))


GOOD, ZERO = mx.array([[1.0, 2.0]]), mx.zeros((1, 2))


def test_a_clean_step_is_read_once(monkeypatch):
    net, optimizer = Net(), optimizers.SGD(0.1)
    gradients = nn.value_and_grad(net, lambda x: net(x).sum())

    @anynan.mlx.track
    def evaluation(x):
        return net(x).sum()

    @anynan.mlx.track
    def training(x):
        loss, slopes = gradients(x)
        optimizer.update(net, slopes)
        return loss

    seen = []  # the evaluations that the adapter asks for by itself
    real = session.EVALUATE
    monkeypatch.setattr(session, "EVALUATE", lambda *x: (seen.append(1), real(*x))[1])
    with evaluation, training:
        evaluation(GOOD)
        assert len(seen) == 1
        seen.clear()
        training(GOOD)
        # Before the update, and the loss that is known only after it.
        assert len(seen) == 2


def test_a_read_adds_two_reductions_for_each_value_and_no_array():
    x = mx.random.normal((512, 512))
    mx.eval(x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ends(x))
    assert mx.get_peak_memory() - before < x.nbytes / 8


@pytest.mark.parametrize(
    ("spoils", "found"),
    [
        ("slope", ("backward", "sqrt", "return mx.sqrt(x)")),
        ("hidden", ("loss", "log", "return mx.where(x > 9, mx.log(x), 0.0).sum()")),
        ("rate", ("optimizer", "subtract", "optimizer.update(net, slopes)")),
    ],
)
def test_what_spoils_weights_in_compiled_code_is_named(spoils, found):
    net, optimizer = Net(), optimizers.SGD(0.0)

    def hidden(x):
        return mx.where(x > 9, mx.log(x), 0.0).sum()

    of, loss = (net.first, hidden) if spoils == "hidden" else (net, mx.sum)
    gradients = nn.value_and_grad(net, lambda x: loss(of(x)))

    @anynan.mlx.track
    @functools.partial(mx.compile, inputs=[net.state, optimizer.state], outputs=net.state)
    def step(x):
        loss, slopes = gradients(x)
        optimizer.update(net, slopes)
        return loss

    step(GOOD)
    if spoils == "rate":
        optimizer.learning_rate = mx.inf
    event = failure(step, GOOD if spoils == "rate" else ZERO)
    assert (event.phase, event.operation.name, event.operation.source.text) == found


def test_a_model_that_only_runs_compiled_is_told_so():
    net = Net()
    run = mx.compile(lambda x: net(x))
    said = pytest.warns(anynan.AnynanWarning, match="track the step function")
    with said, anynan.mlx.track(net) as tracker:
        run(GOOD)
        tracker.flush()


def test_a_bad_weight_is_named_as_tracking_begins():
    net = Net()
    net.first.bias = mx.array([np.nan, 0.0])
    event = failure(anynan.mlx.track, net)
    assert (event.phase, event.parameter) == ("parameter", "first.bias")


def test_a_batch_norms_running_statistics_are_buffers_and_what_they_were():
    net = nn.Sequential(nn.BatchNorm(2), Root())
    plain = nn.BatchNorm(2)
    x = mx.array([[1.0, 2.0], [3.0, 5.0]])
    plain(x)
    with anynan.mlx.track(lambda x: net(x).sum(), action="record") as step:
        step(x)
        assert step.events
    for name in ("running_mean", "running_var"):
        assert net.layers[0][name].tolist() == plain[name].tolist()


def test_the_common_track_leads_a_model_here():
    with pytest.raises(TypeError, match="anynan.mlx.track"):
        anynan.track(Net())


class Reading(nn.Module):
    def __call__(self, x):
        mx.eval(x)
        return mx.sqrt(x) if x.sum().item() < 10 else x


def test_a_model_that_reads_values_itself_is_run_again_once():
    net = nn.Sequential(Reading())
    with anynan.mlx.track(net):
        event = failure(lambda x: mx.eval(net(x)), mx.array([-1.0]))
    assert (event.layer, event.operation and event.operation.name) == ("layers.0", "sqrt")


@pytest.mark.parametrize("read", [lambda x: x.item(), repr])
def test_a_model_is_judged_where_the_program_reads_what_it_gave(read):
    net = Root()  # the model's own code, and no layer's
    before = mx.array.item
    tracker = anynan.mlx.track(net)
    event = failure(lambda x: read(net(x).sum()), mx.array([-1.0]))
    assert (event.layer, event.cause.tag) == ("", "sqrt_of_negative")
    tracker.remove()
    assert mx.array.item is before


def test_what_a_compiled_step_gives_is_what_it_gives_untracked():
    def program():
        net, optimizer = Net(), optimizers.Adam(0.1)
        gradients = nn.value_and_grad(net, lambda x: net(x).sum())
        state = [net.state, optimizer.state]

        @functools.partial(mx.compile, inputs=state, outputs=state)
        def step(x):
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


def test_a_tracker_keeps_no_model_alive():
    net = Net()
    tracker = anynan.mlx.track(net)
    mx.eval(net(GOOD))
    ref = weakref.ref(net)
    del net
    gc.collect()
    assert ref() is None
    tracker.remove()
