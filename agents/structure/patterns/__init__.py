"""The patterns, one file each; this table is the whole list."""

from __future__ import annotations

from shardwright.agents.structure.patterns.add_rms_norm import AddRmsNorm
from shardwright.agents.structure.patterns.base import Match, Pattern
from shardwright.agents.structure.patterns.experts import Experts
from shardwright.agents.structure.patterns.linear_cross_entropy import LinearCrossEntropy
from shardwright.agents.structure.patterns.rms_norm import RmsNorm
from shardwright.agents.structure.patterns.swiglu import SwiGlu

PATTERNS: tuple[Pattern, ...] = (RmsNorm(), AddRmsNorm(), SwiGlu(), Experts(), LinearCrossEntropy())
"""In the order in which proposals are shown."""

__all__ = ["PATTERNS", "Match", "Pattern"]
