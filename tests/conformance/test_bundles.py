"""The same failing program gives a bundle whose script fails the same way, in every framework."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from tests.bundles import again, run_alone

pytest.importorskip("safetensors")  # what the scripts read their tensors with

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
HALF = X.astype(np.float16)

# What tracks, what makes an array of one of NumPy's, and programs by what fails in them.
Programs = tuple[Any, Any, dict[str, Any]]


def product(x: Any) -> Any:
    return (x * 60000) @ x.T


def fails(run: Any, *args: Any) -> None:
    with pytest.raises(anynan.NonFiniteError, match="saved in"), np.errstate(all="ignore"):
        run(*args)


def with_torch() -> Programs:
    torch = pytest.importorskip("torch")

    def slope(x: Any) -> Any:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(torch.sqrt(x * 0).sum(), x)[0]

    programs = {"log": lambda x: torch.log(x), "gradient": slope, "overflow": product}
    return anynan.torch.track, torch.from_numpy, programs


def with_jax() -> Programs:
    jax = pytest.importorskip("jax")
    programs = {
        "log": jax.jit(jax.numpy.log),
        "gradient": jax.jit(jax.grad(lambda x: jax.numpy.sqrt(x * 0).sum())),
        "overflow": product,
    }
    return anynan.jax.track, jax.numpy.asarray, programs


def with_tensorflow() -> Programs:
    tf = pytest.importorskip("tensorflow")

    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sqrt(x * 0.0))
        return tape.gradient(y, x)

    programs = {
        "log": tf.function(tf.math.log),
        "gradient": tf.function(slope),
        "overflow": tf.function(lambda x: tf.matmul(x * 60000, x, transpose_b=True)),
    }
    return anynan.tensorflow.track, tf.constant, programs


def with_numpy() -> Programs:
    programs = {"log": np.log, "overflow": lambda x: (x * np.float16(60000)) @ x.T}
    return anynan.track, np.asarray, programs


def with_mlx() -> Programs:
    mx = pytest.importorskip("mlx.core")
    programs = {
        "log": lambda x: mx.log(x),
        "gradient": mx.grad(lambda x: mx.sqrt(x * 0).sum()),
        "overflow": product,
    }
    return anynan.mlx.track, mx.array, programs


@pytest.mark.filterwarnings("ignore:anynan. no module was found")
@pytest.mark.parametrize("made", [with_torch, with_jax, with_tensorflow, with_numpy, with_mlx])
@pytest.mark.parametrize("what", ["log", "gradient", "overflow"])
@pytest.mark.tier(2)
def test_the_script_fails_as_the_program_did(
    tmp_path: Path, made: Callable[[], Programs], what: str
) -> None:
    track, array, programs = made()
    if what not in programs:
        pytest.skip("NumPy has none")
    fails(track(programs[what], save=tmp_path / "b"), array(HALF if what == "overflow" else X))
    script, outcome = again(tmp_path / "b")
    assert outcome.same, f"{outcome}\n{script}"
    if what == "log":
        assert outcome.printed == run_alone(tmp_path / "b")
        assert outcome.text == "the same operation gives the same NaN here: 3 NaN, first at [0, 0]"


# Runs that draw random numbers: the operation is shown on what it was given, and the states that
# the call found are there.


def held(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    script, outcome = again(folder)
    assert outcome.same, f"{outcome}\n{script}"
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
    fails(tracked, torch.ones(4, 8))
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


@pytest.mark.parametrize("typed", [False, True])
def test_keys_of_jax(tmp_path: Path, typed: bool) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def step(key: Any, x: Any) -> Any:
        kept = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0.0)
        return jnp.log(kept - 1.0).sum()

    key = jax.random.key(7) if typed else jax.random.PRNGKey(7)
    fails(anynan.jax.track(jax.jit(step), save=tmp_path / "b"), key, jnp.ones((4, 8)))
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
    fails(model.fit, np.ones((4, 8), np.float32), np.ones((4, 1), np.float32))
    seeds = [x for name, x in held(tmp_path / "b").items() if "seed" in name]
    assert [x.tolist() for x in seeds] == [[5, 0]]
