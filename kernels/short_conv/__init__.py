"""Short causal convolution with SiLU, as it stands before the recurrences of linear attention."""
