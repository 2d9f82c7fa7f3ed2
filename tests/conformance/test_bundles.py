"""The same failing program gives a bundle whose script fails the same way, in every framework."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from tests.bundles import again, run_alone

pytest.importorskip("safetensors")  # what the scripts read their tensors with

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)

Made = tuple[Callable[..., Any], Any]


def with_torch(what: str, **options: Any) -> Made:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X)
    if what == "gradient":

        def step(x: Any) -> Any:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(torch.sqrt(x * 0).sum(), x)
            return slope

        return anynan.torch.track(step, **options), x
    if what == "overflow":
        return anynan.torch.track(lambda x: (x * 60000) @ x.T, **options), x.half()
    fn = {
        "log": torch.log,
        "softmax": lambda x: torch.softmax(x.masked_fill(x < 5, -torch.inf), -1),
    }[what]
    return anynan.torch.track(lambda x: fn(x), **options), x


def with_jax(what: str, **options: Any) -> Made:
    jax = pytest.importorskip("jax")
    jnp, x = jax.numpy, jax.numpy.asarray(X)
    if what == "overflow":
        return anynan.jax.track(lambda x: (x * 60000) @ x.T, **options), x.astype("float16")
    fn = {
        "log": jnp.log,
        "softmax": lambda x: jax.nn.softmax(jnp.where(x < 5, -jnp.inf, x), -1),
        "gradient": jax.grad(lambda x: jnp.sqrt(x * 0).sum()),
    }[what]
    return anynan.jax.track(jax.jit(fn), **options), x


def with_tensorflow(what: str, **options: Any) -> Made:
    tf = pytest.importorskip("tensorflow")
    x = tf.constant(X)

    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x * 0.0))
        return tape.gradient(y, x)

    def product(x: Any) -> Any:
        return tf.matmul(x * 60000, x, transpose_b=True)

    fn = {
        "log": tf.math.log,
        "softmax": lambda x: tf.nn.softmax(tf.where(x < 5, -np.inf, x)),
        "gradient": slope,
        "overflow": product,
    }[what]
    if what == "overflow":
        x = tf.cast(x, tf.float16)
    return anynan.tensorflow.track(tf.function(fn), **options), x


def with_numpy(what: str, **options: Any) -> Made:
    if what in ("gradient", "softmax"):
        pytest.skip("NumPy has none")
    fn: Any = {"log": np.log, "overflow": lambda x: (x * np.float16(60000)) @ x.T}[what]
    x = X.astype(np.float16) if what == "overflow" else X
    return anynan.track(lambda x: fn(x), **options), x


BACKENDS = {
    "torch": with_torch,
    "jax": with_jax,
    "tensorflow": with_tensorflow,
    "numpy": with_numpy,
}


@pytest.mark.filterwarnings("ignore:anynan. no module was found")
@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("what", ["log", "softmax", "gradient", "overflow"])
def test_the_script_fails_as_the_program_did(tmp_path: Path, library: str, what: str) -> None:
    tracked, x = BACKENDS[library](what, save=tmp_path / "b")
    with pytest.raises(anynan.NonFiniteError, match="saved in"), np.errstate(all="ignore"):
        tracked(x)
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
    if what == "log":
        assert outcome.printed == run_alone(tmp_path / "b")
        assert outcome.text == "the same operation gives the same NaN here: 3 NaN, first at [0, 0]"


def test_a_keras_model_in_fit(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")

    class Log(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: Any) -> Any:
            return keras.ops.log(x - 100.0)

    model = keras.Sequential([keras.layers.Dense(3), Log(), keras.layers.Dense(1)])
    model.build(X.shape)
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    anynan.keras.track(model, save=tmp_path / "b")
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        model.fit(X, np.ones((2, 1), np.float32), batch_size=2, verbose=0)
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
