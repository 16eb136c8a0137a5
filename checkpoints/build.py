"""Building a checkpoint's model on the meta device: structure without weights and without the checkpoint's code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.checkpoints.buffers import rebuild_buffers
from shardwright.checkpoints.config import ModelConfig, inert_config, read_config
from shardwright.checkpoints.models.registry import OWN_MODELS
from shardwright.checkpoints.remote_code import has_code, is_trusted, read_code, remote_class
from shardwright.schemas.errors import CheckpointError

__all__ = [
    "build_from_config",
    "build_on_meta",
    "has_transformers_class",
    "model_class_for",
    "rebuild_buffers",
    "state_shapes",
    "tied_names",
    "transformers_config",
]


def build_on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The causal language model of a checkpoint, every parameter and buffer on meta.

    Args:
        folder: the checkpoint; only config.json is read.
        dtype: format of parameters (buffers keep the format that the model's class gives them).

    Raises:
        CheckpointError: ``unknown-architecture`` when the installed transformers has no class for it,
            ``config-contradiction`` when the class refuses the configuration.
    """
    return build_from_config(read_config(folder), dtype)


def build_from_config(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """As :func:`build_on_meta`, for a configuration that has been read. Needs no network and no files."""
    hf_config = transformers_config(config)
    model_class = model_class_for(config)
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    try:
        with torch.device("meta"):
            model = model_class._from_config(hf_config, dtype=dtype, attn_implementation=attention)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(
            "config-contradiction",
            f"{model_class.__name__} cannot be built from config.json: {type(error).__name__}: {error}"[:500],
            where=str(config.folder / "config.json"),
            next_action="check that config.json belongs to this checkpoint and to this version of transformers",
        ) from error
    model.train(False)
    return model


def has_transformers_class(config: ModelConfig) -> bool:
    """Whether the installed transformers can build this checkpoint without the checkpoint's code."""
    try:
        model_class_for(dataclasses.replace(config, raw={k: v for k, v in config.raw.items() if k != "auto_map"}))
    except CheckpointError:
        return False
    return True


def model_class_for(config: ModelConfig) -> Any:
    """The transformers class: the named architecture where it is the library's, else the family's causal LM.

    A configuration with a nested language model belongs to the whole model, not to the causal LM of its text part.

    Raises:
        CheckpointError: ``unknown-architecture``; as ``remote_class`` where the checkpoint brings its own code.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    if config.model_type in OWN_MODELS:
        return OWN_MODELS[config.model_type].model_class()
    if config.model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        tables = (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
        )
        found = [names for table in tables if (names := table.get(config.model_type)) is not None]
        choices = [name for names in found for name in ((names,) if isinstance(names, str) else names)]
        if config.architecture in choices:
            return getattr(transformers, config.architecture)
        own = configuration_auto.CONFIG_MAPPING[config.model_type]
        classes = [getattr(transformers, name) for name in choices]
        whole = [one for one in classes if getattr(one, "config_class", own) is own]
        if classes:
            return (whole or classes)[0]
    own = "auto_map" in config.raw and has_code(config.folder)
    if own and is_trusted(config.folder):
        return remote_class(config.folder, config.raw["auto_map"], "AutoModelForCausalLM")
    code = read_code(config.folder)[0] if own else None
    raise CheckpointError(
        "unknown-architecture",
        f"transformers {transformers.__version__} has no class for model_type {config.model_type!r}"
        + (f"; the checkpoint's own code ({len(code.files)} files, hash {code.sha256}) is not run" if code else ""),
        where=str(config.folder / "config.json"),
        next_action="install a transformers release that knows it; its headers can still be profiled"
        + (f"; or read its code and give --trust-remote-code {code.sha256}" if code else ""),
    )


def transformers_config(config: ModelConfig) -> Any:
    """The library's configuration object, made from the inert part of config.json.

    Raises:
        CheckpointError: ``unknown-architecture``, ``config-contradiction``.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class_for(config)
    for size in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"):
        config.count(size)
    if own := OWN_MODELS.get(config.model_type):
        inert = inert_config(config.raw, frozenset())
        return own.config_class()(**{name: value for name, value in inert.items() if name != "model_type"})
    known = config.model_type in CONFIG_MAPPING
    config_class = (
        CONFIG_MAPPING[config.model_type]
        if known
        else remote_class(config.folder, config.raw.get("auto_map"), "AutoConfig")
    )
    try:
        return config_class(**inert_config(config.raw, _declared(config_class)))
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        raise CheckpointError(
            "config-contradiction",
            f"{config_class.__name__} refuses config.json: {type(error).__name__}: {error}"[:500],
            where=str(config.folder / "config.json"),
            next_action="correct the named field or fetch config.json again",
        ) from error


def _declared(config_class: Any) -> frozenset[str]:
    """Field names of a configuration class and of its nested ones, aliases included."""
    names: set[str] = set()
    for one in (config_class, *getattr(config_class, "sub_configs", {}).values()):
        if dataclasses.is_dataclass(one):
            names |= {field.name for field in dataclasses.fields(one)}
        names |= set(getattr(one, "attribute_map", {}) or {})
        names |= set(getattr(one, "sub_configs", {}) or {})
    return frozenset(names)


def state_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Everything that files must fill: parameters and persistent buffers, tied ones once, in module order."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                shapes[f"{prefix}.{name}" if prefix else name] = tuple(value.shape)
    return shapes


def tied_names(model: nn.Module) -> dict[str, str]:
    """Alias → the name under which a shared parameter is counted."""
    canonical: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        first = canonical.setdefault(id(value), name)
        if first != name:
            tied[name] = first
    return tied
