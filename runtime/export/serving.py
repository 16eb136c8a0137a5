"""The rules by which serving engines take an adapter, as far as they are published; no engine is started here.

From vLLM's loader (``vllm/lora``): a key is ``base_model.model.``, the module, then ``.lora_A.weight`` or
``.lora_B.weight``; an expert's module ends in ``experts.N.PROJECTION`` and every expert of an adapted layer has all its
projections; scaling is one number for the whole adapter (``rank_pattern`` and ``alpha_pattern`` are not read);
``modules_to_save`` is refused. From SGLang's (``sglang/srt/lora``): ``gate_proj`` and ``up_proj`` are merged, so they
come in pairs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<half>[AB])\.weight")
EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<index>\d+)\.(?P<projection>\w+)")
PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))
CHECKED = "names checked against the published loading rules of vLLM and SGLang; neither engine was started"


def problems(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, gated: bool = True) -> list[str]:
    """What an engine would refuse or silently drop; empty for an adapter that follows the rules.

    Args:
        shapes: key → shape of ``adapter_model.safetensors``.
        config: ``adapter_config.json``.
        gated: whether the family's MLPs have a gate beside the up projection.
    """
    found = [f"{key}: not a name that engines read" for key in shapes if KEY.fullmatch(key) is None]
    found += [f"{key}: base_layer weights do not belong into an adapter" for key in shapes if "base_layer" in key]
    found += [f"{key}: an empty tensor" for key, shape in shapes.items() if 0 in shape]
    if config.get("modules_to_save"):
        found.append(f"modules_to_save is {config['modules_to_save']}: vLLM refuses it")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        found.append("rank_pattern or alpha_pattern is set: engines use one scaling for all modules")
    halves: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for key, shape in shapes.items():
        if (match := KEY.fullmatch(key)) is not None:
            halves[match["module"]][match["half"]] = shape
    for module, pair in halves.items():
        if set(pair) != {"A", "B"}:
            found.append(f"{module}: lora_{'B' if 'A' in pair else 'A'} is missing")
        elif pair["A"][0] != config["r"] or pair["B"][1] != config["r"]:
            found.append(f"{module}: rank {pair['A'][0]} and {pair['B'][1]}, adapter_config.json says {config['r']}")
    return found + _incomplete_experts(halves) + (_unpaired(halves) if gated else [])


def _incomplete_experts(halves: Mapping[str, Any]) -> list[str]:
    layers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for module in halves:
        if (match := EXPERT.fullmatch(module)) is not None:
            layers[match["layer"]][match["projection"]].add(int(match["index"]))
    found = []
    for layer, projections in layers.items():
        everyone = set(range(1 + max(index for indices in projections.values() for index in indices)))
        for projection, indices in projections.items():
            if missing := sorted(everyone - indices):
                found.append(f"{layer}: {projection} of experts {missing[:5]} is missing")
    return found


def _unpaired(halves: Mapping[str, Any]) -> list[str]:
    found = []
    for module in halves:
        stem, _, last = module.rpartition(".")
        for first, second in PAIRS:
            other = {first: second, second: first}.get(last)
            if other is not None and f"{stem}.{other}" not in halves:
                found.append(f"{module}: its partner {other} is not adapted, engines merge the two")
    return found


def recipe(checkpoint: Path, folder: Path, rank: int, name: str = "adapter") -> tuple[str, ...]:
    """Commands that serve the base with this adapter."""
    fits = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
    return (
        f"vllm serve {checkpoint} --enable-lora --max-lora-rank {fits} --lora-modules {name}={folder}",
        f"python -m sglang.launch_server --model-path {checkpoint} --enable-lora --max-lora-rank {fits} "
        f"--lora-paths {name}={folder}",
    )
