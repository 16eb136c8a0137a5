"""Gated RMSNorm: ``y = w · x / sqrt(mean(x²) + eps) · act(gate)``, forward and backward."""
