"""Routed experts: dispatch to their ranks, grouped products with adapters, load counts."""
