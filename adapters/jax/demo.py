"""Train a small flax model on the text of Python's own help, until a real bug strikes.

``anynan demo --framework jax`` runs this file. It reads as an ordinary training script: the
text, the model, the training step, the loop. Two lines can be the buggy one; ``broken`` says
which. Both run well for some dozens of steps.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

try:
    import optax
    from flax import linen as nn
except ModuleNotFoundError as error:
    msg = "the JAX demo trains a flax model: pip install flax optax"
    raise ImportError(msg) from error

import anynan
from anynan._cli.outcome import show
from anynan._cli.text import PAD, Text
from anynan.jax.tracking import track
from anynan.tracker import Tracker

BUGS = {
    "where": "jnp.where hides the slope of an empty paragraph's length in the forward pass only",
    "mask": "an empty paragraph: attention with every key masked",
}

CONTEXT = 32
BATCH = 16
EPOCH = 40  # batches
WIDTH = 32
HEADS = 4


# The text.


def batch(text: Text, step: int) -> tuple[Any, Any]:
    """Return inputs and targets."""
    tokens = text.rows(step % EPOCH * BATCH, BATCH, CONTEXT + 1)
    return tokens[:, :-1], tokens[:, 1:]


# The model.


class Attention(nn.Module):
    """Let every position look at itself and at those before it."""

    broken: str

    @nn.compact
    def __call__(self, x: Any, real: Any) -> Any:
        """Mix the positions of each row; ``real`` is False where there is only padding."""
        q, k, v = (nn.DenseGeneral((HEADS, WIDTH // HEADS), name=name)(x) for name in "qkv")
        seen = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool)) & real[:, None, :]
        if self.broken != "mask":
            seen = seen | jnp.eye(CONTEXT, dtype=bool)  # every position sees itself
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(mixed)


class Block(nn.Module):
    """Attention, then a small network at every position."""

    broken: str

    @nn.compact
    def __call__(self, x: Any, real: Any) -> Any:
        """Add both to what came in."""
        x = x + Attention(self.broken, name="attention")(nn.LayerNorm(name="norm1")(x), real)
        y = nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm2")(x))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(y))


class GPT(nn.Module):
    """A character-level language model."""

    letters: int
    broken: str

    @nn.compact
    def __call__(self, tokens: Any) -> tuple[Any, Any]:
        """Return the logits of the next character, and the last hidden state."""
        real = tokens != PAD
        x = nn.Embed(self.letters, WIDTH, name="token")(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        for i in range(2):
            x = Block(self.broken, name=f"block_{i}")(x, real)
        hidden = nn.LayerNorm(name="norm")(x) * real[..., None]  # nothing is left of the padding
        return nn.Dense(self.letters, name="head")(hidden), hidden


# The training.


def hidden_size(hidden: Any, real: Any, broken: str) -> Any:
    """Return the mean length of the hidden states, padding left out; a regulariser."""
    square = (hidden * hidden).sum(-1)
    if broken == "where":
        size = jnp.where(real, jnp.sqrt(square), 0.0)
    else:
        size = jnp.where(real, jnp.sqrt(jnp.where(real, square, 1.0)), 0.0)
    return size.mean()


def setup(broken: str, seed: int) -> tuple[Tracker, Any, Any, Text]:
    """Build the text, the model and the optimizer, and track the training step."""
    text = Text(seed, EPOCH * BATCH)
    model = GPT(len(text.numbers) + 1, broken)
    optimizer = optax.adamw(3e-3)
    params = jax.jit(model.init)(jax.random.key(seed), batch(text, 0)[0])
    opt_state = jax.jit(optimizer.init)(params)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        logits, hidden = model.apply(params, x)
        real = y != PAD
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        loss = jnp.where(real, loss, 0.0).sum() / jnp.maximum(real.sum(), 1)
        return loss + 1e-4 * hidden_size(hidden, x != PAD, broken)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return track(train_step), params, opt_state, text


def main(
    bug: str = "where", *, fixed: bool = False, steps: int | None = None, seed: int = 0
) -> int:
    """Train until the bug strikes; with ``fixed``, train on without it.

    Returns:
        0 if the bug was found, or stayed away from the fixed training; else 1.
    """
    steps = steps or (2 * EPOCH + 1 if fixed else 3 * EPOCH)

    def train(console: Console, broken: str, steps: int, losses: list[float]) -> Tracker:
        train_step, params, opt_state, text = setup(broken, seed)
        with warnings.catch_warnings(), train_step:
            warnings.simplefilter("always", anynan.AnynanWarning)
            for step in range(steps):
                params, opt_state, loss = train_step(params, opt_state, *batch(text, step))
                losses.append(float(loss))
                if step % 20 == 0:
                    console.print(f"step {step}  loss {losses[-1]:.3g}")
        return train_step

    return show(BUGS[bug], train, bug, fixed=fixed, steps=steps, epoch=EPOCH)
