"""Attention residuals: a softmax mix of residual rows, weighed by their own normalised values; one kernel each way."""
