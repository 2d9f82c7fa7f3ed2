"""``anynan.stress`` on the losses, layers and metrics of five libraries.

``python -m tests.benchmarks.losses [LIBRARY...]`` prints what is found in each. Predictions have a
gradient, as in a training. What is found is looked at by hand: docs/stress-measured.md says which
findings are true.
"""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import anynan

Cases = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def of_torch() -> Cases:
    """Give each loss and norm of PyTorch with an example."""

    def x() -> torch.Tensor:
        return torch.randn(6, 4).requires_grad_()

    def p() -> torch.Tensor:
        return torch.rand(6, 4).mul(0.8).add(0.1).requires_grad_()

    y, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    share, signs = torch.rand(6, 4).softmax(1), torch.randint(0, 2, (6,)) * 2 - 1
    several = torch.randint(0, 2, (6, 4))
    return {
        "mse_loss": (F.mse_loss, (x(), y)),
        "l1_loss": (F.l1_loss, (x(), y)),
        "smooth_l1_loss": (F.smooth_l1_loss, (x(), y)),
        "huber_loss": (F.huber_loss, (x(), y)),
        "cross_entropy": (F.cross_entropy, (x(), labels)),
        "nll_loss": (lambda x, y: F.nll_loss(x.log_softmax(1), y), (x(), labels)),
        "binary_cross_entropy": (F.binary_cross_entropy, (p(), share)),
        "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (x(), share)),
        "kl_div": (lambda x, y: F.kl_div(x.log_softmax(1), y), (x(), share)),
        "poisson_nll_loss": (F.poisson_nll_loss, (x(), y.abs())),
        "poisson_nll_loss, log_input=False": (
            lambda x, y: F.poisson_nll_loss(x, y, log_input=False),
            (p(), y.abs()),
        ),
        "gaussian_nll_loss": (F.gaussian_nll_loss, (x(), y, torch.rand(6, 4).requires_grad_())),
        "cosine_embedding_loss": (F.cosine_embedding_loss, (x(), y, signs)),
        "margin_ranking_loss": (F.margin_ranking_loss, (x()[:, 0], y[:, 0], signs)),
        "triplet_margin_loss": (F.triplet_margin_loss, (x(), y, y.flip(0))),
        "hinge_embedding_loss": (F.hinge_embedding_loss, (x()[:, 0], signs)),
        "soft_margin_loss": (F.soft_margin_loss, (x()[:, 0], signs)),
        "multi_margin_loss": (F.multi_margin_loss, (x(), labels)),
        "multilabel_margin_loss": (F.multilabel_margin_loss, (x(), several)),
        "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, (x(), several.float())),
        "pairwise_distance": (F.pairwise_distance, (x(), y)),
        "cosine_similarity": (F.cosine_similarity, (x(), y)),
        "normalize": (F.normalize, (x(),)),
        "layer_norm": (lambda x: F.layer_norm(x, (4,)), (x(),)),
        "rms_norm": (lambda x: F.rms_norm(x, (4,)), (x(),)),
        "cdist": (torch.cdist, (x(), y)),
        "log_softmax": (lambda x: F.log_softmax(x, 1), (x(),)),
        "gumbel_softmax": (lambda x: F.gumbel_softmax(x), (x(),)),
        "logsumexp": (lambda x: torch.logsumexp(x, 1), (x(),)),
        "BatchNorm1d": (torch.nn.BatchNorm1d(4), (x(),)),
        "GroupNorm": (torch.nn.GroupNorm(2, 4), (x(),)),
        "MultiheadAttention": (_attention, (torch.randn(2, 6, 4).requires_grad_(), _masked())),
        "CTCLoss": (_ctc, (torch.randn(8, 2, 5).requires_grad_(), torch.randint(1, 5, (2, 3)))),
    }


