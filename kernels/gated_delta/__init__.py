"""Gated DeltaNet: the delta rule with one gate for a head, forward and backward."""
