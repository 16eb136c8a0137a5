"""execute: hand the approved plan to the launcher. The runtime itself goes on from its last saved step."""

from __future__ import annotations

from shardwright.schemas.errors import ExitCode
from shardwright.workflows.checkpoint_folders import demand_weights
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.runs import failed_launch, read_run

NODE = "execute"


def run(context: Context, state: AdaptState) -> Output:
    """Train, unless the run folder already holds this plan's finished training.

    Raises:
        CheckpointError: ``headers-only``: the plan was made from headers alone.
        StalePlanError: the world is not the one planned for; the field is named.
        CheckFailed, RunError: as the workers report.
        KeyboardInterrupt: the launcher was interrupted and has ended its workers.
    """
    plan = context.plan(state["plan"])

    def compute() -> Output:
        record = read_run(context.run_dir, plan)
        if record is None or record.status not in ("trained", "exported"):
            demand_weights(context.checkpoint)
            context.stages.verify(plan, context.checkpoint, context.data_root)
            if context.plan_file.read_bytes() != plan.to_bytes():
                plan.save(context.plan_file)  # an edit after the approval is not what runs
            status = context.stages.launch(
                context.plan_file, context.checkpoint, context.data_root, context.approvals, context.run_dir
            )
            if status == ExitCode.INTERRUPTED:
                raise KeyboardInterrupt
            record = read_run(context.run_dir, plan)
            if status != ExitCode.OK or record is None or record.status not in ("trained", "exported"):
                raise failed_launch(status, context.run_dir, record)
        return {"run": context.store.put(record)}

    return context.once(NODE, {"plan": state["plan"], "approval": state["approval"]}, compute)
