"""Adapter formats, one a file."""
