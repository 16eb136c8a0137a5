"""The operators on a real device: what only a compiler, many rows or a clock can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from shardwright.kernels import tuned
from shardwright.kernels.bench import bench_all
from shardwright.kernels.cases import FAR, normal_on_device
from shardwright.kernels.evidence import EvidenceStore
from shardwright.kernels.launched import recorded
from shardwright.kernels.registry import OPERATORS, operator
from shardwright.kernels.tune import right
from shardwright.kernels.verify import poisoned_memory, relative_error, verify_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_value_is_as_near_to_fp64_as_eagers(name: str) -> None:
    assert [r for r in verify_all([name], "cuda") if not r.ok] == []


def test_rms_norm_lines_and_evidence_are_written(tmp_path: Path) -> None:
    lines = bench_all(["rms_norm"], tmp_path, tmp_path / "evidence.jsonl")
    assert {line.passes for line in lines} >= {"fwd", "bwd"}
    assert all(line.ours and line.rival_value and line.floor for line in lines)
    assert all(line.metrics["launches"] >= 1 and line.metrics["floor_bytes_ms"] > 0 for line in lines)
    assert len(EvidenceStore(tmp_path / "evidence.jsonl").read()) == 4 * len(lines)


@pytest.mark.parametrize("name", OPERATORS)
def test_c16_every_candidate_is_right_or_refused(name: str) -> None:
    """A compiler bug in one configuration on one device must not ship: all candidates against fp64."""
    for suite in operator(name).load_suites():
        for case in () if suite.tune is None else suite.tune():
            run, check = case.prepare()
            for choice in (case.default, *case.candidates):
                with tuned.override(name, case.kernel, choice), poisoned_memory():
                    run()
                    assert right(check()), (case.kernel, case.bucket, choice)


def test_c2_the_reported_counts_give_zero_gradients_for_empty_experts() -> None:
    from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp

    counts, E, H, I, r = torch.tensor([162, 0, 2577, 446, 0, 83], device="cuda"), 6, 2048, 768, 16

    def draw(*shape: int, seed: int, learns: bool = False) -> torch.Tensor:
        made = normal_on_device(shape, torch.bfloat16, "cuda", seed).mul_(shape[-1] ** -0.5)
        return made.requires_grad_(learns)

    shapes = ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r))
    a, b, c, d = (draw(*shape, seed=at, learns=True) for at, shape in enumerate(shapes))
    x = normal_on_device((int(counts.sum()), H), torch.bfloat16, "cuda", 9)
    with poisoned_memory():
        y = grouped_lora_mlp(
            x,
            counts,
            draw(E, 2 * I, H, seed=7),
            draw(E, H, I, seed=8),
            up=Adapter(a, b, 0.5),
            low=Adapter(c, d, 0.5),
        )
        found = torch.autograd.grad(y.sum(), (a, b, c, d))
        stacks = [draw(*shape, seed=7 + at, learns=True) for at, shape in enumerate(((E, 2 * I, H), (E, H, I)))]
        found += torch.autograd.grad(grouped_lora_mlp(x, counts, *stacks, trains_base=True).sum(), stacks)
    for gradient in found:
        assert gradient[[1, 4]].abs().sum() == 0 and gradient.isfinite().all()
        assert all(gradient[e].abs().sum() > 0 for e in (0, 2, 3, 5))


def test_c6_rows_beyond_32_bits_are_gathered_and_summed() -> None:
    """1,079,840 rows of 2,048: the last tokens give the bits they give alone."""
    from shardwright.kernels.permute.op import combine, gather_rows, route

    T, K, H, E = 1_079_840 // 8, 8, 2048, 64
    ids = torch.randint(0, E, (T, K), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    at = route(ids, E)
    x = normal_on_device((T, H), torch.bfloat16, "cuda", 1)
    weights = torch.rand((T, K), device="cuda")
    rows = gather_rows(x, at)
    assert rows.numel() > 2**31
    out = combine(rows, at, weights)
    exact = x[-4:].double() * weights[-4:].double().sum(-1, keepdim=True)
    assert relative_error(out[-4:], exact) < 4e-3
    assert torch.equal(rows[at.place[-4:].long().flatten()], x[-4:].repeat_interleave(K, 0))


def test_c7_experts_beyond_32_bits_are_read_where_they_lie() -> None:
    """Expert 511 of a stack of 512 with 4096 x 2048 each: the same bits as from a stack of its own."""
    from shardwright.kernels.grouped_lora_mlp.op import grouped_lora_mlp

    E, H, I, R = 512, 2048, 2048, 96
    assert (E - 1) * 2 * I * H > 2**31
    gate_up = normal_on_device((E, 2 * I, H), torch.bfloat16, "cuda", 1).mul_(H**-0.5)
    down = normal_on_device((E, H, I), torch.bfloat16, "cuda", 2).mul_(I**-0.5)
    x = normal_on_device((R, H), torch.bfloat16, "cuda", 3)
    counts = torch.zeros(E, dtype=torch.int64, device="cuda")
    counts[-1] = R
    whole = grouped_lora_mlp(x, counts, gate_up, down)
    lone = grouped_lora_mlp(x, counts[-1:], gate_up[-1:].clone(), down[-1:].clone())
    assert relative_error(whole, lone.double()) < 4e-3 and lone.abs().sum() > 0


def test_d3_epsilon_is_the_callers_on_a_device() -> None:
    """x = 0.058·randn, H 32, bf16: the output's root mean square is 1 to 1e-3."""
    rms_norm = operator("rms_norm").load_op()
    x = 0.058 * normal_on_device((1 << 16, 32), torch.float32, "cuda", 0)
    y = rms_norm(x.bfloat16(), torch.ones(32, dtype=torch.bfloat16, device="cuda"), 1e-6)
    assert abs(float(y.double().pow(2).mean().sqrt()) - 1) < 1e-3


def test_d12_the_kernels_that_run_are_ours() -> None:
    """What a line times is this package's kernel: the profiler's names against the recorded launches."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    rms_norm = operator("rms_norm").load_op()
    x, weight = (normal_on_device(size, torch.bfloat16, "cuda", 0) for size in ((64, 7168), (7168,)))
    with recorded() as launches:
        rms_norm(x.to("meta"), weight.to("meta"), 1e-6)
    rms_norm(x, weight, 1e-6)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        rms_norm(x, weight, 1e-6)
        torch.cuda.synchronize()
    ran = {event.name for event in trace.events() if event.device_type == DeviceType.CUDA}
    assert ran == {case.kernel.fn.__name__ for case in launches}


def test_far_rows_are_over_32_bits() -> None:
    assert FAR["T"] * FAR["H"] > 2**31
