"""Lightning indexer: scores of every query and key, the best keys of each query, and the scores' gradient."""
