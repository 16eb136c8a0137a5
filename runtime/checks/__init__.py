"""Checks that end a run: after load, after the first step, after export."""
