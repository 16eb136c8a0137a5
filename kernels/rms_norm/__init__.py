"""RMSNorm: ``y = w · round(x / sqrt(mean(x²) + eps))``, forward and backward."""
