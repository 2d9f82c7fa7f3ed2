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


layer("Dense", lambda: L.Dense(4), FLAT)
layer("EinsumDense", lambda: L.EinsumDense("abc,cd->abd", (5, 4), bias_axes="d"), ROWS)
layer("Activation", lambda: L.Activation("gelu"), FLAT)
layer("Embedding", lambda: L.Embedding(9, 4), (5,), "int32")
layer(
    "Embedding_masked",
    lambda: keras.Sequential([L.Embedding(9, 4, mask_zero=True), L.LSTM(3)]),
    (5,),
    "int32",
)
layer("ReversibleEmbedding", lambda: L.ReversibleEmbedding(9, 4), (5,), "int32")
layer("Masking", L.Masking, ROWS)
layer("Lambda", lambda: L.Lambda(lambda x: x * 2), FLAT)
layer("Identity", L.Identity, FLAT)

for rank, shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    for name in (f"Conv{rank}D", f"Conv{rank}DTranspose"):
        layer(name, lambda name=name: getattr(L, name)(3, 2), shape)
    for name in (f"MaxPooling{rank}D", f"AveragePooling{rank}D"):
        layer(name, lambda name=name: getattr(L, name)(2), shape)
    for name in (f"GlobalMaxPooling{rank}D", f"GlobalAveragePooling{rank}D"):
        layer(name, lambda name=name: getattr(L, name)(), shape)
    for name in (f"AdaptiveMaxPooling{rank}D", f"AdaptiveAveragePooling{rank}D"):
        layer(name, lambda name=name: getattr(L, name)(2), shape)
    for name in (f"Cropping{rank}D", f"ZeroPadding{rank}D"):
        layer(name, lambda name=name: getattr(L, name)(1), shape)
    layer(f"UpSampling{rank}D", lambda rank=rank: getattr(L, f"UpSampling{rank}D")(2), shape)
    layer(
        f"SpatialDropout{rank}D",
        lambda rank=rank: getattr(L, f"SpatialDropout{rank}D")(0.3, seed=3),
        shape,
    )
    layer(
        f"ConvLSTM{rank}D",
        lambda rank=rank: getattr(L, f"ConvLSTM{rank}D")(2, 2),
        (3, *(4,) * rank, 2),
    )
for rank, shape in ((1, LINE), (2, IMAGE)):
    layer(
        f"SeparableConv{rank}D", lambda rank=rank: getattr(L, f"SeparableConv{rank}D")(3, 3), shape
    )
    layer(f"DepthwiseConv{rank}D", lambda rank=rank: getattr(L, f"DepthwiseConv{rank}D")(3), shape)

layer("BatchNormalization", L.BatchNormalization, IMAGE)
layer("LayerNormalization", L.LayerNormalization, ROWS)
layer("GroupNormalization", lambda: L.GroupNormalization(3), IMAGE)
layer("RMSNormalization", L.RMSNormalization, ROWS)
layer("UnitNormalization", L.UnitNormalization, ROWS)
layer("SpectralNormalization", lambda: L.SpectralNormalization(L.Dense(4)), FLAT)
layer("Normalization", lambda: L.Normalization(mean=0.0, variance=1.0), FLAT)

for name in ("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise"):
    layer(name, lambda name=name: getattr(L, name)(0.2, seed=3), FLAT)
