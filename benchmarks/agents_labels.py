"""What is fusible in a model, read from its module classes: an answer key that the patterns do not use.

A region is labelled where a class says what it computes. Patterns see tensor operations and no class name.
"""

from __future__ import annotations

import re
from typing import Any

NORM = re.compile(r"(?<!Gated)RMSNorm$")
EXPERTS = re.compile(r"Experts$")


def labels_of(model: Any) -> set[tuple[str, str]]:
    """Pattern and module path of every labelled region."""
    wanted = set()
    for path, module in model.named_modules():
        kind = type(module).__name__
        if NORM.search(kind) and any(True for _ in module.parameters(recurse=False)):
            wanted.add(("rms_norm", path))
        if EXPERTS.search(kind) and any(value.dim() == 3 for value in module.parameters(recurse=False)):
            wanted.add(("experts", path))
    return wanted
