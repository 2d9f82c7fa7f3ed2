"""Train a small Keras model on the text of Python's own help, until a real bug strikes.

``anynan demo --framework keras`` runs this file, on the backend that Keras is set to. It reads
as an ordinary training script: the text, the layers, the model, ``fit``. Two lines can be the
buggy one; ``broken`` says which. Both run well for some dozens of steps.
"""

import math
import warnings
from typing import Any

import keras
from keras import layers, ops
from rich.console import Console

import anynan
from anynan._cli.outcome import found, missed, trained
from anynan._cli.text import PAD, Text
from anynan.keras.tracking import track
from anynan.tracker import Tracker

BUGS = {
    "length": "the length of an empty paragraph's hidden state, which has no slope at 0",
    "mask": "an empty paragraph: attention with every key masked",
}

CONTEXT = 32
BATCH = 16
EPOCH = 40  # batches
WIDTH = 32
HEADS = 4


# The text.


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras ships no types
    """Cut the text into batches of inputs and targets."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.text = text

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        tokens = self.text.rows(index * BATCH, BATCH, CONTEXT + 1)
        return tokens[:, :-1], tokens[:, 1:]


# The layers.


class Attention(layers.Layer):  # type: ignore[misc]
    """Let every position look at itself and at those before it."""

    def __init__(self, broken: str, **options: Any) -> None:
        super().__init__(**options)
        self.broken = broken
        self.qkv = [layers.EinsumDense("bld,dhe->blhe", (CONTEXT, HEADS, WIDTH // HEADS), name=n)
                    for n in "qkv"]  # fmt: skip
        self.out = layers.EinsumDense("blhe,hed->bld", (CONTEXT, WIDTH), name="out")

    def build(self, shape: Any) -> None:
        """Make the weights."""
        for dense in self.qkv:
            dense.build(shape)
        self.out.build((None, CONTEXT, HEADS, WIDTH // HEADS))

    def call(self, x: Any, real: Any) -> Any:
        """Mix the positions of each row; ``real`` is False where there is only padding."""
        q, k, v = (dense(x) for dense in self.qkv)
        seen = ops.logical_and(ops.tri(CONTEXT, dtype="bool"), real[:, None, :])
        if self.broken != "mask":  # every position sees itself
            seen = ops.logical_or(seen, ops.eye(CONTEXT, dtype="bool"))
        scores = ops.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        scores = ops.where(seen[:, None], scores, -math.inf)
        weights = ops.softmax(scores, axis=-1)
        return self.out(ops.einsum("bhqk,bkhd->bqhd", weights, v))


class Regulariser(layers.Layer):  # type: ignore[misc]
    """Keep the hidden states short, and leave nothing of the padding."""

    def __init__(self, broken: str, **options: Any) -> None:
        super().__init__(**options)
        self.broken = broken

    def call(self, x: Any, real: Any) -> Any:
        """Add the mean length to the loss."""
        hidden = x * ops.cast(real[..., None], x.dtype)
        square = ops.sum(hidden * hidden, axis=-1)
        if self.broken != "length":
            square += 1e-6
        size = ops.sqrt(square)
        self.add_loss(1e-4 * ops.mean(size))
        return hidden


class Real(layers.Layer):  # type: ignore[misc]
    """Tell letters from padding."""

    def call(self, tokens: Any) -> Any:
        """Compare."""
        return ops.not_equal(tokens, PAD)


def gpt(letters: int, broken: str) -> Any:
    """Build a character-level language model."""
    tokens = keras.Input((CONTEXT,), dtype="int32")
    real = Real(name="real")(tokens)
    x = layers.Embedding(letters, WIDTH, name="token")(tokens)
    for i in range(2):
        y = layers.LayerNormalization(name=f"norm_{i}")(x)
        x = layers.Add(name=f"sum_{i}")([x, Attention(broken, name=f"attention_{i}")(y, real)])
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(x)
        x = layers.Add(name=f"out_{i}")([x, layers.Dense(WIDTH, name=f"down_{i}")(y)])
    hidden = Regulariser(broken, name="regulariser")(
        layers.LayerNormalization(name="norm")(x), real
    )
    return keras.Model(tokens, layers.Dense(letters, name="head")(hidden), name="gpt")


# The training.


def loss_of(y: Any, logits: Any) -> Any:
    """Return the mean over the letters, padding left out."""
    real = ops.cast(ops.not_equal(y, PAD), logits.dtype)
    losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return ops.sum(losses * real) / ops.maximum(ops.sum(real), 1.0)


def setup(broken: str, seed: int) -> tuple[Any, Tracker, Batches]:
    """Build the text and the model, and track it."""
    keras.utils.set_random_seed(seed)
    text = Text(seed, EPOCH * BATCH)
    model = gpt(len(text.numbers) + 1, broken)
    jit = keras.backend.backend() == "jax"  # elsewhere compiling takes longer than training
    model.compile(keras.optimizers.AdamW(3e-3), loss_of, jit_compile=jit)
    return model, track(model), Batches(text)


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Print the loss, and stop after a number of steps."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__()
        self.console, self.steps = console, steps
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep the loss; Keras gives its mean since the epoch began."""
        mean = float(logs["loss"])
        before = sum(self.losses[-batch:]) if batch else 0.0
        self.losses.append(mean * (batch + 1) - before)
        if (len(self.losses) - 1) % 20 == 0:
            self.console.print(f"step {len(self.losses) - 1}  loss {self.losses[-1]:.3g}")
        self.model.stop_training = len(self.losses) >= self.steps


def main(
    bug: str = "length", *, fixed: bool = False, steps: int | None = None, seed: int = 0
) -> int:
    """Train until the bug strikes; with ``fixed``, train on without it.

    Returns:
        0 if the bug was found, or stayed away from the fixed training; else 1.
    """
    broken = "" if fixed else bug
    steps = steps or (2 * EPOCH + 1 if fixed else 3 * EPOCH)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{bug}: {BUGS[bug]}{' (fixed)' if fixed else ''}")
    model, tracker, batches = setup(broken, seed)
    progress = Progress(console, steps)
    with warnings.catch_warnings(), tracker:
        warnings.simplefilter("always", anynan.AnynanWarning)
        try:
            model.fit(
                batches, epochs=-(-steps // EPOCH), shuffle=False, verbose=0, callbacks=[progress]
            )
        except anynan.NonFiniteError as error:
            return found(console, error, expected=not fixed)
    if not fixed:
        return missed(console, steps)
    return trained(console, tracker, progress.losses, epoch=EPOCH)
