"""Launch choices of the whole layer's own kernel. Data; no torch. The products' tiles are in grouped_lora_mlp."""

from __future__ import annotations

WEIGHT_ENTRIES, WEIGHT_WARPS = 256, 4
"""Entries of one program of the routing weights' gradient."""
