"""The training model's logits on fixed held-out tokens, kept for the check of the exported adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes

from shardwright.runtime.batch import ids_of
from shardwright.runtime.losses import logits_of
from shardwright.runtime.train import Trainer
from shardwright.schemas.files import write_atomic

FOLDER = "reference"
FILE = "logits.safetensors"
TOKENS = 32
"""Tokens of the probe sequence (fewer where the recipe's sequences are shorter)."""


def path(run_dir: Path) -> Path:
    """Where a run keeps them: ``input_ids`` [1, P] and ``logits`` [1, P, V], fp32."""
    return run_dir / FOLDER / FILE


def save_reference_logits(trainer: Trainer) -> None:
    """Every rank runs the same tokens (the dispatch needs all of them); rank 0 writes."""
    ids = torch.from_numpy(ids_of(trainer.held_out)[:1, :TOKENS].astype(np.int64)).to(trainer.device.torch_device)
    with torch.no_grad():
        logits = logits_of(trainer.live.model, ids).float().cpu().contiguous()
    if trainer.ranks.rank == 0:
        write_atomic(path(trainer.run_dir), safetensors_bytes({"input_ids": ids.cpu(), "logits": logits}))
