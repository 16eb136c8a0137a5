"""Attention of each query over the keys that were selected for it, forward and backward, gate fused."""
