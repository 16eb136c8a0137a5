"""The indexer's own loss: KL divergence from the main attention's distribution, with the scores' gradient."""
