"""RMSNorm of the first columns of a joint projection, the other columns beside it, forward and backward."""
