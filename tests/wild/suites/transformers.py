"""Every architecture of the transformers library that can be made small, weights at random."""

import inspect
import logging
import os
import zlib
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
import transformers
import transformers.models.llama.modeling_llama  # once for all cases: what every model imports
from transformers.models.auto import configuration_auto, modeling_auto

from tests.wild.rows import Row
from tests.wild.tiny_configs import ONE, TINY
from tests.wild.torch_training import Program, drawn, rows

transformers.logging.set_verbosity_error()
logging.disable(logging.WARNING)

SAMPLE = ["gpt2", "resnet", "wav2vec2"]
LARGEST = 8e6  # weights
LENGTH, BATCH, WORDS = 16, 2, 99
# The task a model is made for: the first that it has.
HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "SEQUENCE_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "",
)
# Those that take text and an image at once.
BOTH = {
    "align", "altclip", "blip", "bridgetower", "chinese_clip", "clip", "clipseg", "flava", "git",
    "groupvit", "metaclip_2", "owlvit", "siglip", "siglip2", "vilt", "x_clip",
}  # fmt: skip


def heads(kind: str) -> dict[str, Any]:
    name = f"MODEL_FOR_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES"
    return getattr(modeling_auto, name, {})


def cases() -> list[str]:
    kinds = configuration_auto.CONFIG_MAPPING_NAMES
    able = [kind for kind in kinds if any(kind in heads(head) for head in HEADS)]
    return sorted(able, key=lambda kind: zlib.crc32(kind.encode()))  # part of a run is a sample


def shrunk(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Choose small values for the fields that a configuration has."""
    small = {}
    for name, value in fields.items():
        if name not in TINY:
            continue
        if value is None and name not in {"num_key_value_heads", "pad_token_id", "n_inner"}:
            continue
        if value is not None and isinstance(value, list | tuple) != isinstance(
            TINY[name], list | tuple
        ):
            continue
        small[name] = TINY[name]
    return small | more


def configuration(kind: str) -> Any:
    """Make a small configuration of one architecture, and of the ones inside it."""
    made = configuration_auto.CONFIG_MAPPING[kind]
    default = made()
    fields = {name: value for name, value in default.to_dict().items() if name[0] != "_"}
    small = shrunk(fields, ONE.get(kind, {}))
    for name, inner in fields.items():
        if isinstance(inner, dict) and name.endswith("_config"):
            inner_kind = getattr(getattr(default, name), "model_type", None) or ""
            parts = shrunk(inner, ONE.get(inner_kind, {}))
            if isinstance(types := inner.get("layer_types"), list) and "num_hidden_layers" in parts:
                parts["layer_types"] = types[-2:] if len(types) > 1 else None
            small[name] = parts | ({"model_type": inner_kind} if inner_kind else {})
    layers = small.get("num_hidden_layers")
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(fields.get(name), list) and layers:
            small[name] = (fields[name] * 2)[-layers:]
    for left_out in (None, "head_dim", "num_key_value_heads", "layer_types", "dropout"):
        try:
            return made(**{name: value for name, value in small.items() if name != left_out})
        except Exception as error:
            why = error
    raise why


def arguments(kind: str, head: str, config: Any, model: Any) -> dict[str, Any]:
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    words = getattr(getattr(config, "text_config", None) or config, "vocab_size", None) or WORDS
    generator = torch.Generator().manual_seed(3)
    top = min(words, WORDS) if isinstance(words, int) else WORDS
    ids = torch.randint(4, top, (BATCH, LENGTH), generator=generator)
    vision = getattr(config, "vision_config", None)
    given: dict[str, Any] = {}
    if "pixel_values" in takes and (
        main == "pixel_values" or ("input_ids" in takes and vision is not None and kind in BOTH)
    ):
        size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 32
        size = size[0] if isinstance(size, list | tuple) else size
        channels = getattr(config, "num_channels", 3)
        frames = getattr(config, "num_frames", None)
        shape = [channels if isinstance(channels, int) else 3, size, size]
        if head == "VIDEO_CLASSIFICATION" and frames:
            shape = [frames, 3, size, size]
        given["pixel_values"] = drawn(BATCH, *shape)
    if "input_ids" in takes and main != "pixel_values":
        given["input_ids"] = ids
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
            given["attention_mask"][1, 12:] = 0
    if main == "input_values":
        spectrum = kind == "audio-spectrogram-transformer"
        given["input_values"] = drawn(BATCH, 32, 16) if spectrum else drawn(BATCH, 1600)
    if main == "input_features":
        bands = getattr(config, "num_mel_bins", None) or 16
        bands = getattr(config, "feature_projection_input_dim", None) or bands
        bands = getattr(config, "input_feat_per_channel", bands)
        whisper = kind == "whisper"
        given["input_features"] = drawn(BATCH, 16, 60) if whisper else drawn(BATCH, 40, bands)
    if "decoder_input_ids" in takes and main != "pixel_values":
        given["decoder_input_ids"] = ids[:, :10].clone()
    if "labels" in takes:
        if head in {"CAUSAL_LM", "MASKED_LM"}:
            given["labels"] = ids.clone()
        elif head in {"SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"}:
            given["labels"] = ids[:, :10].clone()
        elif head.endswith("CLASSIFICATION"):
            given["labels"] = torch.tensor([0, 1])
    if "return_loss" in takes:
        given["return_loss"] = True
    if "use_cache" in takes:
        given["use_cache"] = False
    return given


def learning(value: Any) -> Iterator[Tensor]:
    """Find the outputs a loss can be made of, in what may hold more than containers."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from learning(part)
    elif hasattr(value, "values"):
        for part in value.values():
            yield from learning(part)


def loss_of(outputs: Any) -> Tensor:
    found = getattr(outputs, "loss", None)
    if isinstance(found, Tensor):
        return found.float().sum()
    return sum((part.float().square().mean() for part in learning(outputs)), torch.zeros(()))


def made(kind: str, largest: float = LARGEST) -> tuple[Any, dict[str, Any]]:
    """Make a model of at most so many weights, and what it is called with."""
    head = next(head for head in HEADS if kind in heads(head))
    named = heads(head)[kind]
    network = getattr(transformers, named[0] if isinstance(named, list | tuple) else named)
    config = configuration(kind)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in network(config).parameters())
    if size > largest:
        msg = f"too large: {size} weights"
        raise ValueError(msg)
    model = network(config)
    return model, arguments(kind, head, config, model)


def build(kind: str) -> Program:
    model, given = made(kind)

    def loss(model: Any, number: int) -> Tensor:
        turned = dict(given)
        if "input_ids" in given:
            turned["input_ids"] = given["input_ids"].roll(number, 1)
        return loss_of(model(**turned))

    return model, loss


def run(case: str) -> Iterator[Row]:
    yield from rows("transformers", case, lambda: build(case))
