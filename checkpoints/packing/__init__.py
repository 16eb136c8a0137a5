"""Storage formats of weights: which tensors belong together, and how many logical weights they hold."""
