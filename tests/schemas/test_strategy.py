"""Degrees of parallelism are bounded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardwright.schemas.strategy import Mesh


@pytest.mark.parametrize("axis", ["replicate", "shard", "ep", "tp", "cp", "pp", "expert_tp"])
def test_a_degree_has_a_bound(axis: str) -> None:
    """Rules count through degrees; 10^30 of them would never end."""
    assert getattr(Mesh(**{axis: 2**20}), axis) == 2**20
    with pytest.raises(ValidationError, match="1048576"):
        Mesh(**{axis: 10**30})
