"""Head and cross-entropy in one operator, for a frozen head: no ``[T, V]`` logits, gradient of the input."""
