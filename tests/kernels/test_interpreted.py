"""Kernels in Triton's CPU interpreter, each file in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="kernels need triton")


def test_bf16_is_real_bf16(interpret: Callable[[str], None]) -> None:
    interpret("checks_bf16.py")


def test_the_plain_interpreter_is_wrong(interpret: Callable[[str], None]) -> None:
    interpret("checks_plain.py")


def test_norms(interpret: Callable[[str], None]) -> None:
    interpret("checks_norms.py")
