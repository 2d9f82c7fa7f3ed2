"""A log loss written by hand, in Keras's fit: a sigmoid that is sure enough rounds to 1.

The model tells code from prose in Python's own help by the characters of a paragraph. With
--fixed it hands its logits to the loss that takes logits.
"""

import os
import sys
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers, ops

import anynan

FIXED = "--fixed" in sys.argv
keras.utils.set_random_seed(0)

texts = [text for chapter in topics.values() for text in chapter.split("\n\n") if text.strip()]
letters = sorted(set("".join(texts)) - {" ", "\n"})
x = np.array([[text.count(letter) for letter in letters] for text in texts], "float32")
code = np.array([[text.startswith("    ") or ">>>" in text] for text in texts], "float32")


def log_loss(y: Any, p: Any) -> Any:
    right = y * ops.log(p) + (1 - y) * ops.log(1 - p)
    return -ops.mean(right)


model = keras.Sequential(
    [
        keras.Input((len(letters),)),
        layers.Dense(32, activation="relu", name="hidden"),
        layers.Dense(1, activation=None if FIXED else "sigmoid", name="code"),
    ]
)
loss = keras.losses.BinaryCrossentropy(from_logits=True) if FIXED else log_loss
model.compile(keras.optimizers.Adam(3e-3), loss, jit_compile=False)

monitor = anynan.keras.Monitor(action="raise")
history = model.fit(x, code, batch_size=32, epochs=4, shuffle=False, verbose=0, callbacks=[monitor])
losses = history.history["loss"]
steps = len(losses) * -(-len(x) // 32)
print(f"{steps} steps, every number finite; loss {losses[0]:.2f} -> {losses[-1]:.2f}")
