"""A tiny model of a family, captured: what the agents' evaluations look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from families_row import _class_of as class_of
from families_tiny import tiny_config

FAMILIES = (
    *("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "phimoe", "minimax_m2"),
    *("granitemoe", "deepseek_v4", "kimi_linear", "hunyuan_v1_moe"),
)


@dataclass(frozen=True)
class Opened:
    """A family's tiny model on meta with its graphs, matches and facts."""

    model: Any
    pairs: Any
    matches: tuple[Any, ...]
    facts: Any
    profile: Any

    def places(self, match: Any) -> tuple[str, ...]:
        """Where a match computes: the module of its parameters, or the anchor, in every instance."""
        if match.parameters and match.pattern.name in ("rms_norm", "gated_rms_norm"):
            return tuple(sorted({name.rpartition(".")[0] for name in match.all_parameters()}))
        return match.modules()

    @cached_property
    def regions(self) -> tuple[Any, ...]:
        """All open regions."""
        from shardwright.agents.llm.open_regions import open_regions

        found: list[Any] = []
        for captured, canonical in self.pairs:
            if canonical is not None:
                own = (m.region.canonical_ids for m in self.matches if m.captured is captured)
                found += open_regions(captured, canonical, {i for ids in own for i in ids})
        return tuple(found)

    def advisor(self) -> Any:
        """The structure agent's tools, for one H200."""
        from shardwright.agents.llm.structure_advisor import StructureAdvisor
        from shardwright.agents.structure.rank import Target
        from shardwright.schemas.recipe import DataSpec, LoraSpec, PrecisionSpec, Recipe
        from shardwright.search_spaces.catalogue import load_cluster

        recipe = Recipe(
            data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
            lora=LoraSpec(targets=("attention",), rank=8),
            precision=PrecisionSpec(base="bfloat16"),
        )
        return StructureAdvisor(
            self.pairs, self.matches, self.facts, Target(load_cluster("h200-1"), self.profile, recipe)
        )


def opened(family: str, folder: Path, **widths: Any) -> Opened:
    """Write a tiny checkpoint of a family and capture it; with widths, a model of those sizes on meta."""
    import torch

    from shardwright.agents.structure.canonical import canonical_graphs
    from shardwright.agents.structure.capture import capture_model
    from shardwright.agents.structure.facts import observe
    from shardwright.agents.structure.propose import find_matches
    from shardwright.agents.structure.skeleton import find_layers
    from shardwright.checkpoints.build import build_on_meta
    from shardwright.checkpoints.profile import profile_checkpoint

    _write(family, folder, widths)
    profile = profile_checkpoint(folder)
    model = build_on_meta(folder, torch.bfloat16)
    path, layers = find_layers(model, profile.shape.num_layers)
    facts = observe(model, [f"{path}.{i}" for i in range(len(layers))], (), profile.tied_weights)
    pairs = canonical_graphs(capture_model(model, profile.layer_kinds, profile.shape.num_layers))
    return Opened(model, pairs, find_matches(pairs), facts, profile)


def _write(family: str, folder: Path, widths: dict[str, Any]) -> None:
    """A checkpoint whose values are whatever memory held: none is read."""
    import torch

    config = tiny_config(family)
    for name, value in widths.items():
        if not hasattr(config, name):
            raise ValueError(f"{family} has no {name}")
        setattr(config, name, value)
    with torch.device("meta"):
        model = class_of(family, folder)._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.save_pretrained(folder)
