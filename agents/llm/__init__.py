"""Advice from a language model: budgeted, recorded, and checked by the gates that check everything else."""
