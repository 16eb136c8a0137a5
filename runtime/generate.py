"""Greedy answers of a base model, with or without an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwright.runtime.checks.export import attach
from shardwright.runtime.files import open_files
from shardwright.runtime.reference import load_plain
from shardwright.schemas.errors import RecipeError, RunError


def generate(checkpoint: Path, adapter: Path | None, prompt: str, max_new_tokens: int) -> str:
    """Continue a prompt.

    Args:
        checkpoint: the base.
        adapter: a PEFT folder, or ``None`` for the base alone.
        prompt: plain text.
        max_new_tokens: upper limit; an end-of-text token ends earlier.

    Returns:
        The continuation, without the prompt.

    Raises:
        RecipeError: ``empty-prompt``, ``no-tokenizer``.
        RunError: ``no-adapter``.
    """
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise RecipeError(
            "no-tokenizer", "no tokenizer.json", where=str(checkpoint), next_action="fetch the tokenizer's files"
        )
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise RunError(
            "no-adapter", "no adapter_config.json", where=str(adapter), next_action="export an adapter first"
        )
    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise RecipeError("empty-prompt", "the prompt has no token", where="--prompt", next_action="give some text")
    dtype = open_files(checkpoint, torch.float32)[1].stored_dtype
    model: Any = load_plain(checkpoint, dtype, torch.device("cpu"))[0]
    if adapter is not None:
        model = attach(model, adapter)
    given = torch.tensor([ids])
    end = model.config.eos_token_id
    with torch.no_grad():
        out = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=end[0] if isinstance(end, list) else end,
        )
    return str(tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True))
