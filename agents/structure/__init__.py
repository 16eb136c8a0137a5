"""Structure parsing: a checkpoint's graph, the fusions found in it, and the proof that each is legal."""
