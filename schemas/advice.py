"""What a language model's part in a run came to, as it passes from the agents to the plan."""

from __future__ import annotations

from shardwright.schemas.base import Model
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.llm import LlmRecord
from shardwright.schemas.strategy import ParallelStrategy


class LlmAdvice(Model):
    """Suggestions that passed every gate, and the record of all of them."""

    proposals: tuple[FusionProposal, ...] = ()
    """Certified like those of the rules; chosen by the same rules."""
    starts: tuple[ParallelStrategy, ...] = ()
    """Legal plans that the study starts from, beside its own."""
    record: LlmRecord
