"""export: write the PEFT adapter and prove that a fresh PEFT loads it."""

from __future__ import annotations

from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.runs import demand, finish_record

NODE = "export"


def run(context: Context, state: AdaptState) -> Output:
    """Export, check the export, and complete ``run.json``.

    Raises:
        CheckFailed: the adapter does not reload, or gives other logits.
    """
    plan = context.plan(state["plan"])

    def compute() -> Output:
        facts = context.stages.export(context.run_dir, context.checkpoint)
        checks = context.stages.check_adapter(context.run_dir, context.checkpoint)
        record = finish_record(context.run_dir, plan, facts, checks)
        demand(record.checks, ("export",), where=facts.path)
        return {"adapter": facts.sha256, "record": context.store.put(record)}

    return context.once(NODE, {"plan": state["plan"], "run": state["run"]}, compute)
