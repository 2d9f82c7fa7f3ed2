"""Keras's layers, each with arguments and an input that it takes."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers as L

DRAWN = np.random.default_rng(0)
FLAT, ROWS, LINE, IMAGE, VOLUME = (6,), (5, 6), (8, 4), (8, 8, 3), (4, 4, 4, 2)
TABLE: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {}


def layer(
    name: str, make: Callable[[], Any], shape: tuple[int, ...], dtype: str = "float32"
) -> None:
    TABLE[name] = make, shape, dtype


def each(names: str, shape: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Add layers that take the same arguments."""
    for name in names.split():
        layer(name, lambda name=name: getattr(L, name)(*args, **options), shape)


def batch(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int32":
        return DRAWN.integers(0, 9, (4, *shape)).astype("int32")
    return DRAWN.normal(size=(4, *shape)).astype("float32")


class Pair(L.Layer):
    """Give a layer that merges two tensors."""

    def __init__(self, inner: Any) -> None:
        super().__init__(name="pair")
        self.inner, self.one, self.other = inner, L.Dense(4, name="one"), L.Dense(4, name="other")

    def call(self, x: Any) -> Any:
        return self.inner([self.one(x), self.other(x)])


class Itself(L.Layer):
    """Give a layer that attends: to the values of its own query."""

    def __init__(self, inner: Any, listed: bool) -> None:
        super().__init__(name="itself")
        self.inner, self.listed = inner, listed

    def call(self, x: Any) -> Any:
        return self.inner([x, x]) if self.listed else self.inner(x, x, use_causal_mask=True)


class Merged(L.Layer):
    """Give an image layer that mixes images and labels."""

    def __init__(self, inner: Any) -> None:
        super().__init__(name="merged")
        self.inner = inner

    def call(self, x: Any, training: bool = False) -> Any:
        batch = {"images": x, "labels": keras.ops.ones((x.shape[0] or 4, 2))}
        return self.inner(batch, training=training)["images"]


each("Dense", FLAT, 4)
each("EinsumDense", ROWS, "abc,cd->abd", (5, 4), bias_axes="d")
each("Activation", FLAT, "gelu")
each("Masking Identity Flatten ReLU LeakyReLU PReLU ELU Softmax", ROWS)
each("Lambda", FLAT, lambda x: x * 2)
each("Reshape", ROWS, (6, 5))
each("Permute", ROWS, (2, 1))
each("RepeatVector", FLAT, 3)
layer("Embedding", lambda: L.Embedding(9, 4), (5,), "int32")
layer(
    "Embedding_masked",
    lambda: keras.Sequential([L.Embedding(9, 4, mask_zero=True), L.LSTM(3)]),
    (5,),
    "int32",
)
layer("ReversibleEmbedding", lambda: L.ReversibleEmbedding(9, 4), (5,), "int32")

for n, shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    each(f"Conv{n}D Conv{n}DTranspose", shape, 3, 2)
    each(f"MaxPooling{n}D AveragePooling{n}D UpSampling{n}D", shape, 2)
    each(f"AdaptiveMaxPooling{n}D AdaptiveAveragePooling{n}D", shape, 2)
    each(f"GlobalMaxPooling{n}D GlobalAveragePooling{n}D", shape)
    each(f"Cropping{n}D ZeroPadding{n}D", shape, 1)
    each(f"SpatialDropout{n}D", shape, 0.3, seed=3)
    each(f"ConvLSTM{n}D", (3, *(4,) * n, 2), 2, 2)
for n, shape in ((1, LINE), (2, IMAGE)):
    each(f"SeparableConv{n}D", shape, 3, 3)
    each(f"DepthwiseConv{n}D", shape, 3)

each("BatchNormalization", IMAGE)
each("GroupNormalization", IMAGE, 3)
each("LayerNormalization RMSNormalization UnitNormalization", ROWS)
each("Normalization", FLAT, mean=0.0, variance=1.0)
layer("SpectralNormalization", lambda: L.SpectralNormalization(L.Dense(4)), FLAT)
each("Dropout AlphaDropout GaussianDropout GaussianNoise", FLAT, 0.2, seed=3)
each("ActivityRegularization", FLAT, 0.1)

each("LSTM SimpleRNN", ROWS, 4)
each("GRU", ROWS, 4, return_sequences=True)
layer("Bidirectional", lambda: L.Bidirectional(L.GRU(3)), ROWS)
layer("StackedRNNCells", lambda: L.RNN([L.LSTMCell(4), L.GRUCell(3)]), ROWS)
layer("TimeDistributed", lambda: L.TimeDistributed(L.Dense(3)), ROWS)

for name in ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate"):
    layer(name, lambda name=name: Pair(getattr(L, name)()), FLAT)
layer("Dot", lambda: Pair(L.Dot(axes=1)), FLAT)
layer("Attention", lambda: Itself(L.Attention(use_scale=True), True), ROWS)
layer("AdditiveAttention", lambda: Itself(L.AdditiveAttention(), True), ROWS)
layer("MultiHeadAttention", lambda: Itself(L.MultiHeadAttention(2, 3), False), ROWS)
layer("GroupQueryAttention", lambda: Itself(L.GroupQueryAttention(4, 4, 2), False), ROWS)

each("Rescaling", IMAGE, 0.1)
each("Resizing CenterCrop", IMAGE, 4, 4)
each("RandomCrop", IMAGE, 6, 6, seed=1)
each("RandomTranslation", IMAGE, 0.1, 0.1, seed=1)
each("RandomShear", IMAGE, 0.2, 0.2, seed=1)
each("RandomRotation RandomZoom RandomContrast RandomBrightness", IMAGE, 0.2, seed=1)
each("RandomColorDegeneration RandomHue RandomSaturation RandomSharpness", IMAGE, 0.3, seed=1)
each("RandomFlip RandomErasing RandomGaussianBlur RandomGrayscale RandomInvert", IMAGE, seed=1)
each("RandomElasticTransform RandomPerspective AugMix RandAugment", IMAGE, seed=1)
each("RandomColorJitter", IMAGE, brightness_factor=0.2, seed=1)
each("RandomPosterization", IMAGE, 4, seed=1)
each("AutoContrast Equalization Solarization", IMAGE)
each("ContrastLimitedAdaptiveHistogramEqualization", IMAGE, tile_grid_size=(2, 2))
layer("CutMix", lambda: Merged(L.CutMix(seed=1)), IMAGE)
layer("MixUp", lambda: Merged(L.MixUp(seed=1)), IMAGE)
layer("Pipeline", lambda: L.Pipeline([L.RandomFlip(seed=1), L.Rescaling(0.5)]), IMAGE)
each("MelSpectrogram", (64,), fft_length=32, num_mel_bins=4, sequence_stride=8)
each("STFTSpectrogram", (64, 1), frame_length=16, frame_step=8, fft_length=16)

layer("CategoryEncoding", lambda: L.CategoryEncoding(9, "multi_hot"), (5,), "int32")
layer("Hashing", lambda: L.Hashing(4), (5,), "int32")
each("Discretization", FLAT, [-1.0, 0.0, 1.0])
