"""The rival: transformers and PEFT as a user would put them together today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from train_step_cases import ALPHA, ATTENTION, EXPERTS, RANK, Case


@dataclass
class Rival:
    """A PEFT model with checkpointing and torch's AdamW."""

    model: Any
    optimizer: torch.optim.Optimizer
    trainable: int

    def loss(self, ids: Tensor) -> Tensor:
        """Mean loss of a batch."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def step(self, ids: Tensor) -> float:
        """Forward, backward, AdamW."""
        loss = self.loss(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def build_rival(case: Case) -> Rival:
    """Random weights on the device, adapters by PEFT (fp32, as it makes them), non-reentrant checkpointing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        base: nn.Module = AutoModelForCausalLM.from_config(case.hf_config(), dtype=getattr(torch, case.dtype))
    base.config.use_cache = False
    experts = list(EXPERTS) if case.experts else None
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(ATTENTION), target_parameters=experts
    )
    model: Any = get_peft_model(base, lora)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    leaves = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
    return Rival(model, optimizer, sum(value.numel() for value in leaves))
