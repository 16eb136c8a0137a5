"""Shardwright: adapt new, ultra-large mixture-of-experts checkpoints."""

__version__ = "0.1.0"
