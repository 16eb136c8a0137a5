"""Kimi Delta Attention: a linear-attention recurrence with a decay for every key channel, forward and backward."""
