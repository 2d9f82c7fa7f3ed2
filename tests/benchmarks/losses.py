"""``anynan.stress`` on the losses of PyTorch: ``python -m tests.benchmarks.losses`` prints them.

Each gets predictions that have a gradient, as in a training. What is found is looked at by hand:
docs/stress-measured.md says which findings are true.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import anynan


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Give each loss with an example."""
    torch.manual_seed(0)

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
    }


def main() -> None:
    """Print what is found, but for the empty batch, for each loss."""
    for name, (loss, example) in cases().items():
        report = anynan.stress(loss, *example, budget=20)
        left = [x for x in report.findings if x.words != "an empty batch"]
        told = "; ".join(
            f"[{x.group}] {x.what} ({x.event.operation.name if x.event.operation else '-'}, "
            f"{x.event.cause.tag if x.event.cause else '-'})"
            for x in left
        )
        print(f"{name} | {report.survived} of {report.tried} | {told or '-'}", flush=True)


if __name__ == "__main__":
    main()
