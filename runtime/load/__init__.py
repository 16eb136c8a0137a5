"""Weights into a sharded model."""
