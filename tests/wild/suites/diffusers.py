"""Small models of the diffusers library, weights at random."""

import logging
import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from torch.nn import functional as F

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
import diffusers

from tests.wild.torch_training import Program, drawn, suite_of

logging.disable(logging.WARNING)

SAMPLE = ["UNet2DConditionModel"]
TIMES = torch.tensor([3, 500])


def unet() -> Program:
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    x, words = drawn(2, 4, 16, 16), drawn(2, 5, 16)
    return model, lambda model, i: F.mse_loss(model(x, TIMES + i, words).sample, x)


def autoencoder_in_parts() -> Program:
    """Call encoder and decoder, as a training script does, and never the model."""
    x = drawn(2, 3, 16, 16)

    def loss(model: Any, number: int) -> Tensor:
        found = model.encode(x).latent_dist
        return F.mse_loss(model.decode(found.sample()).sample, x) + 1e-6 * found.kl().mean()

    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=8,
        sample_size=16,
    )
    return model, loss


def quantized() -> Program:
    model = diffusers.VQModel(block_out_channels=(16,), norm_num_groups=8, num_vq_embeddings=16)
    x = drawn(2, 3, 16, 16)
    return model, lambda model, i: F.mse_loss(model(x).sample, x)


def stable_diffusion_3() -> Program:
    model = diffusers.SD3Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
    )
    given = {"encoder_hidden_states": drawn(2, 5, 16), "pooled_projections": drawn(2, 16)}
    x = drawn(2, 4, 8, 8)
    return model, lambda model, i: model(x, timestep=TIMES, **given).sample.square().mean()


PROGRAMS: dict[str, Callable[[], Program]] = {
    "UNet2DConditionModel": unet,
    "AutoencoderKL in parts": autoencoder_in_parts,
    "VQModel": quantized,
    "SD3Transformer2DModel": stable_diffusion_3,
}
cases, run = suite_of("diffusers", PROGRAMS)
