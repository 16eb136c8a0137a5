"""What the user wants trained: LoRA, data, batch, optimizer, schedule, seeds.

Real numbers are decimal text: a recipe is part of the decision hash.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from shardwright.schemas.base import CountInt, DecimalText, Model, PositiveInt, added


class LoraSpec(Model):
    """Which parameters get adapters, and of what size.

    Targets are role names (``attention``, ``experts``, ``shared_experts``, ``dense_mlp``, ``head``,
    ``router``) or fnmatch patterns on module or parameter names (``*.self_attn.q_proj``,
    ``*.mlp.experts.gate_up_proj``). Every one must match something.
    """

    targets: tuple[str, ...] = ("attention", "experts")
    rank: PositiveInt = 16
    alpha: DecimalText = "32"
    use_rslora: bool = False
    dropout: DecimalText = "0"
    rank_pattern: dict[str, PositiveInt] = {}
    """fnmatch pattern → rank, where it differs from ``rank``."""
    init: Literal["kaiming"] = "kaiming"
    """A is Kaiming-uniform (a = √5), B is zero: PEFT's default."""
    allow_router: bool = False
    experts: Literal["per_expert", "shared"] = added("per_expert")
    """One pair for each expert of a stack, or one that all experts of a block share."""

    @model_validator(mode="after")
    def _sensible(self) -> LoraSpec:
        if float(self.alpha) <= 0:
            raise ValueError(f"alpha is above 0 (got {self.alpha}); the adapter is scaled by alpha / rank")
        if not 0 <= float(self.dropout) < 1:
            raise ValueError(f"dropout is a share from 0 to below 1 (got {self.dropout})")
        return self

    @field_validator("targets")
    @classmethod
    def _no_empty_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(not item.strip() for item in value):
            raise ValueError("name at least one target, for example attention")
        return value


class DataSpec(Model):
    """Training and held-out data.

    Paths are relative to the recipe file until it is loaded, and absolute or
    ``example://``-relative afterwards; contents are pinned by hash in the plan.
    """

    train: str
    held_out: str
    format: Literal["jsonl-text", "jsonl-messages", "parquet-text", "packed"] = "jsonl-text"
    text_field: str = "text"
    messages_field: str = added("messages")
    """Where a record of ``jsonl-messages`` keeps its list of {role, content}."""
    images_field: str = added("")
    """Where a record of JSON lines keeps its images, in the order in which the checkpoint's placeholder token stands in
    its text; empty: text alone. Records with images stay whole, as conversations do."""
    packing: bool = True
    """Texts are concatenated with an end-of-text token and cut into sequences; conversations stay whole and share a
    sequence while they fit. False: one document a sequence, padded; one that is too long is refused."""
    document_mask: bool = added(False)
    """Packed texts: no attention and no prediction across documents, positions start anew. Conversations always have
    it."""
    completion_only: bool = added(True)
    """Conversations: the loss counts the assistant's tokens alone."""

    @property
    def documents_share_rows(self) -> bool:
        """Whether a sequence may hold several documents that must not see each other."""
        return self.packing and (self.format == "jsonl-messages" or self.document_mask or bool(self.images_field))


class BatchSpec(Model):
    """How many tokens make one optimizer step."""

    sequence_tokens: PositiveInt = 512
    global_batch_sequences: PositiveInt = 8
    """Sequences in one optimizer step over all ranks; the plan splits it into micro-batches."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_tokens * self.global_batch_sequences


class OptimizerSpec(Model):
    """AdamW on the adapters."""

    name: Literal["adamw"] = "adamw"
    learning_rate: DecimalText = "0.0002"
    beta1: DecimalText = "0.9"
    beta2: DecimalText = "0.95"
    epsilon: DecimalText = "0.00000001"
    weight_decay: DecimalText = "0"
    max_grad_norm: DecimalText = "1"

    @model_validator(mode="after")
    def _sensible(self) -> OptimizerSpec:
        if float(self.learning_rate) <= 0 or float(self.epsilon) <= 0:
            raise ValueError(f"learning_rate and epsilon are above 0 (got {self.learning_rate} and {self.epsilon})")
        if not all(0 <= float(beta) < 1 for beta in (self.beta1, self.beta2)):
            raise ValueError(f"beta1 and beta2 are from 0 to below 1 (got {self.beta1} and {self.beta2})")
        if float(self.weight_decay) < 0 or float(self.max_grad_norm) < 0:
            raise ValueError(
                f"weight_decay and max_grad_norm are 0 or more (got {self.weight_decay} and {self.max_grad_norm})"
            )
        return self


class ScheduleSpec(Model):
    """Learning-rate schedule and length of the run."""

    steps: PositiveInt = 20
    warmup_steps: CountInt = 0
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    final_fraction: DecimalText = "0.1"
    evaluate_every_steps: CountInt = 0
    """0: only before the first and after the last step."""
    held_out_sequences: PositiveInt = 8
    save_every_steps: CountInt = 0
    """0: only after the last step."""
    early_stop_evaluations: CountInt = added(0)
    """The run ends after this many evaluations in a row without a lower held-out loss; 0: never."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> ScheduleSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError("warmup_steps must be smaller than steps")
        return self

    @model_validator(mode="after")
    def _decays(self) -> ScheduleSpec:
        if not 0 <= float(self.final_fraction) <= 1:
            raise ValueError(f"final_fraction is a share from 0 to 1 of the learning rate (got {self.final_fraction})")
        return self

    @model_validator(mode="after")
    def _early_stop_looks(self) -> ScheduleSpec:
        if self.early_stop_evaluations and not self.evaluate_every_steps:
            raise ValueError("early_stop_evaluations needs evaluate_every_steps")
        return self


