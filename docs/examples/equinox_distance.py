"""Words placed by the company they keep: two words at the same place have no direction apart.

A word's place is learned so that words that stand together are nearer than random ones. Now and
then the random one is the word itself, at a distance of 0, whose slope is 0/0; the pair is
masked, but only in the forward pass. With --fixed the masked pairs get a safe distance first.
"""

import sys
from collections import Counter
from itertools import pairwise
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import anynan

FIXED = "--fixed" in sys.argv
STEPS = 200
rng = np.random.default_rng(0)

text = " ".join(topics.values()).lower().split()
names = [word for word, _ in Counter(text).most_common(300)]
numbers = {word: i for i, word in enumerate(names)}
pairs = [(numbers[a], numbers[b]) for a, b in pairwise(text) if a in numbers and b in numbers]


class Places(eqx.Module):
    table: eqx.nn.Embedding
    scale: jax.Array

    def __init__(self, words: int, width: int, key: jax.Array) -> None:
        self.table = eqx.nn.Embedding(words, width, key=key)
        self.scale = jnp.ones(())

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        square = jnp.sum((self.table(a) - self.table(b)) ** 2)
        other = a != b
        if FIXED:
            square = jnp.where(other, square, 1.0)
        return jnp.where(other, self.scale * jnp.sqrt(square), 0.0)


model = Places(len(names), 8, jax.random.key(0))
optimizer = optax.adam(1e-2)
opt_state = optimizer.init(eqx.filter(model, eqx.is_array))


@anynan.jax.track
@eqx.filter_jit
def train_step(model: Places, opt_state: Any, a: Any, b: Any, far: Any) -> tuple[Any, Any, Any]:
    def loss_fn(model: Places) -> jax.Array:
        near = jax.vmap(model)(a, b)
        apart = jax.vmap(model)(a, far)
        return jnp.mean(jax.nn.softplus(near - apart))

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = optimizer.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


losses = []
for step in range(STEPS):
    a, b = np.array(pairs[16 * step : 16 * step + 16]).T
    far = rng.integers(len(names), size=16)
    model, opt_state, loss = train_step(model, opt_state, a, b, far)
    losses.append(float(loss))
first, last = median(losses[:20]), median(losses[-20:])
print(f"{STEPS} steps, every number finite; loss {first:.2f} -> {last:.2f}")
