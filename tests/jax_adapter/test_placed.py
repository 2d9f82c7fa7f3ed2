"""NaN that a program writes into its state, and that nothing reads, is no fault of its."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax_adapter.watching import watching
from tests.tiers import first


def init(w):
    empty = jnp.full(w.shape, jnp.nan)
    history = jnp.full((6,), jnp.nan)
    return {"w": w, "best": empty, "norm": 0.0, "score": jnp.inf, "seen": history, "n": 0}


def ask(state):
    return state["w"] + jnp.sin(jnp.arange(12.0).reshape(4, 3) + state["n"])


def tell(state, tries, scores):
    i = jnp.argmin(scores)
    better = scores[i] < state["score"]
    best = jnp.where(better, tries[i], state["best"])
    return {
        "w": tries.T @ jax.nn.softmax(-scores),
        "best": best,
        "norm": (best**2).sum(),
        "score": jnp.where(better, scores[i], state["score"]),
        "seen": state["seen"].at[state["n"]].set(scores.mean()),
        "n": state["n"] + 1,
    }


def line_by_line(state, step):
    for n in range(5):
        state, _ = step(state, n)


def in_a_loop(state, step):
    jax.lax.scan(step, state, jnp.arange(5))


def in_a_step(state, step):
    line_by_line(state, jax.jit(step))


@pytest.mark.parametrize("fault", [None, 3, 0])
@pytest.mark.parametrize("run", [line_by_line, in_a_loop, in_a_step])
@pytest.mark.parametrize("way", first(1, ["library", "compiled", "eager"]))
def test_a_state_that_begins_as_nan_is_no_fault_and_hides_none(way, run, fault, library):
    def rate(tries, n):
        scores = jnp.abs(tries - 1).sum(-1)
        return scores if fault is None else scores + jnp.where(n >= fault, jnp.sqrt(-scores), 0)

    with watching() as found:
        made = {"library": library["compiled"], "compiled": jax.jit, "eager": lambda fn: fn}[way]
        asked, told = made(ask), made(tell)

        def step(state, n):
            tries = asked(state)
            return told(state, tries, rate(tries, n)), tries.min()

        run(made(init)(jnp.zeros(3)), step)
    assert not (found.harms or [note for note in found.notes if "unwatched" in note])
    names = {event.operation.name for event in found.bad()}
    assert names == (set() if fault is None else {"sqrt"}), (found.bad(), found.notes)


@pytest.mark.parametrize("read", ["compiled", "eager"])
def test_a_state_that_begins_as_nan_is_told_once_something_is_computed_of_it(read):
    def distance(state, x):
        return ((x - state["best"]) ** 2).sum()

    with watching() as found:
        state = jax.jit(init)(jnp.zeros(3))
        float((jax.jit(distance) if read == "compiled" else distance)(state, jnp.ones(3)))
    (event,) = found.bad()
    assert (event.operation.name, event.cause.tag) == ("full", "written_constant")
    assert event.operation.source.text == "empty = jnp.full(w.shape, jnp.nan)"


FROM_NUMPY = {"raw": np.asarray, "brought": lambda x: jnp.asarray(np.asarray(x))}


@pytest.mark.parametrize("fault", [None, "made", "used"])
@pytest.mark.parametrize("way", FROM_NUMPY)
def test_a_state_of_nan_from_numpy_is_no_fault_until_something_is_computed_of_it(way, fault):
    def step(state, n):
        w = 0.9 * state["w"]
        if fault == "made":
            w += jnp.where(n == 3, jnp.log(-w), 0)
        return {
            "w": w * state["seen"][n] if fault == "used" else w,
            "seen": state["seen"].at[n].set(n),
        }

    state = {"w": np.ones(3, np.float32), "seen": np.full(200, np.nan, np.float32)}
    with watching() as found:
        step = jax.jit(step)
        for n in range(6 if fault else 150):  # more often than an array is looked for
            state = step(jax.tree.map(FROM_NUMPY[way], state), n)
    assert not found.harms
    told = [event.operation.name if event.operation else event.tensor for event in found.bad()]
    assert told[:1] == {"made": ["log"], "used": ["seen"]}.get(fault, [])
