"""Permute and combine: row metadata of a routing, rows sorted by expert, weighted sum back to tokens."""
