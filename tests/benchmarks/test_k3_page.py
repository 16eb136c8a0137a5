"""docs/k3-slice.md shows the newest measured lines; every number of a made-up line lands in its place."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_page

from shardwright.schemas.bench import BenchLine

FACTS = {"bench": "k3-slice", "device": "NVIDIA H200", "versions": {}, "commit": "c", "date": "2026-01-02"}
SLICE = BenchLine(
    case="k3-slice/h200",
    unit="tok/s",
    ours=10341.4,
    peak_bytes=76_774_704_128,
    metrics={
        "layers": 4, "step_s": 0.396, "predicted_step_s": 0.38, "time_error_pct": 3.97, "memory_error_pct": 1.64,
        "predicted_peak_bytes": 75_518_758_400, "mla_moe_ms": 97.91, "mla_moe_spread_pct": 1.9,
        "mla_moe_predicted_ms": 94.28,
    },
    **FACTS,
)  # fmt: skip
LAYER = BenchLine(
    case="k3-layers/dsa-h200",
    ours=100.0,
    metrics={"dsa_tokens": 32768, "dsa_ours_ms": 100.0, "dsa_unfused_ms": 940.0, "dsa_fused_ratio": 9.4},
    **FACTS,
)


def test_the_page_is_what_the_results_say() -> None:
    page = k3_page.PAGE.read_text(encoding="utf-8")
    shown = page[page.index(k3_page.BEGIN) + len(k3_page.BEGIN) : page.index(k3_page.END)].strip()
    assert shown == k3_page.tables(k3_page.newest()), "python benchmarks/k3_page.py --write makes the tables anew"


def test_numbers_stand_in_their_columns() -> None:
    text = k3_page.tables({one.case: one for one in (SLICE, LAYER)})
    step = "| k3-slice | 4 | 10,341 | 396 ms | 380 ms | 4.0 % | 76.8 GB | 75.5 GB | 1.6 % | 2026-01-02, NVIDIA H200 |"
    assert step in text
    assert "| k3-slice | mla moe | 97.9 ± 1.9 % | 94.3 | not measured |" in text
    beside = "the model's own code"
    assert f"| gated sparse attention | 32,768 | {beside} | 100.00 | 940.00 | 9.40 (`dsa_fused_ratio`) |" in text
    assert "put together" not in text, "nothing was assembled"


def test_ratios_without_kernels_are_those_of_the_same_slice() -> None:
    short = BenchLine(case="k3-slice/h200-3-layers", ours=1.0, metrics={"mla_moe_unfused_ratio": 7.125}, **FACTS)
    other = BenchLine(case="glm5-slice/h200-3-layers", ours=1.0, metrics={"mla_moe_unfused_ratio": 2.0}, **FACTS)
    text = k3_page.tables({one.case: one for one in (SLICE, short, other)})
    assert "| k3-slice | mla moe | 97.9 ± 1.9 % | 94.3 | 7.12 × |" in text


def test_other_devices_are_left_out(tmp_path: Path) -> None:
    other = SLICE.model_copy(update={"device": "CPU", "ours": 1.0})
    older = SLICE.model_copy(update={"date": "2026-01-01", "ours": 2.0})
    for name, one in (("a", other), ("b", SLICE), ("c", older)):
        (tmp_path / f"{name}.jsonl").write_text(one.model_dump_json() + "\n")
    assert k3_page.newest(tmp_path) == {SLICE.case: SLICE}
