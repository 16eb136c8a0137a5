"""Triton kernels written by a language model: screened, run apart, judged, and kept for a person to approve by hash."""
