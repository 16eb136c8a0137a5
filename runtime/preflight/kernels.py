"""Kernels that a plan installs, compiled before the run: one process a machine fills Triton's cache for its ranks."""

from __future__ import annotations

import os

from shardwright.runtime.device import Device
from shardwright.schemas.errors import KernelError
from shardwright.schemas.plan import AdaptationPlan


def unbuilt(plan: AdaptationPlan, device: Device) -> tuple[str, ...]:
    """What of the plan's operators does not compile on this machine, with the reason; on a CPU none is compiled.

    The first rank of a machine compiles, at every configuration that ships or was tuned; the others find nothing and
    meet it again where findings are gathered.
    """
    fusions = [one for one in plan.decision.fusions if one.provider == "shardwright" and not one.rejected]
    ops = sorted({op for one in fusions for op in (one.op, *one.beside)})
    if device.kind != "cuda" or not ops or os.environ.get("LOCAL_RANK", "0") != "0":
        return ()
    try:
        import triton  # noqa: F401
    except ImportError:
        return (f"no Triton for {', '.join(ops)}",)
    from shardwright.kernels.prebuild import prebuild

    found = []
    for op in ops:
        try:
            prebuild((op,))
        except KernelError as error:
            found.append(f"{op}: {error.what}")
    return tuple(found)
