"""Grouped MLP of experts on rows sorted by expert: frozen base, LoRA inside, activation in the epilogue."""
