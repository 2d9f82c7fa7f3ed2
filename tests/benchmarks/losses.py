"""``anynan.stress`` on the losses, layers and metrics of five libraries.

``python -m tests.benchmarks.losses [LIBRARY...]`` prints what is found in each. Predictions have a
gradient, as in a training. What is found is looked at by hand: docs/stress-measured.md says which
findings are true.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import anynan

Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def those(library: Any, names: str, *example: Any) -> Cases:
    """Give functions of a library that take the same example."""
    return {name: (getattr(library, name), example) for name in names.split()}


def of_torch() -> Cases:
    x, p = torch.randn(6, 4).requires_grad_(), (torch.rand(6, 4) * 0.8 + 0.1).requires_grad_()
    y, labels, several = torch.randn(6, 4), torch.randint(0, 4, (6,)), torch.randint(0, 2, (6, 4))
    share, signs = torch.rand(6, 4).softmax(1), torch.randint(0, 2, (6,)) * 2 - 1
    column = torch.randn(6).requires_grad_()
    images, hidden = torch.randn(2, 6, 4), torch.arange(6)[None] >= torch.tensor([[6], [4]])
    return {
        **those(F, "mse_loss l1_loss smooth_l1_loss huber_loss", x, y),
        **those(F, "pairwise_distance cosine_similarity", x, y),
        **those(F, "cross_entropy multi_margin_loss", x, labels),
        **those(F, "binary_cross_entropy", p, share),
        **those(F, "binary_cross_entropy_with_logits", x, share),
        **those(F, "poisson_nll_loss", x, y.abs()),
        **those(F, "gaussian_nll_loss", x, y, torch.rand(6, 4).requires_grad_()),
        **those(F, "cosine_embedding_loss", x, y, signs),
        **those(F, "margin_ranking_loss", column, y[:, 0], signs),
        **those(F, "triplet_margin_loss", x, y, y.flip(0)),
        **those(F, "hinge_embedding_loss soft_margin_loss", column, signs),
        **those(F, "multilabel_margin_loss", x, several),
        **those(F, "multilabel_soft_margin_loss", x, several.float()),
        **those(F, "normalize gumbel_softmax", x),
        **those(torch, "cdist", x, y),
        "nll_loss": (lambda x, y: F.nll_loss(x.log_softmax(1), y), (x, labels)),
        "kl_div": (lambda x, y: F.kl_div(x.log_softmax(1), y), (x, share)),
        "poisson_nll_loss, log_input=False": (
            partial(F.poisson_nll_loss, log_input=False),
            (p, y.abs()),
        ),
        "layer_norm": (lambda x: F.layer_norm(x, (4,)), (x,)),
        "rms_norm": (lambda x: F.rms_norm(x, (4,)), (x,)),
        "log_softmax": (lambda x: F.log_softmax(x, 1), (x,)),
        "logsumexp": (lambda x: torch.logsumexp(x, 1), (x,)),
        "BatchNorm1d": (torch.nn.BatchNorm1d(4), (x,)),
        "GroupNorm": (torch.nn.GroupNorm(2, 4), (x,)),
        "MultiheadAttention": (_attention, (images.requires_grad_(), hidden)),
        "CTCLoss": (_ctc, (torch.randn(8, 2, 5).requires_grad_(), torch.randint(1, 5, (2, 3)))),
    }


def _attention(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    out: torch.Tensor = layer(x, x, x, key_padding_mask=hidden)[0]
    return out


def _ctc(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(x.log_softmax(2), labels, torch.full((2,), 8), torch.full((2,), 3))


def of_torchmetrics() -> Cases:
    metrics: Any = importlib.import_module("torchmetrics.functional")
    classes, sound, images, text = (
        importlib.import_module(f"torchmetrics.functional.{name}")
        for name in ("classification", "audio", "image", "text")
    )
    x, y = torch.rand(8), torch.rand(8)
    p, labels = torch.rand(8, 4).softmax(1), torch.randint(0, 4, (8,))
    signal, picture = torch.randn(2, 16), torch.rand(2, 1, 16, 16)
    calibration = partial(classes.multiclass_calibration_error, num_classes=4)
    noise = partial(images.peak_signal_noise_ratio, data_range=1.0)
    return {
        **those(metrics, "explained_variance mean_absolute_percentage_error", x, y),
        **those(metrics, "mean_squared_log_error pearson_corrcoef r2_score", x, y),
        **those(metrics, "symmetric_mean_absolute_percentage_error", x, y),
        **those(metrics, "tweedie_deviance_score", x, y),
        **those(metrics, "cosine_similarity", p, torch.rand(8, 4)),
        **those(metrics, "kl_divergence", p, torch.rand(8, 4).softmax(1)),
        **those(sound, "scale_invariant_signal_noise_ratio", signal, torch.randn(2, 16)),
        **those(text, "perplexity", torch.randn(2, 8, 4), torch.randint(0, 4, (2, 8))),
        "binary_auroc": (lambda x, y: classes.binary_auroc(x, y.long()), (x, y > 0.5)),
        "calibration_error": (calibration, (p, labels)),
        "peak_signal_noise_ratio": (noise, (picture, torch.rand(2, 1, 16, 16))),
    }


def of_optax() -> Cases:
    import jax
    import jax.numpy as jnp
    import optax

    random, losses = np.random.default_rng(0), optax.losses
    x, y = (jnp.asarray(random.normal(size=(6, 4)), jnp.float32) for _ in range(2))
    p, q = jax.nn.softmax(x), jax.nn.softmax(y)
    labels = jnp.asarray(random.integers(0, 4, 6))
    plain: Cases = {
        **those(losses, "convex_kl_divergence kl_divergence", jnp.log(p), q),
        **those(losses, "cosine_distance huber_loss log_cosh squared_error", x, y),
        **those(losses, "sigmoid_binary_cross_entropy softmax_cross_entropy", x, q),
        **those(losses, "softmax_cross_entropy_with_integer_labels", x, labels),
        **those(losses, "sigmoid_focal_loss", x, jnp.round(q)),
        **those(losses, "hinge_loss", x, jnp.sign(y)),
        "ntxent": (lambda x: losses.ntxent(x, jnp.array([0, 0, 1, 1, 2, 2])), (x,)),
    }
    return {
        name: (jax.grad(lambda *a, loss=loss: loss(*a).mean()), example)
        for name, (loss, example) in plain.items()
    }


def of_keras() -> Cases:
    import keras
    import tensorflow as tf

    random, losses, layers = np.random.default_rng(0), keras.losses, keras.layers
    x, y = (tf.constant(random.normal(size=(6, 4)), tf.float32) for _ in range(2))
    p, q = tf.nn.softmax(x), tf.nn.softmax(y)
    several = tf.constant(random.integers(0, 2, (6, 4)), tf.float32)
    names = "BatchNormalization", "LayerNormalization", "UnitNormalization"
    return {
        **those(losses, "binary_crossentropy binary_focal_crossentropy dice tversky", several, p),
        **those(losses, "hinge", several, x),
        **those(losses, "categorical_crossentropy kl_divergence poisson", q, p),
        **those(losses, "mean_squared_logarithmic_error", q, p),
        **those(losses, "cosine_similarity log_cosh mean_absolute_percentage_error", y, x),
        **{name: (getattr(layers, name)(), (x,)) for name in names},
        "GroupNormalization": (layers.GroupNormalization(2), (x,)),
    }


def of_transformers() -> Cases:
    detection: Any = importlib.import_module("transformers.loss.loss_for_object_detection")
    utils: Any = importlib.import_module("transformers.loss.loss_utils")
    logits, labels = torch.randn(2, 6, 5).requires_grad_(), torch.randint(0, 5, (2, 6))
    masks, several = torch.randn(3, 8).requires_grad_(), torch.randint(0, 2, (3, 8)).float()
    low = torch.rand(3, 2)
    boxes = torch.cat([low, low + torch.rand(3, 2) + 0.1], 1)
    config = SimpleNamespace(num_labels=5)
    words = {"ForCausalLMLoss": 5, "ForMaskedLMLoss": 5, "ForTokenClassification": config}
    return {
        **{
            name: (lambda x, y, name=name, of=of: getattr(utils, name)(x, y, of), (logits, labels))
            for name, of in words.items()
        },
        "dice_loss": (lambda x, y: detection.dice_loss(x, y, 3), (masks, several)),
        "sigmoid_focal_loss": (
            lambda x, y: detection.sigmoid_focal_loss(x, y, 3),
            (masks, several),
        ),
        "generalized_box_iou": (
            detection.generalized_box_iou,
            (boxes.requires_grad_(), boxes.detach().flip(0)),
        ),
    }


LIBRARIES = {
    "torch": of_torch,
    "torchmetrics": of_torchmetrics,
    "optax": of_optax,
    "keras": of_keras,
    "transformers": of_transformers,
}


def main() -> None:
    """Print what is found, but for the empty batch, for each loss."""
    for library in sys.argv[1:] or LIBRARIES:
        torch.manual_seed(0)
        for name, (loss, example) in LIBRARIES[library]().items():
            try:
                report = anynan.stress(loss, *example, budget=60)
            except Exception as error:
                print(f"{library} {name} | {type(error).__name__}: {error}", flush=True)
                continue
            told = "; ".join(
                f"[{x.group}] {x.what} ({x.event.operation.name if x.event.operation else '-'}, "
                f"{x.event.cause.tag if x.event.cause else '-'})"
                for x in report.findings
                if x.words != "an empty batch"
            )
            survived = f"{report.survived} of {report.tried}"
            print(f"{library} {name} | {survived} | {told or '-'}", *report.notes, flush=True)


if __name__ == "__main__":
    main()
