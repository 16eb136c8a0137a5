"""RMSNorm of query and key heads and their rotary embedding in one launch, forward and backward."""
