"""Residual add and RMSNorm in one pass: ``r = x + residual``, ``y = rms_norm(r)``; gives both."""
