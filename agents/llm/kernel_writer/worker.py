"""In the sandbox: load a candidate, run it on given inputs, write what it gives. It never sees an expected value.

Inputs and outputs are files of tensors, ``case-N.pt`` in and ``result-N.pt`` out, so judging is done outside. All empty
memory is NaN; every Triton launch is counted; outputs are kept from calls that were not announced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TIMED_CALLS = 25


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    launches = count_launches(device)
    poison_empty()
    candidate = load(folder / "candidate.py")
    for path in sorted(folder.glob("case-*.pt")):
        case = torch.load(path, map_location=device, weights_only=True)
        result = call(candidate, case, launches)
        torch.save(result, path.with_name(path.name.replace("case", "result")))
    if device == "cuda":
        (folder / "times.json").write_text(json.dumps(times(candidate, folder, device)))


def load(path: Path) -> ModuleType:
    """The candidate as a module."""
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(candidate: ModuleType, case: dict[str, Any], launches: list[int]) -> dict[str, Any]:
    """Outputs, gradients, whether inputs stayed as they were, and how many kernels each pass launched."""
    inputs, cotangents = case["inputs"], case["cotangents"]
    before = [value.clone() for value in (*inputs, *cotangents)]
    launches[0] = 0
    outputs = tuple(candidate.forward(*inputs))
    forward = launches[0]
    gradients = tuple(candidate.backward(*inputs, *cotangents))
    untouched = all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(before, (*inputs, *cotangents), strict=True)
    )
    aliased = {o.data_ptr() for o in (*outputs, *gradients) if o.numel()} & {i.data_ptr() for i in inputs if i.numel()}
    return {
        "outputs": [value.detach().cpu() for value in outputs],
        "gradients": [value.detach().cpu() for value in gradients],
        "untouched": untouched and not aliased,
        "launches": [forward, launches[0] - forward],
    }


def times(candidate: ModuleType, folder: Path, device: str) -> dict[str, float]:
    """Median milliseconds of both passes on the last case, each call on inputs that were changed since."""
    case = torch.load(sorted(folder.glob("case-*.pt"))[-1], map_location=device, weights_only=True)
    inputs, cotangents = case["inputs"], case["cotangents"]

    def both() -> None:
        candidate.forward(*inputs)
        candidate.backward(*inputs, *cotangents)

    return {"ms": median_ms(both, lambda: [value.mul_(1.0009765625) for value in inputs if value.is_floating_point()])}


def median_ms(work: Callable[[], Any], between: Callable[[], Any], calls: int = TIMED_CALLS) -> float:
    """Median time of ``work`` on the device, with ``between`` outside of what is timed."""
    found = []
    for at in range(calls + 5):
        between()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if at >= 5:
            found.append(start.elapsed_time(stop))
    return sorted(found)[len(found) // 2]


def poison_empty() -> None:
    """Let every way to make empty memory give NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        made = getattr(owner, name)

        def filled(*args: Any, _made: Any = made, **kwargs: Any) -> torch.Tensor:
            value: torch.Tensor = _made(*args, **kwargs)
            return (
                value.fill_(float("nan"))
                if value.is_floating_point()
                else value.fill_(-1 if value.dtype != torch.bool else 1)
            )

        setattr(owner, name, filled)


def count_launches(device: str) -> list[int]:
    """A counter of Triton launches."""
    counter = [0]
    if device == "cpu":
        from shardwright.kernels.interpreter import install

        install()
        import triton.runtime.interpreter as machine

        run = machine.GridExecutor.__call__

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            counter[0] += 1
            return run(self, *args, **kwargs)

        machine.GridExecutor.__call__ = counted
    else:
        import triton

        launch = triton.JITFunction.run

        def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
            counter[0] += 1
            return launch(self, *args, **kwargs)

        triton.JITFunction.run = launched
    return counter


if __name__ == "__main__":
    main()
