"""Where two Keras models part, and what breaks first in half precision, on every backend alike."""

import keras
import numpy as np
import pytest

import anynan

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    """Add what two layers make to their input."""

    def __init__(self, eps=1e-3, share=1.0, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(epsilon=eps, name="norm")
        self.dense = keras.layers.Dense(8, activation="tanh", name="dense")
        self.share = share

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x):
        return x + slowed(self.dense(self.norm(x)), self.share)


def slowed(x, share):
    """Give x, with a share of its gradient."""

    @keras.ops.custom_gradient
    def same(x):
        def grad(*args, upstream=None):
            return (args[0] if upstream is None else upstream) * share

        return x * 1.0, grad

    return x if share == 1.0 else same(x)


def net(inner, **kwargs):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8, name="first")(inputs)
    x = inner(name="inner", **kwargs)(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def ways(found):
    return {(row.layer, row.way) for row in found.rows if row.ratio is not None}


def test_a_layers_wrong_eps_and_wrong_weight_are_named():
    model = net(Block)
    right = anynan.compare(model, net(Block), X)
    assert right.place is None
    assert right.ratio == 0
    for layer in ("first", "inner.dense", "inner.norm", "head"):
        assert {(layer, "forward"), (layer, "backward")} <= ways(right)
    found = anynan.compare(model, net(Block, eps=1e-2), X)
    assert (found.place.layer, found.place.way) == ("inner.norm", "forward")
    port = net(Block)
    kernel = port.get_layer("head").kernel
    kernel.assign(keras.ops.flip(keras.ops.convert_to_tensor(kernel), 0))
    found = anynan.compare(model, port, X)
    assert found.place.layer == "head"
    assert [name for name, _ in found.weights] == ["head.kernel"]


def test_a_wrong_gradient_is_found_where_the_forward_pass_agrees():
    found = anynan.compare(net(Block), net(Block, share=0.5), X)
    assert found.place is not None, str(found)
    assert found.place.way == "backward"
    # JAX tells of what arrives at layers only: at the one before.
    assert found.place.layer == ("inner.dense" if keras.backend.backend() == "jax" else "inner")
    assert anynan.compare(net(Block), net(Block, share=0.5), X, backward=False).place is None


class Routed(keras.layers.Layer):
    """Scale each row by one of two numbers."""

    def __init__(self, tie, **kwargs):
        super().__init__(**kwargs)
        self.tie = tie

    def call(self, x):
        scores = keras.ops.convert_to_tensor(self.tie) + 0 * x[:, :1]
        best = keras.ops.top_k(scores, 1)[1][:, 0]
        return x * keras.ops.take(keras.ops.convert_to_tensor([0.5, 1.5]), best)[:, None]


class Noisy(keras.layers.Layer):
    """Add noise, drawn from a number or from a generator's state."""

    def __init__(self, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(None) if seed is None else seed

    def call(self, x):
        return x + keras.random.normal((8,), seed=self.seed)


DIFFER = {
    "`topk` in `inner` chooses": (Routed, {"tie": [1.0, 1.0 - 6e-7]}, {"tie": [1.0, 1.0 + 6e-7]}),
    "`normal` in `inner` draws": (Noisy, {"seed": 1}, {"seed": 2}),
}


@pytest.mark.parametrize("what", DIFFER)
def test_a_choice_or_a_draw_that_differs_ends_the_comparison_or_is_followed(what):
    inner, one, other = DIFFER[what]
    a, b = net(inner, **one), net(inner, **other)
    found = anynan.compare(a, b, X)
    assert found.place is None, str(found)
    assert f"{what} otherwise" in found.sentence()
    assert [row.layer for row in found.rows] == ["first"]
    held = anynan.compare(a, b, X, follow=True)
    assert (held.place, held.differs) == (None, inner is Routed), str(held)
    assert held.ratio < 8
    assert {("inner", "forward"), ("head", "forward"), ("head", "backward")} <= ways(held)


def test_both_sides_begin_with_the_same_draws_and_nothing_is_changed():
    a, b = net(Noisy), net(Noisy)
    a(X)
    before = [np.array(x.numpy()) for x in (*a.variables, *b.variables)]
    call = keras.layers.Layer.__call__
    found = anynan.compare(a, b, X)
    assert found.ratio == 0, str(found)
    assert not found.turns
    after = [x.numpy() for x in (*a.variables, *b.variables)]
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert keras.layers.Layer.__call__ is call


def test_masks_stay_on_their_tensors():
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 4, mask_zero=True, name="embed")(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D(name="pool")(x))
    tokens = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]], np.int32)
    taken = anynan.comparing.capture(model, tokens).taken
    pooled = next(t.made[0] for t in taken if t.layer == "pool")
    np.testing.assert_allclose(pooled, model.predict(tokens, verbose=0), rtol=1e-5, atol=1e-6)


ONES = np.ones((4, 8), np.float32)


class Gated(keras.layers.Layer):
    """Overflow between two layers: 400 * 400 is beyond float16."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        dense, constant = keras.layers.Dense, keras.initializers.Constant
        wide = {"kernel_initializer": "zeros", "bias_initializer": constant(400.0)}
        self.gate, self.up = dense(8, name="gate", **wide), dense(8, name="up", **wide)
        self.down = dense(8, name="down", kernel_initializer=constant(2.5e-3))

    def call(self, x):
        return self.down(keras.ops.silu(self.gate(x)) * self.up(x))


def gated():
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = [dense(8, name="first"), Gated(name="mlp"), keras.layers.Rescaling(1e-3)]
    model = keras.Sequential([*layers, dense(4, name="last")])
    model(ONES)
    return model


def finite(model):
    return bool(np.isfinite(keras.ops.convert_to_numpy(model(ONES))).all())


def test_a_product_between_two_layers_is_found_and_the_code_of_the_plan_cures_it():
    model = gated()
    report = anynan.precision(model, ONES)
    found = report.first()
    assert (found.name, found.layer, found.kind) == ("multiply", "mlp", "overflow")
    assert "silu(self.gate(x)) * self.up(x)" in found.source.text
    assert report.plan.finite
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    assert policies == {"float32"}
    for layer in model._flatten_layers():
        layer.dtype_policy = "mixed_float16"
    assert not finite(model)
    exec(report.code, {"model": model})
    assert finite(model)
    assert model.layers[0].compute_dtype == "float16"


def test_bfloat16_fits():
    assert anynan.precision(gated(), ONES, dtype="bfloat16").fits
