"""A checkpoint opened for loading: configuration, headers, and which tensors fill which parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoints.build import build_from_config, state_shapes
from shardwright.checkpoints.config import ModelConfig, read_config
from shardwright.checkpoints.headers import Headers, read_headers
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.precision import keep_stored_fp32


@dataclass(frozen=True)
class Files:
    """The checkpoint's side of a run."""

    folder: Path
    config: ModelConfig
    headers: Headers
    names: NameMap

    @property
    def stored_dtype(self) -> torch.dtype:
        """Format of computation where no plan says: bf16 for a bf16 checkpoint, else fp32."""
        floats = {tensor.dtype for tensor in self.headers.tensors.values()}
        return torch.bfloat16 if "BF16" in floats and "F32" not in floats else torch.float32


def open_files(folder: Path, dtype: torch.dtype) -> tuple[nn.Module, Files]:
    """The model on meta and the files behind it.

    Args:
        dtype: of parameters, but for those that the files and the model's class keep in fp32.

    Raises:
        CheckpointError: as the parts.
    """
    config = read_config(folder)
    headers = read_headers(folder)
    model = build_from_config(config, dtype)
    names = NameMap.for_checkpoint(config, headers, state_shapes(model), model)
    keep_stored_fp32(model, names, headers)
    return model, Files(folder, config, headers, names)
