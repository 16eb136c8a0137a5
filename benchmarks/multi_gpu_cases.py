"""What ``multi_gpu.py`` runs on N devices of one host: meshes, models and settings."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from points_shapes import BOTH, SHAPES, TINY
from train_step_decisions import FUSIONS, WITHOUT

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.executable import runs

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, TOKENS = 8, 16
COUNTED = SEQUENCES * (TOKENS - 1)

Family = tuple[str, Callable[[], Any], tuple[str, ...]]
"""(name, makes its configuration, operators to fuse)."""


def meshes(world: int) -> list[Mesh]:
    """Meshes that parity covers: one rank; FSDP and EP over all; with four or more both together."""
    if world == 1:
        return [Mesh()]
    found = [Mesh(shard=world), Mesh(ep=world)]
    if world >= 4:
        found.append(Mesh(shard=2, ep=world // 2))
    return found


def parity_ids(vocabulary: int) -> torch.Tensor:
    """[8, 16] tokens; half of the sequences are one token, so that some experts get most rows and some none."""
    ids = torch.randint(3, vocabulary, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(5))
    ids[: SEQUENCES // 2] = 3
    return ids


@lru_cache(maxsize=1)
def _listed() -> Any:
    """The runtime's own list of families and their small sizes."""
    path = ROOT / "tests" / "runtime" / "test_families.py"
    spec = importlib.util.spec_from_file_location("listed_families", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def families() -> list[Family]:
    """The runtime's families in their own modules."""
    import transformers

    listed, found = _listed(), []
    for name, (prefix, sizes) in listed.FAMILIES.items():

        def config(prefix: str = prefix, sizes: dict[str, Any] = sizes) -> Any:
            text = "Text" if prefix == "Llama4" else ""
            return getattr(transformers, f"{prefix}{text}Config")(**{**listed.SMALL, **sizes})

        found.append((name, config, ()))
    return found


def FUSED_PARITY(kind: str) -> list[Family]:
    """Qwen3's layers at a width that the kernels take, fused; on CUDA only."""
    if kind != "cuda":
        return []
    sizes = {
        **TINY["qwen3-30b"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "vocab_size": 512,
    }
    shape = SHAPES["qwen3-30b"]
    return [("qwen3-256-wide", lambda: shape.hf_config(2, sizes), shape.fused)]


@dataclass(frozen=True)
class Setting:
    """One plan for one model."""

    model: str
    layers: int
    strategy: ParallelStrategy
    tokens: int
    executor: str
    targets: tuple[str, ...] = BOTH

    @property
    def operators(self) -> tuple[str, ...]:
        """All that the family has a place for: without its linear attention fused, Kimi's layers need five times the
        memory and twenty times the time."""
        without = WITHOUT[SHAPES[self.model].config_class]
        return tuple(name for name in FUSIONS if name not in without) if self.executor == "fused" else ()

    @property
    def case(self) -> str:
        s = self.strategy
        sizes = [(name, getattr(s.mesh, name)) for name in ("replicate", "shard", "ep")]
        words = [f"{name}{size}" for name, size in sizes if size > 1] or ["one"]
        kept = "" if s.reshard_after_forward else "-kept"
        chunked = f"-{s.overlap}{s.overlap_chunks}" if s.overlap != "none" else ""
        plan = f"{'x'.join(words)}{kept}-{s.checkpointing}-b{s.micro_batch_sequences}{chunked}"
        return f"{self.model}-{self.layers}layers/{plan}/t{self.tokens}/{self.executor}"


MODELS = ("qwen3-30b", "kimi-linear-48b")
FULL_LAYERS = {"qwen3-30b": 48, "kimi-linear-48b": 27}
REHEARSED_TOKENS = 64


def step_settings(world: int, models: tuple[str, ...], rehearse: bool) -> list[Setting]:
    """At most six plans a model, mixed so that memory and time order them differently.

    Both sharded layouts at the micro-batch that a run would choose (kernels bound it) and at a small one (the host
    does), activations kept, and weights kept between passes.
    """
    found = []
    for model in models:
        layers = (2 if model == "qwen3-30b" else 4) if rehearse else FULL_LAYERS[model]
        tokens = REHEARSED_TOKENS if rehearse else 4096
        wide = Mesh(shard=2, ep=world // 2) if world >= 4 else Mesh(shard=world)
        plans = [
            ParallelStrategy(mesh=Mesh(ep=world), checkpointing="full", micro_batch_sequences=8),
            ParallelStrategy(mesh=wide, checkpointing="full", micro_batch_sequences=8),
            ParallelStrategy(mesh=Mesh(ep=world), checkpointing="full", micro_batch_sequences=2),
            ParallelStrategy(mesh=wide, checkpointing="full", micro_batch_sequences=4),
        ]
        if model == "qwen3-30b":
            kept = {"reshard_after_forward": False, "micro_batch_sequences": 4}
            plans += [
                ParallelStrategy(mesh=Mesh(ep=world), checkpointing="none", micro_batch_sequences=2),
                ParallelStrategy(mesh=Mesh(shard=world), checkpointing="full", **kept),
            ]
        executor = "eager" if rehearse else "fused"
        found += [Setting(model, layers, plan, tokens, executor) for plan in plans]
    return found


OVERLAP_SEQUENCES = 8


def overlap_settings(world: int, model: str, rehearse: bool) -> list[Setting]:
    """Expert parallelism over all ranks without overlap, and in four and eight pieces."""
    layers, tokens = (2, REHEARSED_TOKENS) if rehearse else (8, 4096)
    whole = ParallelStrategy(mesh=Mesh(ep=world), micro_batch_sequences=OVERLAP_SEQUENCES)
    plans = [whole]
    if runs("overlap", "chunked"):
        plans += [whole.model_copy(update={"overlap": "chunked", "overlap_chunks": pieces}) for pieces in (4, 8)]
    return [Setting(model, layers, plan, tokens, "eager" if rehearse else "fused") for plan in plans]


SCALING_SEQUENCES = 4


def scaling_worlds(devices: int) -> tuple[int, ...]:
    """1, 2, 4, … of this host's devices."""
    return tuple(1 << power for power in range(devices.bit_length()) if 1 << power <= devices)


def scaling_settings(world: int, model: str, rehearse: bool) -> list[Setting]:
    """The whole model on that many ranks, the same rows a rank, by FSDP and by EP."""
    layers, tokens = (2, REHEARSED_TOKENS) if rehearse else (FULL_LAYERS[model], 4096)
    found = [Mesh()] if world == 1 else [Mesh(shard=world), Mesh(ep=world)]
    executor = "eager" if rehearse else "fused"
    plans = [
        ParallelStrategy(mesh=mesh, checkpointing="full", micro_batch_sequences=SCALING_SEQUENCES) for mesh in found
    ]
    return [Setting(model, layers, plan, tokens, executor) for plan in plans]


def every_setting(devices: int) -> dict[str, Setting]:
    """Case → setting, of all whose steps are predicted on a host with that many devices."""
    scaled = [one for world in scaling_worlds(devices) for one in scaling_settings(world, MODELS[0], False)]
    return {one.case: one for one in (*scaled, *step_settings(devices, MODELS, False))}
