"""Which launch choices of a routing are tuned, at which sizes, and how a candidate is judged.

Legend: T tokens, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.kernels import tuned
from shardwright.kernels.cases import Run, TuneCase
from shardwright.kernels.permute import configs
from shardwright.kernels.permute.op import route
from shardwright.kernels.permute.reference import route_reference

SEED = 43
SIZES = ((8192, 8, 128), (8192, 8, 256), (8192, 16, 896))
"""The routings (T, K, E) of the layers that are benchmarked."""


def tune_cases() -> tuple[TuneCase, ...]:
    """Places in one launch after the ranks, or in three."""
    found = []
    for T, K, E in SIZES:
        with tuned.on(None):
            default = configs.metadata(T * K, E)
        both = (configs.Metadata(True), configs.Metadata(False))
        found.append(TuneCase("metadata", tuned.bucket(T=T * K, E=E), default, both, _routing(T, K, E)))
    return tuple(found)


def _routing(T: int, K: int, E: int) -> Callable[[], tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]]:
    def prepare() -> tuple[Run, Callable[[], list[tuple[Tensor, Tensor]]]]:
        scores = torch.rand((T, E), generator=torch.Generator().manual_seed(SEED))
        ids = scores.topk(K, dim=-1).indices
        counts, _, place = route_reference(ids, E)
        on_device = ids.cuda()
        got: dict[str, Tensor] = {}

        def run() -> None:
            at = route(on_device, E)
            got["counts"], got["place"] = at.counts, at.place

        exact = {"counts": counts.cuda().double(), "place": place.cuda().double()}
        return run, lambda: [(got[name].float(), right) for name, right in exact.items()]

    return prepare
