"""How the model is spread over the ranks. Mesh axes: replicate, shard, ep, tp, cp, pp."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from shardwright.schemas.base import CountInt, Model, PositiveInt


class Mesh(Model):
    """Degrees of parallelism; their product is the world size.

    ``shard`` is the FSDP degree of expert weights; all other weights are sharded over
    ``shard × ep``. Every rank of ``replicate × shard × ep`` reads its own data.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    ep: PositiveInt = 1
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.ep * self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self.replicate * self.shard * self.ep

    def text(self) -> str:
        """``replicate1·shard2·ep1`` with degrees of one left out beyond the first three."""
        parts = [f"replicate{self.replicate}", f"shard{self.shard}", f"ep{self.ep}"]
        parts += [f"{n}{v}" for n, v in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp)) if v > 1]
        return "·".join(parts)


class ParallelStrategy(Model):
    """One complete choice on every axis."""

    mesh: Mesh
    micro_batch_sequences: PositiveInt = 1
    accumulation_steps: PositiveInt = 1
    checkpointing: Literal["none", "full"] = "none"
    reshard_after_forward: bool = True
    prefetch_depth: CountInt = 1
    expert_padding_tokens: PositiveInt = 1
    """Rows of each local expert are padded to a multiple of this; 1 = no padding."""
    overlap: Literal["none", "chunked"] = "none"
    offload: Literal["none", "adapter_optimizer"] = "none"
    expert_placement: Literal["contiguous"] = "contiguous"
    """Expert ``e`` lives on EP rank ``e // (E / ep)``."""

    @model_validator(mode="after")
    def _one_gather_rule(self) -> ParallelStrategy:
        if self.prefetch_depth > 8:
            raise ValueError("prefetch_depth above 8 gathers more than it hides")
        return self

    def global_batch_sequences(self) -> int:
        return self.mesh.data_ranks * self.micro_batch_sequences * self.accumulation_steps

    def text(self) -> str:
        """A short label: mesh, micro-batch, checkpointing."""
        words = [self.mesh.text(), f"mb{self.micro_batch_sequences}×{self.accumulation_steps}"]
        words.append("ckpt" if self.checkpointing == "full" else "no-ckpt")
        words.append("reshard" if self.reshard_after_forward else "keep")
        return " ".join(words)
