"""What may stand in a prompt: numbers, and words of fixed vocabularies.

Nothing that somebody else wrote goes through: names of modules, parameters and files, chat templates, README and
config text. Regions, nodes, plans and axes go by names that we count out; an operator's name passes only where torch
itself knows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from shardwright.schemas.llm import WORDS

ALIAS = re.compile(r"^(region|node|plan|input|output|layer)-\d{1,5}$")
DTYPES = frozenset({"bfloat16", "float32", "float16", "float64", "int64", "int32", "bool", "float8_e4m3fn", "uint8"})
OWN_OPERATORS = frozenset({"cast", "reshape", "slice", "linear", "experts", "stale", "add_scaled", "getitem", "matmul"})
"""Operators of the canonical graph that torch calls otherwise."""

FACTS = frozenset(
    {
        *("memory", "compute", "communication", "launch", "imbalance", "input", "parameter", "op", "none", "full"),
        *("accepted", "refused", "legal", "illegal", "feasible", "infeasible", "yes", "no", "bytes", "flops"),
        *("replicate", "shard", "ep", "tp", "cp", "pp", "cuda", "cpu", "checkpointing", "micro_batch", "reshard"),
        *("prefetch", "offload", "overlap", "precision", "padding", "placement", "unknown", "other"),
    }
)
"""Words of our own that tool results use as values."""

OTHER = "other"
"""What stands in place of anything else."""


def operator_word(name: str) -> str:
    """An operator's name where torch or the canonical graph defines it."""
    return name if name in OWN_OPERATORS or hasattr(torch.ops.aten, name) else OTHER


def word(value: str, allowed: Iterable[str] = ()) -> str:
    """A text that may pass: an alias, a dtype, a word of ours, or one of those allowed here."""
    if ALIAS.match(value) or value in DTYPES or value in FACTS or value in frozenset(allowed):
        return value
    return OTHER


def facts_only(value: Any, allowed: Iterable[str] = ()) -> Any:
    """A tool's result with every text passed through ``word``; keys are our own field names."""
    if isinstance(value, str):
        return word(value, allowed)
    if isinstance(value, dict):
        return {key: facts_only(item, allowed) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts_only(item, allowed) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"a prompt cannot hold {type(value).__name__}")


def printable(text: str, limit: int = WORDS) -> str:
    """A model's text as it may stand in a plan: one line, printable, no control or direction marks, bounded."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    plain = re.sub("[\u202a-\u202e\u2066-\u2069\u200b-\u200f\ufeff]", "", plain)
    return " ".join(plain.split())[:limit]
