"""Every schema that is shipped as a JSON Schema, and how the files are written.

``python -m shardwright.schemas.registry`` rewrites ``schemas/json/*.schema.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from shardwright.schemas.approval import Approval
from shardwright.schemas.base import snake
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.files import write_atomic
from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.graph import OpGraph
from shardwright.schemas.ops import MeasuredTime, OpCost
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.run import RunRecord
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.schemas.tuned import TunedFile

SHIPPED: tuple[type[BaseModel], ...] = (
    AdaptationPlan,
    Approval,
    BenchLine,
    Calibration,
    CheckpointProfile,
    ClusterSpec,
    CostReport,
    FusionProposal,
    MeasuredTime,
    OpCost,
    OpGraph,
    ParallelStrategy,
    Policy,
    Recipe,
    RunRecord,
    TunedFile,
)

FOLDER = Path(__file__).parent / "json"


def schema_path(model: type[BaseModel]) -> Path:
    return FOLDER / f"{snake(model.__name__)}.schema.json"


def schema_text(model: type[BaseModel]) -> str:
    """The model's JSON Schema as it is shipped."""
    return json.dumps(model.model_json_schema(), indent=2, sort_keys=True) + "\n"


def main() -> None:
    for model in SHIPPED:
        write_atomic(schema_path(model), schema_text(model).encode())


if __name__ == "__main__":
    main()
