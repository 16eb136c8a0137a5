"""What a report says about what a run leaves behind: its checks, the adapter, who approved it, where it ran."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from shardwright.checkpoints.models.registry import OWN_MODELS
from shardwright.schemas.approval import Approval
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import CheckStage, RunRecord
from shardwright.schemas.words import plural
from shardwright.workflows.report.blocks import Block, Code, Document, Heading, Table, Text
from shardwright.workflows.report.units import count, size

STAGES = get_args(CheckStage)
FEW = 6
"""Proposals that are named one by one; more are counted by kind."""


def check_section(record: RunRecord) -> Document:
    """Every check with what was seen, in the order of a run's stages."""
    rows = tuple(
        (c.stage, c.name, "✓ passed" if c.passed else "✗ failed", c.scope.replace("_", " "), c.evidence)
        for c in sorted(record.checks, key=lambda check: STAGES.index(check.stage))
    )
    return (Heading("Checks"), Table(("after", "check", "result", "scope", "evidence"), rows, prose=4))


def preflight_section(record: RunRecord) -> Document:
    """What the machines were like before the run; nothing where no preflight was asked for."""
    if not record.preflight:
        return ()
    rows = tuple(
        (one.name, "✓ passed" if one.passed else "✗ failed", one.where, one.evidence) for one in record.preflight
    )
    return (Heading("Preflight"), Table(("test", "result", "where", "evidence"), rows, prose=3))


def ways_section(record: RunRecord) -> Document:
    """Which way operators with several ran, beside what the plan said; nothing where none is installed."""
    if not record.ways:
        return ()
    rows = tuple(
        (one.op, str(len(one.modules)), count(one.row_tokens), one.path, f"{one.reason}. Planned: {one.planned}")
        for one in record.ways
    )
    return (
        Heading("Ways taken"),
        Table(("operator", "modules", "tokens a row", "ran", "because"), rows, numeric=(1, 2), prose=4),
    )


def adapter_section(plan: AdaptationPlan, record: RunRecord) -> Document:
    adapter = record.adapter
    if adapter is None:
        return (Heading("Adapter"), Text("Nothing was exported."))
    return (
        Heading("Adapter"),
        Table(
            ("", ""),
            (
                ("path", f"`{adapter.path}`"),
                ("content", f"{plural(adapter.tensors, 'tensor')}, {size(adapter.bytes)}, {adapter.format}"),
                ("sha256", f"`{adapter.sha256}`"),
            ),
        ),
        *_loading(plan),
        Code(f"shardwright generate CHECKPOINT --adapter ADAPTER --prompt {plan.decision.recipe.prompt!r}", "sh"),
    )


def _loading(plan: AdaptationPlan) -> Document:
    """How to load the adapter by transformers and PEFT alone, where transformers has the model's class."""
    if any(one.model_path.endswith(f":{plan.decision.architecture}") for one in OWN_MODELS.values()):
        words = "The model's class is this program's own. See both answers to a prompt; `CHECKPOINT` is the"
        return (Text(f"{words} checkpoint's folder, `ADAPTER` the path above:"),)
    load = (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        'base = AutoModelForCausalLM.from_pretrained("CHECKPOINT")\n'
        'model = PeftModel.from_pretrained(base, "ADAPTER")'
    )
    return (
        Text("Load it with PEFT; `CHECKPOINT` is the checkpoint's folder, `ADAPTER` the path above:"),
        Code(load, "python"),
        Text("Or see both answers to a prompt:"),
    )


def approval_section(approval: Approval | None) -> Document:
    if approval is None:
        return ()
    rows = [("by", f"{approval.actor} ({approval.actor_kind})")]
    if approval.policy_sha256 is not None:
        rows.append(("policy", f"`{approval.policy_sha256}`"))
    if approval.reason:
        rows.append(("reason", approval.reason))
    rows.append(("fusions decided", _decided([verdict.proposal_id for verdict in approval.proposals])))
    return (Heading("Approval"), Table(("", ""), tuple(rows)))


def _decided(ids: list[str]) -> str:
    if len(ids) <= FEW:
        return ", ".join(f"`{one}`" for one in ids) or "none"
    kinds = Counter(one.partition(":")[0] for one in ids)
    return f"{len(ids)}: " + ", ".join(f"{number}\u00a0×\u00a0`{kind}`" for kind, number in sorted(kinds.items()))


def load_section(record: RunRecord) -> Document:
    versions = ", ".join(f"{k} {v}" for k, v in sorted(record.versions.items()))
    rows = [("device", record.device), ("ranks", str(record.world_size)), ("versions", versions)]
    if record.load is not None:
        read = f"{size(record.load.bytes_read)} in {record.load.seconds:.3g} s, {count(record.load.tensors)} tensors"
        by = f"{plural(record.load.readers, 'reading thread')} a rank, buffers of {size(record.load.staging_bytes)}"
        ahead = f", {by}" if record.load.readers else ""
        rows.append(("weights read", f"{read}{ahead}, peak host memory {size(record.load.peak_host_bytes)}"))
    blocks: list[Block] = [Heading("The run"), Table(("", ""), tuple(rows))]
    loads = tuple(
        (
            load.layer,
            f"{max(load.tokens) / (sum(load.tokens) / len(load.tokens)):.2f}",
            ", ".join(f"{n:,}" for n in load.tokens[:64]),
        )
        for load in record.expert_loads
        if load.tokens and sum(load.tokens)
    )
    if loads:
        blocks.append(
            Table(
                ("layer", "largest ÷ mean", "tokens of each expert"),
                loads,
                numeric=(1,),
                caption="Load of the experts",
                folded=True,
            )
        )
    return tuple(blocks)
