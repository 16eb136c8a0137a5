"""Linear-attention layers as the plan's operators on a mesh: ``delta_layer.py JOBS.json``, checks as ``families.py``.

The operators' plain references stand in: in place of them are other checks, in Triton's interpreter.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import families

from shardwright.kernels.registry import OPERATORS

PLAIN = {
    "kda": "kda.reference:kda_recurrent_reference",
    "gated_delta": "gated_delta.reference:gated_delta_recurrent_reference",
    "short_conv": "short_conv.reference:short_conv_reference",
    "gated_rms_norm": "gated_rms_norm.reference:gated_rms_norm_reference",
}
CALLED: Counter[str] = Counter()


def counted(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **settings: Any) -> Any:
        CALLED[op] += 1
        return function(*given, **settings)

    return run


def stand_in() -> None:
    for op, path in PLAIN.items():
        OPERATORS[op] = replace(OPERATORS[op], op_path=path)
        place, _, name = path.partition(":")
        home = import_module(f"shardwright.kernels.{place}")
        setattr(home, name, counted(op, getattr(home, name)))


def check(name: str, plan: Any, folder: Path, ranks: Any) -> str:
    CALLED.clear()
    line = plain_check(name, plan, folder, ranks)
    (fusion,) = plan.decision.fusions
    planned = {fusion.op, *fusion.beside}
    calls = families.SEQUENCES // ranks.world * len(fusion.modules)
    assert all(CALLED[op] >= calls for op in planned), (CALLED, calls)
    return f"{line} operators {' '.join(sorted(planned))}"


plain_check = families.check
families.check = check

if __name__ == "__main__":
    stand_in()
    families.main()