class BalanceSpec(Model):
    """Losses that even out the experts' loads. Their value depends on no mesh; ``auxiliary`` depends on the plan's
    micro-batch, over which it is taken."""

    auxiliary: DecimalText = "0"
    """Coefficient of the Switch loss over each micro-batch; 0: none."""
    sequence: DecimalText = "0"
    """Coefficient of the same loss over each sequence; 0: none."""
    target_load: DecimalText = "0"
    """Above 1: a layer's coefficients are multiplied by its measured excess load over this one's (hottest expert over
    mean), between 0 and 4; 0: they stay."""
    bias: Literal["frozen", "sign", "quantile"] = added("frozen")
    """What happens to the biases that pick experts (no gradient, fp32), once a step, from the loads over all ranks.
    ``frozen``: nothing. ``sign``: ``bias_rate`` up or down, against the load. ``quantile``: to where the step's tokens
    would have been shared evenly. A moved bias is part of the result, and exported with the adapter."""
    bias_rate: DecimalText = added("0.001")
    """Step of ``sign``; ``quantile`` has none."""

    @property
    def active(self) -> bool:
        """Whether a loss is added."""
        return float(self.auxiliary) > 0 or float(self.sequence) > 0

    @model_validator(mode="after")
    def _sensible(self) -> BalanceSpec:
        if float(self.auxiliary) < 0 or float(self.sequence) < 0:
            raise ValueError("balancing coefficients are 0 or more")
        if float(self.target_load) != 0 and float(self.target_load) <= 1:
            raise ValueError("target_load is above 1, the load of even experts, or 0")
        if not 0 < float(self.bias_rate) <= 1:
            raise ValueError("bias_rate is above 0 and at most 1")
        return self


class IndexerSpec(Model):
    """How the indexers of sparse attention learn, where adapters lie on them (``*.indexer.wq_b``, …), and choose."""

    loss: DecimalText = "0"
    """Coefficient of KL(attention ‖ softmax(indexer's scores)) over the selected keys: the mean over the step's tokens,
    summed over the layers that have an indexer. Its inputs and its target are detached, so nothing else learns from it.
    0: indexers are frozen."""
    stage: Literal["sparse", "dense"] = added("sparse")
    """``dense``, the warm-up of an indexer that does not know its attention yet: layers attend to all keys, and the
    loss is over all of them."""
    scores: Literal["exact", "fp8"] = added("exact")
    """``fp8``: queries and keys of the indexer are rounded to e4m3, with a scale for each head of a query and for each
    key, before they are scored. Which keys are selected is then an approximation; the loss keeps exact scores."""
    attention: Literal["selected", "faster"] = added("selected")
    """``faster``: rows longer than the selection attend to all their keys where that takes less time by measurement.
    Another function than the selection's, for models and data on which both were shown to agree."""

    @model_validator(mode="after")
    def _sensible(self) -> IndexerSpec:
        if float(self.loss) < 0:
            raise ValueError("indexer.loss is 0 or more")
        if self.stage == "dense" and float(self.loss) == 0:
            raise ValueError("indexer.stage dense is a way to learn: set indexer.loss above 0")
        if self.stage == "dense" and self.scores != "exact":
            raise ValueError("indexer.stage dense selects no keys: leave indexer.scores out")
        if self.attention == "faster" and float(self.loss) > 0:
            raise ValueError("an indexer learns from what it selects: indexer.attention faster needs indexer.loss 0")
        return self


class SeedSpec(Model):
    """Named seeds; nothing else is random."""

    lora: CountInt = 0
    data: CountInt = 0
    search: CountInt = 0


class PrecisionSpec(Model):
    """Number formats of the run."""

    base: Literal["float32", "bfloat16"] = "bfloat16"
    """Format of frozen weights and of computation."""
    adapter: Literal["float32", "bfloat16"] = "float32"
    """Format of adapter parameters; they are cast to ``base`` for computation."""
    reduce: Literal["float32", "bfloat16"] = "float32"


class Recipe(Model):
    """Everything a user decides about training, independent of the cluster."""

    schema_version: Literal[1] = 1
    name: str = Field(default="recipe", max_length=100)
    lora: LoraSpec = LoraSpec()
    data: DataSpec
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    precision: PrecisionSpec = PrecisionSpec()
    seeds: SeedSpec = SeedSpec()
    balance: BalanceSpec = added(BalanceSpec())
    indexer: IndexerSpec = added(IndexerSpec())
    prompt: str = "def "
    """The held-out prompt that ``shardwright generate`` answers by default."""
