"""The verifier itself: it must catch operators that are subtly wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="suites name triton kernels")

from shardwright.kernels import suite as command
from shardwright.kernels import verify_jobs
from shardwright.kernels.bench import keep_line
from shardwright.kernels.cases import OpSuite
from shardwright.kernels.floors import Ceilings, floor_of
from shardwright.kernels.registry import operator
from shardwright.kernels.suite import bench_table, main, verify_table
from shardwright.kernels.verify import VerifyResult, poisoned_memory, verify_case, verify_repeats
from shardwright.kernels.verify_jobs import (
    FAR,
    REST,
    Part,
    broken,
    default_jobs,
    parts,
    verify_in_jobs,
    verify_parts,
)
from shardwright.schemas.bench import BenchLine
from shardwright.schemas.errors import KernelError

SHAPE = {"T": 64, "H": 96}
EPS = 1e-6


def suite(fused: Callable[..., tuple[Tensor, ...]]) -> OpSuite:
    return replace(operator("rms_norm").load_suite(), fused=fused)


def right(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return operator("rms_norm").load_suite().reference(x, weight)


def rounded_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Statistics in the input's dtype: the classic mistake."""
    return (weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),)


def forgotten_row(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(x)
    y[:-1] = right(x, weight)[0][:-1]
    return (y,)


def wide_product(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (right(x, weight)[0].float(),)


def no_weight_gradient(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (right(x, weight.detach())[0] + 0 * weight,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_passes(dtype: torch.dtype) -> None:
    assert all(r.ok for r in verify_case(suite(right), SHAPE, dtype, "cpu"))


@pytest.mark.parametrize(
    ("fused", "value", "dtype"),
    [
        (rounded_twice, "y", torch.bfloat16),
        (forgotten_row, "y", torch.bfloat16),
        (forgotten_row, "y", torch.float32),
        (wide_product, "y", torch.bfloat16),
        (no_weight_gradient, "dweight", torch.float32),
    ],
)
def test_a_wrong_operator_is_caught(fused: Callable[..., tuple[Tensor, ...]], value: str, dtype: torch.dtype) -> None:
    results = verify_case(suite(fused), SHAPE, dtype, "cpu")
    assert value in [r.value for r in results if not r.ok]
    assert "WRONG" in verify_table(results)


def test_changing_bits_are_caught() -> None:
    count = iter(range(100))

    def drifting(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (right(x, weight)[0] * (1 + 1e-3 * next(count)),)

    assert not verify_repeats(suite(drifting), SHAPE, torch.float32, "cpu").ok
    assert verify_repeats(suite(right), SHAPE, torch.float32, "cpu").ok


def test_poison_is_taken_away_again() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert bool(torch.empty(100).isnan().all())
    assert torch.are_deterministic_algorithms_enabled() == before


def routed(x: Tensor, scale: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """An operator with indices in and out, a scalar, and a base that gets no gradient."""
    rows = x[ids] * scale.detach()
    return rows, ids + 1, rows.square().mean()


def routed_suite(fused: Callable[..., tuple[Tensor, ...]], **changes: object) -> OpSuite:
    def inputs(shape: dict[str, int], dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        x, scale = (torch.randn(size, generator=generator).to(dtype) for size in ((shape["T"], 8), (8,)))
        return x, scale, torch.randperm(shape["T"], generator=generator)

    names = {"input_names": ("x", "scale", "ids"), "output_names": ("rows", "next", "loss"), "constant": ("scale",)}
    made = {**names, "inputs": inputs, "reference": routed, "fused": fused, "far_rows": None, **changes}
    return replace(operator("rms_norm").load_suite(), **made)


def test_indices_scalars_and_constants_are_judged_by_what_they_are() -> None:
    """Gradients are drawn by output shape; indices get none; a constant is not differentiated."""
    results = verify_case(routed_suite(routed), {"T": 16}, torch.bfloat16, "cpu")
    assert [r.value for r in results] == ["rows", "next", "loss", "dx"] and all(r.ok for r in results)
    assert verify_repeats(routed_suite(routed), {"T": 16}, torch.bfloat16, "cpu").ok


def test_a_wrong_index_counts_beyond_the_slack() -> None:
    def one_off(x: Tensor, scale: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        rows, after, loss = routed(x, scale, ids)
        after[3] += 1
        return rows, after, loss

    wrong = verify_case(routed_suite(one_off), {"T": 16}, torch.float32, "cpu")
    assert [r.value for r in wrong if not r.ok] == ["next"]
    allowed = verify_case(routed_suite(one_off, index_slack=1), {"T": 16}, torch.float32, "cpu")
    assert all(r.ok for r in allowed)


def test_an_output_cut_from_the_graph_is_an_error() -> None:
    def detached(x: Tensor, scale: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        rows, after, loss = routed(x, scale, ids)
        return rows.detach(), after, loss.detach()

    with pytest.raises(RuntimeError, match="does not require grad"):
        verify_case(routed_suite(detached), {"T": 16}, torch.float32, "cpu")


def test_a_wrong_scalar_is_caught() -> None:
    def off(x: Tensor, scale: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        rows, after, loss = routed(x, scale, ids)
        return rows, after, loss * 1.01

    wrong = verify_case(routed_suite(off), {"T": 16}, torch.bfloat16, "cpu")
    assert "loss" in [r.value for r in wrong if not r.ok]


def test_a_written_input_is_caught() -> None:
    """D5: an in-place write corrupts what is recomputed or used twice."""

    def writes(x: Tensor, scale: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        found = routed(x, scale, ids.clone())
        ids.add_(1)
        return found

    with pytest.raises(KernelError, match="input 2 changed"):
        verify_case(routed_suite(writes), {"T": 16}, torch.float32, "cpu")


def test_the_floor_is_the_larger_of_bytes_and_flops_and_says_over_what() -> None:
    cost = operator("linear_cross_entropy").load_cost()(8192, 7168, 163_840, "bfloat16")
    floor, stated = floor_of(cost, "fwd+dx", Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12))
    assert floor == pytest.approx(48.7, abs=0.1) and stated["floor_flops_ms"] == pytest.approx(floor, abs=1e-4)
    assert stated["ceiling_tflop_per_s"] == 790 and stated["floor_bytes_ms"] < 1
    norm = operator("rms_norm").load_cost()(16384, 7168, "bfloat16")
    floor, stated = floor_of(norm, "fwd", Ceilings(4.3e12, 790e12))
    assert floor == pytest.approx(0.1092, abs=1e-4) and stated["floor_bytes_ms"] == pytest.approx(floor, abs=1e-4)


def line(case: str, ours: float = 1.0, **metrics: float) -> BenchLine:
    facts = {"bench": "kernels", "device": "d", "versions": {}, "commit": "c", "date": "2026-11-29"}
    return BenchLine.model_validate({**facts, "case": case, "passes": "fwd", "ours": ours, "metrics": metrics})


def test_a_second_run_of_the_day_replaces_its_own_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for given in (line("a"), line("b"), line("a", 2.0)):
        keep_line(path, given)
    kept = [BenchLine.model_validate_json(text) for text in path.read_text().splitlines()]
    assert [(at.case, at.ours) for at in kept] == [("b", 1.0), ("a", 2.0)]


def test_one_table_shows_lines_with_and_without_a_rival() -> None:
    lone, raced = (
        line("a"),
        line("b", 0.5, launches=7).model_copy(
            update={"rival": "eager", "rival_value": 1.0, "ratio": 2.0, "floor": 0.25}
        ),
    )
    head, first, second = bench_table([lone, raced]).splitlines()
    assert "of floor" in head and first.split()[:2] == ["a", "fwd"] and " - " in first
    assert "50 %" in second and "2.00" in second and "7" in second.split()


def test_the_floor_of_a_loss_alone_is_one_product() -> None:
    suite = operator("linear_cross_entropy").load_suite()
    assert suite.forward_cost is not None
    both = suite.cost(8192, 7168, 163_840, "bfloat16").forward
    alone = suite.forward_cost(8192, 7168, 163_840, "bfloat16").forward
    assert 2 * alone.floor_flops == both.floor_flops == 4 * 8192 * 7168 * 163_840
    assert alone.bytes_read < both.bytes_read and alone.launches < both.launches


def test_parts_are_every_suite_and_dtype_in_the_tables_order() -> None:
    found = parts(["grouped_lora_mlp", "rms_norm"], "cuda")
    dtypes = ["bfloat16", "float16", "float32"]
    assert [p.what for p in found if p.op == "rms_norm"] == [*dtypes, REST, FAR]
    assert [p.what for p in found if p.op == "grouped_lora_mlp"] == [*dtypes, REST, *dtypes, REST]
    assert [p.op for p in found] == ["grouped_lora_mlp"] * 8 + ["rms_norm"] * 5
    assert default_jobs("cpu") == 1 and 1 <= default_jobs("cuda") <= 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_part_without_an_answer_is_wrong_and_the_others_go_on() -> None:
    """Without an interpreter every part of a CPU run is refused, each in a process of its own."""
    ended: list[str] = []
    found = verify_in_jobs(["rms_norm"], "cpu", 2, ended.append)
    assert list(found) == list(parts(["rms_norm"], "cpu")) and len(ended) == len(found) == 4
    assert all(not result.ok and "KernelError" in result.detail for results in found.values() for result in results)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_late_verification_begins_no_more_and_keeps_what_it_has(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the first part still runs: what ended beside it is kept, and no other begins."""
    work, kept = parts(["rms_norm", "add_rms_norm"], "cpu"), list[Part]()
    others_ended = threading.Event()

    def run(part: Part, device: str) -> list[VerifyResult]:
        if jobs > 1 and part != work[1]:
            assert others_ended.wait(30)
            time.sleep(0.1)
        return broken(part, RuntimeError("rehearsal"))

    def keep(part: Part, results: list[VerifyResult]) -> None:
        kept.append(part)
        others_ended.set()

    monkeypatch.setattr(verify_jobs, "run_part", run)
    monkeypatch.setattr(verify_jobs, "processes", lambda workers: ThreadPoolExecutor(workers))
    monkeypatch.setattr(verify_jobs, "POLL_S", 0.01)
    found = verify_parts(work, "cpu", jobs, lambda text: None, keep=keep, late=lambda: len(kept) > 0)
    assert set(kept) == set(found) and 0 < len(found) < len(work)
    assert list(found) == [part for part in work if part in found] and (jobs > 1) == (kept[0] != work[0])


def test_what_is_right_is_timed_beside_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[object] = []

    def verified(ops: object, device: str, jobs: int, report: object) -> dict[Part, list[VerifyResult]]:
        right, wrong = Part("rms_norm", 0, "float32"), Part("router", 0, "float32")
        return {wrong: broken(wrong, RuntimeError("CUDA error")), right: [broken(right, ValueError())[0].model_copy(
            update={"ok": True})]}  # fmt: skip

    monkeypatch.setattr(command, "verify_in_jobs", verified)
    monkeypatch.setattr(command, "bench_all", lambda ops, *args, **named: timed.append(ops) or [])
    assert main(["--device", "cuda"]) == 1 and timed == [("rms_norm",)]
    assert "router" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_suite_says_what_to_do(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), "--ops", "rms_norm"]) == 1
    assert "kernel/device-unsupported" in capsys.readouterr().err
