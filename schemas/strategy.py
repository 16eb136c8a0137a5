"""How the model is spread over the ranks. Mesh axes: replicate, shard, ep, tp, cp, pp."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.schemas.base import CountInt, Model, PositiveInt, added

Degree = Annotated[int, Field(ge=1, le=2**20)]
"""Ranks along one axis; bounded, because rules count through what they are given."""


ExpertSlots = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)(,(0|[1-9][0-9]*))*$")]
"""Experts by place, as ``3,0,1,2``: one line of a plan for one layer."""


class Mesh(Model):
    """Degrees of parallelism; their product is the world size.

    ``shard`` is the FSDP degree of expert weights; all other weights are sharded over
    ``shard × ep``. Every rank of ``replicate × shard × ep`` reads its own data.
    """

    replicate: Degree = 1
    shard: Degree = 1
    ep: Degree = 1
    tp: Degree = 1
    cp: Degree = 1
    pp: Degree = 1
    expert_tp: Degree = added(1)
    """Ranks that share the width of one expert; part of ``shard × tp × cp``, so no factor of the world.
    What is left of these shards expert weights."""

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
        parts += [f"{n}{v}" for n, v in self._further() if v > 1]
        return "·".join(parts)

    def _further(self) -> tuple[tuple[str, int], ...]:
        return ("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("etp", self.expert_tp)


class ParallelStrategy(Model):
    """One complete choice on every axis."""

    mesh: Mesh
    micro_batch_sequences: PositiveInt = 1
    accumulation_steps: PositiveInt = 1
    checkpointing: Literal["none", "full", "layers"] = "none"
    """``layers``: those of ``checkpointed_layers`` are recomputed in backward."""
    checkpointed_layers: tuple[CountInt, ...] = added(())
    reshard_after_forward: bool = True
    reshard_scope: Literal["all", "node"] = added("all")
    """``node``: after forward weights stay spread over the ranks of a node, so backward gathers inside it."""
    prefetch_depth: CountInt = 1
    expert_padding_tokens: PositiveInt = 1
    """Rows of each local expert are padded to a multiple of this; 1 = no padding."""
    overlap: Literal["none", "chunked", "shared"] = "none"
    """What runs while routed rows travel: nothing, another piece's experts, or the layer's shared expert; with
    ``shared`` and ``overlap_chunks`` above 1 both do."""
    overlap_chunks: PositiveInt = added(1)
    """Pieces of a micro-batch's rows, of which one is exchanged while another is computed."""
    dispatch: Literal["all_to_all", "hierarchical"] = added("all_to_all")
    """``hierarchical``: a row goes to a node once, whatever the number of its experts there."""
    offload: Literal["none", "adapter_optimizer", "activations", "frozen_experts"] = "none"
    """What lives in host memory between uses."""
    base_format: Literal["compute", "fp8", "mxfp4", "int4"] = added("compute")
    """Format of frozen weights in device memory: the recipe's, or the packed one of the files."""
    expert_placement: Literal["contiguous", "balanced"] = "contiguous"
    """``contiguous``: expert ``e`` lives on EP rank ``e // (E / ep)``. ``balanced``: by measured loads."""
    redundant_experts: CountInt = added(0)
    """Copies of the most loaded experts that each EP rank holds beside its own."""
    expert_slots: tuple[ExpertSlots, ...] = added(())
    """For each MoE layer, in the model's order, the expert in each place; EP rank r holds the r-th equal run of them.
    Given exactly where experts are placed by measured loads, in a plan that is to run."""

    @model_validator(mode="after")
    def _one_gather_rule(self) -> ParallelStrategy:
        if self.prefetch_depth > 8:
            raise ValueError("prefetch_depth above 8 gathers more than it hides")
        if (self.checkpointing == "layers") != bool(self.checkpointed_layers):
            raise ValueError("checkpointed_layers are named exactly when checkpointing is layers")
        if self.checkpointed_layers != tuple(sorted(set(self.checkpointed_layers))):
            raise ValueError("checkpointed_layers are ascending, each once")
        if self.overlap != "shared" and (self.overlap == "chunked") != (self.overlap_chunks > 1):
            raise ValueError("overlap_chunks is above 1 when overlap is chunked, and 1 when nothing overlaps")
        if self.expert_slots and self.expert_placement != "balanced":
            raise ValueError("expert_slots are given only where expert_placement is balanced")
        return self

    def global_batch_sequences(self) -> int:
        return self.mesh.data_ranks * self.micro_batch_sequences * self.accumulation_steps

    def text(self) -> str:
        """A short label: mesh, micro-batch, checkpointing, and whatever differs from the defaults."""
        words = [self.mesh.text(), f"mb{self.micro_batch_sequences}×{self.accumulation_steps}"]
        some = f"ckpt-{len(self.checkpointed_layers)}-layers"
        words.append({"full": "ckpt", "none": "no-ckpt", "layers": some}[self.checkpointing])
        kept = "node-reshard" if self.reshard_scope == "node" else "reshard"
        words.append(kept if self.reshard_after_forward else "keep")
        words += [f"prefetch{self.prefetch_depth}"] if self.prefetch_depth != 1 else []
        words += [f"pad{self.expert_padding_tokens}"] if self.expert_padding_tokens > 1 else []
        words += [f"chunks{self.overlap_chunks}"] if self.overlap_chunks > 1 else []
        words += ["shared-under-dispatch"] if self.overlap == "shared" else []
        words += ["hierarchical"] if self.dispatch == "hierarchical" else []
        words += [f"offload-{self.offload}"] if self.offload != "none" else []
        words += [self.base_format] if self.base_format != "compute" else []
        words += ["balanced"] if self.expert_placement == "balanced" else []
        words += [f"redundant{self.redundant_experts}"] if self.redundant_experts else []
        return " ".join(words)
