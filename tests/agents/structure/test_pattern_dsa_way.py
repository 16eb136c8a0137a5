"""Why sparse attention runs dense or sparse, as a plan's decision says it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardwright.agents.structure.patterns.dsa_way import MEASURED_SIZES, crossing, faster, told
from shardwright.search_spaces.catalogue import load_cluster

pytest.importorskip("triton", reason="the operator's contract stands beside its kernels")
from shardwright.kernels.dsa.attention.choose import TIMES, crossover

H200 = load_cluster("h200-1").device


def test_short_rows_are_dense_because_it_is_the_same_function() -> None:
    text = told(MEASURED_SIZES, 2048, H200, "bfloat16")
    assert text.startswith("rows of 2048 tokens run dense (dense up to 2048 tokens a row") and "same function" in text


def test_long_rows_name_the_measured_times_and_where_they_cross() -> None:
    """The file's own numbers: at a measured length dense is the sum of its two passes."""
    text = told(MEASURED_SIZES, 32768, H200, "bfloat16")
    times = json.loads(TIMES.read_bytes())[H200.name]
    dense = sum(times["dense"]["32768"])
    sparse = sum(times["sparse"]["32768"]) + times["indexer"]["32768"]
    assert f"{dense:.3g} ms dense, {sparse:.3g} ms sparse with its indexer" in text
    assert f"from {crossover(H200.name, training=True)} tokens a row on" in text
    assert "measured on NVIDIA H200" in text and times["basis"] in text
    handed = told(replace(MEASURED_SIZES, N=0, D=0), 32768, H200, "bfloat16")
    assert f"{sum(times['sparse']['32768']):.3g} ms sparse without what chooses" in handed


def test_other_sizes_and_devices_are_modelled_and_said_to_be() -> None:
    few = told(replace(MEASURED_SIZES, H=16), 32768, H200, "bfloat16")
    assert "modelled: counted work" in few and "measured" not in few
    other = load_cluster("a100-8").device
    assert other.name not in json.loads(TIMES.read_bytes())
    assert f"modelled: counted work over the rates of {other.name}" in told(MEASURED_SIZES, 8192, other, "bfloat16")
    assert "modelled" in told(MEASURED_SIZES, 32768, H200, "float32")


def test_a_crossing_is_the_first_length_at_which_sparse_is_faster() -> None:
    for right in (1024, 2048, 3072, 4096, 5120, 200 * 1024, 256 * 1024):
        assert crossing(lambda T, right=right: (T, right - 0.5)) == right
    assert crossing(lambda T: (1.0, 2.0)) == 0
    lost = told(replace(MEASURED_SIZES, H=1, key=8, value=8), 8192, H200, "bfloat16")
    assert "sparse is faster at no length up to 262144" in lost


def test_the_faster_way_is_the_one_that_workers_choose() -> None:
    """By the times that ship: dense where it was faster, told with both; without times the selection stays."""
    times = json.loads(TIMES.read_bytes())[H200.name]
    for T in (8192, 32_768):
        dense = sum(times["dense"][str(T)])
        sparse = sum(times["sparse"][str(T)]) + times["indexer"][str(T)]
        text = faster(MEASURED_SIZES, T, H200)
        assert f"tokens run {'dense' if dense < sparse else 'sparse'}, the faster way" in text
        assert f"{dense:.1f} ms dense and {sparse:.1f} ms sparse" in text
    assert "no times were measured" in faster(MEASURED_SIZES, 8192, load_cluster("a100-8").device)
    assert "same function" in faster(MEASURED_SIZES, 2048, load_cluster("a100-8").device)
