"""Models of our own for checkpoints that the installed transformers has no class for; picked by architecture."""
