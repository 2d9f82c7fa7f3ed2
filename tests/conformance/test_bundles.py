"""The same failing program gives a bundle whose script fails the same way, in every framework."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from tests.bundles import again, run_alone
from tests.flat import split

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

        return anynan.torch.track(step, **split(options)), x
    if what == "overflow":
        return anynan.torch.track(lambda x: (x * 60000) @ x.T, **split(options)), x.half()
    fn = {
        "log": torch.log,
        "softmax": lambda x: torch.softmax(x.masked_fill(x < 5, -torch.inf), -1),
    }[what]
    return anynan.torch.track(lambda x: fn(x), **split(options)), x


def with_jax(what: str, **options: Any) -> Made:
    jax = pytest.importorskip("jax")
    jnp, x = jax.numpy, jax.numpy.asarray(X)
    if what == "overflow":
        return anynan.jax.track(lambda x: (x * 60000) @ x.T, **split(options)), x.astype("float16")
    fn = {
        "log": jnp.log,
        "softmax": lambda x: jax.nn.softmax(jnp.where(x < 5, -jnp.inf, x), -1),
        "gradient": jax.grad(lambda x: jnp.sqrt(x * 0).sum()),
    }[what]
    return anynan.jax.track(jax.jit(fn), **split(options)), x


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
    return anynan.tensorflow.track(tf.function(fn), **split(options)), x


def with_numpy(what: str, **options: Any) -> Made:
    if what in ("gradient", "softmax"):
        pytest.skip("NumPy has none")
    fn: Any = {"log": np.log, "overflow": lambda x: (x * np.float16(60000)) @ x.T}[what]
    x = X.astype(np.float16) if what == "overflow" else X
    return anynan.track(lambda x: fn(x), **split(options)), x


def with_mlx(what: str, **options: Any) -> Made:
    mx = pytest.importorskip("mlx.core")
    x = mx.array(X)
    if what == "overflow":
        x = x.astype(mx.float16)
        return anynan.mlx.track(lambda x: (x * 60000) @ x.T, **split(options)), x
    fn = {
        "log": lambda x: mx.log(x),
        "softmax": lambda x: mx.softmax(mx.where(x < 5, -mx.inf, x), axis=-1),
        "gradient": mx.grad(lambda x: mx.sqrt(x * 0).sum()),
    }[what]
    return anynan.mlx.track(fn, **split(options)), x


BACKENDS = {
    "torch": with_torch,
    "jax": with_jax,
    "tensorflow": with_tensorflow,
    "numpy": with_numpy,
    "mlx": with_mlx,
}


@pytest.mark.filterwarnings("ignore:anynan. no module was found")
@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("what", ["log", "softmax", "gradient", "overflow"])
@pytest.mark.tier(2)
def test_the_script_fails_as_the_program_did(tmp_path: Path, library: str, what: str) -> None:
    tracked, x = BACKENDS[library](what, save=tmp_path / "b")
    with pytest.raises(anynan.NonFiniteError, match="saved in"), np.errstate(all="ignore"):
        tracked(x)
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
    if what == "log":
        assert outcome.printed == run_alone(tmp_path / "b")
        assert outcome.text == "the same operation gives the same NaN here: 3 NaN, first at [0, 0]"


def test_a_mean_in_tensorflow(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    step = tf.function(lambda x: tf.reduce_mean(x[:, 3:]))
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        anynan.tensorflow.track(step, save=tmp_path / "b")(tf.constant(X))
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"


@pytest.mark.tier(2)
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


# Runs that draw random numbers: the operation is shown on what it was given, and the states that
# the call found are there.


def held(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(folder / "tensors.safetensors"))


def test_random_states_of_pytorch_numpy_and_python(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dropout = torch.nn.Dropout(0.5)
    drawn: list[Any] = []

    def step(x: Any) -> Any:
        drawn.append((np.random.rand(), random.random(), dropout(x)))  # noqa: NPY002
        return torch.log(drawn[-1][2] - drawn[-1][0] - drawn[-1][1])

    tracked = anynan.torch.track(step, save=tmp_path / "b")
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        tracked(torch.ones(4, 8))
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
    found = held(tmp_path / "b")
    torch.set_rng_state(torch.from_numpy(found["random.torch_cpu"]))
    at, has_gauss = found["random.numpy_at"].tolist()
    gauss = float(found["random.numpy_gauss"][0])
    np.random.set_state(("MT19937", found["random.numpy_words"], at, has_gauss, gauss))  # noqa: NPY002
    random.setstate((3, tuple(found["random.python_words"].tolist()), None))
    assert (np.random.rand(), random.random()) == drawn[0][:2]  # noqa: NPY002
    assert torch.equal(dropout(torch.ones(4, 8)), drawn[0][2])
    if torch.cuda.is_initialized():
        assert found["random.torch_cuda_0"].dtype == np.uint8


def test_random_states_of_array_code(tmp_path: Path) -> None:
    drawn: list[Any] = []

    def noisy(x: Any) -> Any:
        drawn.append((np.random.rand(*x.shape), random.random()))  # noqa: NPY002
        return np.log(x - drawn[-1][0] - drawn[-1][1])

    tracked = anynan.track(noisy, save=tmp_path / "b")
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    with pytest.raises(anynan.NonFiniteError, match="saved in"), np.errstate(all="ignore"):
        tracked(X)
    assert again(tmp_path / "b")[1].same
    found = held(tmp_path / "b")
    at, has_gauss = found["random.numpy_at"].tolist()
    np.random.set_state(("MT19937", found["random.numpy_words"], at, has_gauss, 0.0))  # noqa: NPY002
    random.setstate((3, tuple(found["random.python_words"].tolist()), None))
    np.testing.assert_array_equal(np.random.rand(*X.shape), drawn[0][0])  # noqa: NPY002
    assert random.random() == drawn[0][1]


@pytest.mark.parametrize("typed", [False, True])
def test_keys_of_jax(tmp_path: Path, typed: bool) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def step(key: Any, x: Any) -> Any:
        kept = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0.0)
        return jnp.log(kept - 1.0).sum()

    key = jax.random.key(7) if typed else jax.random.PRNGKey(7)
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        anynan.jax.track(jax.jit(step), save=tmp_path / "b")(key, jnp.ones((4, 8)))
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
    (kept,) = (x for name, x in held(tmp_path / "b").items() if name.startswith("call.key"))
    np.testing.assert_array_equal(kept, jax.random.key_data(key) if typed else key)


@pytest.mark.tier(2)
def test_seeds_of_keras_in_fit(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")

    class Log(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x: Any) -> Any:
            return keras.ops.log(x - 1.0)

    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dropout(0.5, seed=5), Log(), keras.layers.Dense(1)]
    )
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    anynan.keras.track(model, save=tmp_path / "b")
    with pytest.raises(anynan.NonFiniteError, match="saved in"):
        model.fit(np.ones((4, 8), np.float32), np.ones((4, 1), np.float32), verbose=0)
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
    seeds = [x for name, x in held(tmp_path / "b").items() if "seed" in name]
    assert [x.tolist() for x in seeds] == [[5, 0]]
