"""Kimi K3: delta-rule and gated latent attention, latent experts, attention residuals. Written from published facts."""
