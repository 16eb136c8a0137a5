"""Router: scores, groups, top-k, weights and load statistics of a mixture of experts, from its logits."""
