"""Two stages over two nodes of two ranks: identity experts come back, and a token crosses to a node once.

``tests/runtime/test_schedule_axes.py`` holds whole models in two stages to plain transformers.
"""

from __future__ import annotations

from typing import Any

from shardwright.runtime.experts.hierarchical import open_nodes


def test_one_node_has_one_stage() -> None:
    assert open_nodes(4, 0, 4, 4) is None and open_nodes(4, 0, 2, 8) is None and open_nodes(6, 0, 3, 2) is None


def test_a_token_crosses_to_a_node_once(on_ranks: Any) -> None:
    """Values, gradients, and the rows that cross between the nodes, in one piece and in three."""
    assert on_ranks(4, "two_stages.py").count("done") == 4
