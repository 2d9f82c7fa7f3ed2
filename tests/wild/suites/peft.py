"""Adapters of the PEFT library on a small language model."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor

import tests.wild.torchvision_here  # noqa: F401 - before what imports torchvision

# isort: split
import peft
from transformers import LlamaConfig, LlamaForCausalLM

from tests.wild.torch_training import Program, suite_of

logging.disable(logging.WARNING)

SAMPLE = ["LoraConfig"]
TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
ON: dict[str, Any] = TASK | {"target_modules": ["q_proj", "v_proj"]}

CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "LoraConfig": lambda: peft.LoraConfig(**ON, r=4, lora_dropout=0.1),
    "LoraConfig, dora": lambda: peft.LoraConfig(**ON, r=4, use_dora=True),
    "LoraConfig, rslora": lambda: peft.LoraConfig(**ON, r=4, use_rslora=True),
    "AdaLoraConfig": lambda: peft.AdaLoraConfig(**ON, init_r=4, target_r=2, total_step=10),
    "IA3Config": lambda: peft.IA3Config(
        **TASK, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoHaConfig": lambda: peft.LoHaConfig(**ON, r=4),
    "LoKrConfig": lambda: peft.LoKrConfig(**ON, r=4),
    "OFTConfig": lambda: peft.OFTConfig(**ON, oft_block_size=4),
    "BOFTConfig": lambda: peft.BOFTConfig(**ON, boft_block_size=4),
    "VeraConfig": lambda: peft.VeraConfig(**ON, r=4),
    "HRAConfig": lambda: peft.HRAConfig(**ON, r=4),
    "PromptTuningConfig": lambda: peft.PromptTuningConfig(**TASK, num_virtual_tokens=4),
    "PrefixTuningConfig": lambda: peft.PrefixTuningConfig(**TASK, num_virtual_tokens=4),
    "PromptEncoderConfig": lambda: peft.PromptEncoderConfig(
        **TASK, num_virtual_tokens=4, encoder_hidden_size=16
    ),
    "LNTuningConfig": lambda: peft.LNTuningConfig(**TASK),
}


def build(case: str) -> Program:
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    model: Any = peft.get_peft_model(LlamaForCausalLM(config), CONFIGURATIONS[case]())
    ids = torch.randint(4, 99, (2, 16), generator=torch.Generator().manual_seed(3))

    def loss(model: Any, number: int) -> Tensor:
        turned = ids.roll(number, 1)
        return model(input_ids=turned, labels=turned).loss

    return model, loss


cases, run = suite_of("peft", {case: partial(build, case) for case in CONFIGURATIONS})