layer("ActivityRegularization", lambda: L.ActivityRegularization(0.1), FLAT)
for name in ("ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "Flatten"):
    layer(name, getattr(L, name), ROWS)
layer("Reshape", lambda: L.Reshape((6, 5)), ROWS)
layer("Permute", lambda: L.Permute((2, 1)), ROWS)
layer("RepeatVector", lambda: L.RepeatVector(3), FLAT)

layer("LSTM", lambda: L.LSTM(4), ROWS)
layer("GRU", lambda: L.GRU(4, return_sequences=True), ROWS)
layer("SimpleRNN", lambda: L.SimpleRNN(4), ROWS)
layer("Bidirectional", lambda: L.Bidirectional(L.GRU(3)), ROWS)
layer("RNN", lambda: L.RNN(L.SimpleRNNCell(3)), ROWS)
layer("StackedRNNCells", lambda: L.RNN([L.LSTMCell(4), L.GRUCell(3)]), ROWS)
layer("TimeDistributed", lambda: L.TimeDistributed(L.Dense(3)), ROWS)

for name in ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate"):
    layer(name, lambda name=name: Pair(getattr(L, name)()), FLAT)
layer("Dot", lambda: Pair(L.Dot(axes=1)), FLAT)
layer("Attention", lambda: Itself(L.Attention(use_scale=True), True), ROWS)
layer("AdditiveAttention", lambda: Itself(L.AdditiveAttention(), True), ROWS)
layer("MultiHeadAttention", lambda: Itself(L.MultiHeadAttention(2, 3), False), ROWS)
layer("GroupQueryAttention", lambda: Itself(L.GroupQueryAttention(4, 4, 2), False), ROWS)

layer("Rescaling", lambda: L.Rescaling(0.1), IMAGE)
layer("Resizing", lambda: L.Resizing(4, 4), IMAGE)
layer("CenterCrop", lambda: L.CenterCrop(4, 4), IMAGE)
layer("RandomCrop", lambda: L.RandomCrop(6, 6, seed=1), IMAGE)
layer("RandomFlip", lambda: L.RandomFlip(seed=1), IMAGE)
layer("RandomTranslation", lambda: L.RandomTranslation(0.1, 0.1, seed=1), IMAGE)
for name in ("RandomRotation", "RandomZoom", "RandomContrast", "RandomBrightness"):
    layer(name, lambda name=name: getattr(L, name)(0.2, seed=1), IMAGE)
for name in ("RandomErasing", "RandomGaussianBlur", "RandomGrayscale", "RandomInvert"):
    layer(name, lambda name=name: getattr(L, name)(seed=1), IMAGE)
for name in ("RandomElasticTransform", "RandomPerspective", "AugMix", "RandAugment"):
    layer(name, lambda name=name: getattr(L, name)(seed=1), IMAGE)
for name in ("RandomColorDegeneration", "RandomHue", "RandomSaturation", "RandomSharpness"):
    layer(name, lambda name=name: getattr(L, name)(0.3, seed=1), IMAGE)
layer("RandomShear", lambda: L.RandomShear(0.2, 0.2, seed=1), IMAGE)
layer("RandomColorJitter", lambda: L.RandomColorJitter(brightness_factor=0.2, seed=1), IMAGE)
layer("RandomPosterization", lambda: L.RandomPosterization(4, seed=1), IMAGE)
for name in ("AutoContrast", "Equalization", "Solarization"):
    layer(name, getattr(L, name), IMAGE)
layer(
    "ContrastLimitedAdaptiveHistogramEqualization",
    lambda: L.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2)),
    IMAGE,
)
layer("CutMix", lambda: Merged(L.CutMix(seed=1)), IMAGE)
layer("MixUp", lambda: Merged(L.MixUp(seed=1)), IMAGE)
layer("Pipeline", lambda: L.Pipeline([L.RandomFlip(seed=1), L.Rescaling(0.5)]), IMAGE)
layer(
    "MelSpectrogram",
    lambda: L.MelSpectrogram(fft_length=32, num_mel_bins=4, sequence_stride=8),
    (64,),
)
layer(
    "STFTSpectrogram",
    lambda: L.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16),
    (64, 1),
)

layer("CategoryEncoding", lambda: L.CategoryEncoding(9, "multi_hot"), (5,), "int32")
layer("Hashing", lambda: L.Hashing(4), (5,), "int32")
layer("Discretization", lambda: L.Discretization([-1.0, 0.0, 1.0]), FLAT)
layer(
    "IntegerLookup",
    lambda: L.IntegerLookup(vocabulary=list(range(9)), output_mode="multi_hot"),
    (5,),
    "int32",
)