def _attention(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    out: torch.Tensor = layer(x, x, x, key_padding_mask=hidden)[0]
    return out


def _masked() -> torch.Tensor:
    return torch.arange(6)[None] >= torch.tensor([[6], [4]])


def _ctc(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(x.log_softmax(2), labels, torch.full((2,), 8), torch.full((2,), 3))


def of_torchmetrics() -> Cases:
    """Give metrics of torchmetrics."""
    metrics: Any = importlib.import_module("torchmetrics.functional")
    classes: Any = importlib.import_module("torchmetrics.functional.classification")
    sound: Any = importlib.import_module("torchmetrics.functional.audio")
    images: Any = importlib.import_module("torchmetrics.functional.image")
    text: Any = importlib.import_module("torchmetrics.functional.text")

    x, y = torch.rand(8), torch.rand(8)
    p, labels = torch.rand(8, 4).softmax(1), torch.randint(0, 4, (8,))
    signal, picture = torch.randn(2, 16), torch.rand(2, 1, 16, 16)
    return {
        "binary_auroc": (lambda x, y: classes.binary_auroc(x, y.long()), (x, y > 0.5)),
        "calibration_error": (
            lambda p, y: classes.multiclass_calibration_error(p, y, num_classes=4),
            (p, labels),
        ),
        "cosine_similarity": (metrics.cosine_similarity, (p, torch.rand(8, 4))),
        "explained_variance": (metrics.explained_variance, (x, y)),
        "kl_divergence": (metrics.kl_divergence, (p, torch.rand(8, 4).softmax(1))),
        "mean_absolute_percentage_error": (metrics.mean_absolute_percentage_error, (x, y)),
        "mean_squared_log_error": (metrics.mean_squared_log_error, (x, y)),
        "pearson_corrcoef": (metrics.pearson_corrcoef, (x, y)),
        "perplexity": (text.perplexity, (torch.randn(2, 8, 4), torch.randint(0, 4, (2, 8)))),
        "peak_signal_noise_ratio": (
            lambda x, y: images.peak_signal_noise_ratio(x, y, data_range=1.0),
            (picture, torch.rand(2, 1, 16, 16)),
        ),
        "r2_score": (metrics.r2_score, (x, y)),
        "scale_invariant_signal_noise_ratio": (
            sound.scale_invariant_signal_noise_ratio,
            (signal, torch.randn(2, 16)),
        ),
        "symmetric_mean_absolute_percentage_error": (
            metrics.symmetric_mean_absolute_percentage_error,
            (x, y),
        ),
        "tweedie_deviance_score": (metrics.tweedie_deviance_score, (x, y)),
    }


def of_optax() -> Cases:
    """Give losses of optax, with their gradient."""
    import jax
    import jax.numpy as jnp
    import optax

    random = np.random.default_rng(0)
    x, y = (jnp.asarray(random.normal(size=(6, 4)), jnp.float32) for _ in range(2))
    p, q = jax.nn.softmax(x), jax.nn.softmax(y)
    labels = jnp.asarray(random.integers(0, 4, 6))
    losses: Cases = {
        "convex_kl_divergence": (optax.losses.convex_kl_divergence, (jnp.log(p), q)),
        "cosine_distance": (optax.losses.cosine_distance, (x, y)),
        "hinge_loss": (optax.losses.hinge_loss, (x, jnp.sign(y))),
        "huber_loss": (optax.losses.huber_loss, (x, y)),
        "kl_divergence": (optax.losses.kl_divergence, (jnp.log(p), q)),
        "log_cosh": (optax.losses.log_cosh, (x, y)),
        "ntxent": (lambda x: optax.losses.ntxent(x, jnp.array([0, 0, 1, 1, 2, 2])), (x,)),
        "sigmoid_binary_cross_entropy": (optax.losses.sigmoid_binary_cross_entropy, (x, q)),
        "sigmoid_focal_loss": (optax.losses.sigmoid_focal_loss, (x, jnp.round(q))),
        "softmax_cross_entropy": (optax.losses.softmax_cross_entropy, (x, q)),
        "softmax_cross_entropy_with_integer_labels": (
            optax.losses.softmax_cross_entropy_with_integer_labels,
            (x, labels),
        ),
        "squared_error": (optax.losses.squared_error, (x, y)),
    }
    return {
        name: (jax.grad(lambda *a, loss=loss: loss(*a).mean()), example)
        for name, (loss, example) in losses.items()
    }


def of_keras() -> Cases:
    """Give losses and layers of Keras on TensorFlow."""
    import keras
    import tensorflow as tf

    random = np.random.default_rng(0)
    x, y = (tf.constant(random.normal(size=(6, 4)), tf.float32) for _ in range(2))
    p, q = tf.nn.softmax(x), tf.nn.softmax(y)
    several = tf.constant(random.integers(0, 2, (6, 4)), tf.float32)
    losses, layers = keras.losses, keras.layers
    return {
        "binary_crossentropy": (losses.binary_crossentropy, (several, p)),
        "binary_focal_crossentropy": (losses.binary_focal_crossentropy, (several, p)),
        "categorical_crossentropy": (losses.categorical_crossentropy, (q, p)),
        "cosine_similarity": (losses.cosine_similarity, (y, x)),
        "dice": (losses.dice, (several, p)),
        "hinge": (losses.hinge, (several, x)),
        "kl_divergence": (losses.kl_divergence, (q, p)),
        "log_cosh": (losses.log_cosh, (y, x)),
        "mean_absolute_percentage_error": (losses.mean_absolute_percentage_error, (y, x)),
        "mean_squared_logarithmic_error": (losses.mean_squared_logarithmic_error, (q, p)),
        "poisson": (losses.poisson, (q, p)),
        "tversky": (losses.tversky, (several, p)),
        "BatchNormalization": (layers.BatchNormalization(), (x,)),
        "GroupNormalization": (layers.GroupNormalization(2), (x,)),
        "LayerNormalization": (layers.LayerNormalization(), (x,)),
        "UnitNormalization": (layers.UnitNormalization(), (x,)),
    }


def of_transformers() -> Cases:
    """Give losses of transformers."""
    detection: Any = importlib.import_module("transformers.loss.loss_for_object_detection")
    utils: Any = importlib.import_module("transformers.loss.loss_utils")
    config = SimpleNamespace(num_labels=5)
    logits, labels = torch.randn(2, 6, 5).requires_grad_(), torch.randint(0, 5, (2, 6))
    masks, several = torch.randn(3, 8).requires_grad_(), torch.randint(0, 2, (3, 8)).float()
    low = torch.rand(3, 2)
    boxes = torch.cat([low, low + torch.rand(3, 2) + 0.1], 1)
    return {
        "ForCausalLMLoss": (lambda x, y: utils.ForCausalLMLoss(x, y, 5), (logits, labels)),
        "ForMaskedLMLoss": (lambda x, y: utils.ForMaskedLMLoss(x, y, 5), (logits, labels)),
        "ForTokenClassification": (
            lambda x, y: utils.ForTokenClassification(x, y, config),
            (logits, labels),
        ),
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
            left = [x for x in report.findings if x.words != "an empty batch"]
            told = "; ".join(
                f"[{x.group}] {x.what} ({x.event.operation.name if x.event.operation else '-'}, "
                f"{x.event.cause.tag if x.event.cause else '-'})"
                for x in left
            )
            survived = f"{report.survived} of {report.tried}"
            print(f"{library} {name} | {survived} | {told or '-'}", *report.notes, flush=True)


if __name__ == "__main__":
    main()
