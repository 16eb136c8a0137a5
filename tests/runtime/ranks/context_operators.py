"""Delta-rule layers as the plan's operators on cut sequences: ``context_operators.py JOBS.json``.

The operators' plain references stand in, as in ``delta_layer.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import context
import delta_layer


def with_states(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The references always give the states after; the operators where they are asked to."""

    def run(*given: Any, output_final_state: bool = False, **settings: Any) -> Any:
        return counted(op, function)(*given, **settings)

    return run


def check(name: str, plan: Any, folder: Path, ranks: Any) -> str:
    delta_layer.CALLED.clear()
    line = plain_check(name, plan, folder, ranks)
    (fusion,) = plan.decision.fusions
    for op in (fusion.op, *fusion.beside):
        assert delta_layer.CALLED[op] > 0, (op, delta_layer.CALLED)
    return f"{line} operators"


counted = delta_layer.counted
delta_layer.counted = with_states
plain_check = context.check
context.check = check
context.KINDS = ("documents",)

if __name__ == "__main__":
    delta_layer.stand_in()
    context.main()
