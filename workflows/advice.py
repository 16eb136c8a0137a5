"""Whether a language model may advise. Rules decide without one."""

from __future__ import annotations

from enum import StrEnum


class Advice(StrEnum):
    """What part a language model has in a run."""

    off = "off"
    advise = "advise"
    required = "required"
