"""The whole MoE layer of one device: routing metadata, experts with LoRA, weighted sum back to tokens."""
