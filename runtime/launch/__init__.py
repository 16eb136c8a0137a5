"""How workers are started, one engine a file."""
