"""Low-rank adapters on dense weights and expert stacks."""
