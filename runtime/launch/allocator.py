"""Which allocator of device memory workers run with: torch's, with segments that grow.

Without them the allocator asks the driver for blocks of fixed size, and what a step's first layers leave free does not
fit what later ones ask for: up to a quarter more was reserved than was ever in use at once. Segments that grow are
virtual address ranges, into which pages of 20 MiB are mapped as they are needed. A choice that is in the environment
already stands. Nothing here may import torch: it reads the environment once, when it is first asked for device memory.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch looks, the first that is set."""
EXPANDABLE = "expandable_segments:True"


def choose_allocator(env: MutableMapping[str, str]) -> None:
    """Ask for segments that grow, unless the environment asks for something else. Without CUDA nothing reads it."""
    if not allocator_setting(env):
        env[NAMES[0]] = EXPANDABLE


def allocator_setting(env: Mapping[str, str]) -> str:
    """What torch reads from an environment; empty for its own default."""
    return next((env[name] for name in NAMES if env.get(name)), "")
