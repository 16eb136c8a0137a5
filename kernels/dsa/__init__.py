"""DeepSeek sparse attention: the lightning indexer, attention over its selection, and what trains it."""
