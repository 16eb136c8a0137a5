"""check: the workers' checks after load and after step 1 must be there and must have passed."""

from __future__ import annotations

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.run import RunRecord
from shardwright.workflows.context import AdaptState, Context, Output
from shardwright.workflows.runs import demand

NODE = "check"
REQUIRED = ("load", "step")


def run(context: Context, state: AdaptState) -> Output:
    """Pass only with evidence from every required stage.

    Raises:
        CheckFailed: a check failed, or a stage has none.
    """
    record = context.store.get(state["run"], RunRecord)
    demand(record.checks, REQUIRED, where=str(context.run_dir / "run.json"))
    return {"checked": sha256_of([check.model_dump(mode="json") for check in record.checks])}
