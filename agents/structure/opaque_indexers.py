"""Indexers as a capture can hold them: one that scores pools of keys is a leaf, one that may be left out chooses few.

An indexer that walks over rows and tokens in Python, and gives a mask, is a leaf too; nothing is matched across it.

A family that pools keys drops pools that no row of the batch has, so the sizes of its scores depend on data and the
code cannot be traced. As one node the choice has fixed sizes; what the family's own class chooses is run in fp64 by
the differential test. An attention that leaves its indexer out of rows that it would select whole would be captured
without it, for a captured row is short: while it is traced it selects ``FEW`` keys.
Legend: B rows, S tokens, J indexer heads, D indexer width, P tokens of a pool, W places of the choice.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.agents.structure.opaque import NAMESPACE

INDEXERS = frozenset({"Glm5NextTextIndexer"})
"""Classes of the library whose forward is (hidden states, latent of q, valid tokens, cache) → chosen tokens."""
PARAMETERS = (
    "wq_b.weight",
    "wk.weight",
    "k_norm.weight",
    "k_norm.bias",
    "weights_proj.weight",
    "index_kpool_compress_ape",
    "index_kpool_compress_gate",
)
"""In the order of the leaf."""
SPARING = frozenset({"GatedSparseAttention"})
"""Classes of attentions that run their ``indexer`` only where it selects fewer keys than a row has."""
FEW = 5
MASKING = frozenset({"Qwen4ExpTextQSAIndexer"})
"""Classes whose forward is (hidden states, (cos, sin), mask of what is visible, cache) → mask of what is chosen."""
ARGUMENTS = ("hidden_states", "q_resid", "attention_mask", "cache")
FIRST_PARAMETER = 3
"""Operands of the leaf before its parameters."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "pooled_choice(Tensor hidden, Tensor q_latent, Tensor valid, Tensor[] parameters, str rule, int heads, int top_k, "
    "int pool, bool tail) -> Tensor"
)
_LIBRARY.impl(
    "pooled_choice",
    lambda hidden, q_latent, valid, parameters, rule, heads, top_k, pool, tail: torch.empty(
        (*hidden.shape[:2], places(top_k, pool, tail)), dtype=torch.int32, device="meta"
    ),
    "Meta",
)
_LIBRARY.define(
    "chosen_mask(Tensor hidden, Tensor cos, Tensor sin, Tensor visible, Tensor[] parameters, str rule) -> Tensor"
)
_LIBRARY.impl(
    "chosen_mask",
    lambda hidden, cos, sin, visible, parameters, rule: torch.empty(
        (hidden.shape[0], 1, hidden.shape[1], visible.shape[-1]), dtype=torch.bool, device="meta"
    ),
    "Meta",
)


def places(top_k: int, pool: int, tail: bool) -> int:
    """W: whole pools, and the tokens of a pool that is not complete."""
    return top_k + (pool - 1 if tail else 0)


def run_choice(rule: str, values: tuple[Tensor, ...], *, heads: int, top_k: int, pool: int, tail: bool) -> Tensor:
    """The family's own class on real tensors, as int32 ``[B, S, W]``.

    Args:
        rule: ``module:class``.
        values: hidden states ``[B, S, hidden]``, latent of q ``[B, S, ·]``, valid ``[B, S]`` bool, ``PARAMETERS``.
    """
    home, _, name = rule.partition(":")
    hidden, q_latent, valid, *parameters = values
    sizes = SimpleNamespace(
        hidden_size=hidden.shape[-1],
        index_n_heads=heads,
        index_head_dim=parameters[0].shape[0] // heads,
        qk_rope_head_dim=0,
        index_topk=top_k,
        q_lora_rank=q_latent.shape[-1],
        index_kpool=pool,
        index_kpool_always_select_tail=tail,
    )
    module: nn.Module = getattr(importlib.import_module(home), name)(sizes, 0)
    given = dict(zip(PARAMETERS, parameters, strict=True))
    chosen: Tensor = torch.func.functional_call(module, given, (hidden, q_latent, valid, None))
    return chosen


@contextmanager
def opaque_indexers(layer: nn.Module) -> Iterator[None]:
    """While open, the pooling indexers of a layer are one node each, and sparing ones select few keys."""
    replaced: list[nn.Module] = []
    shortened: list[tuple[Any, int]] = []
    try:
        for module in layer.modules():
            indexer: Any = getattr(module, "indexer", None)
            if type(module).__name__ in SPARING and indexer is not None:
                shortened.append((indexer, indexer.index_topk))
                indexer.index_topk = min(indexer.index_topk, FEW)
            for names, node in ((INDEXERS, _node), (MASKING, _mask_node)):
                if type(module).__name__ in names and "forward" not in module.__dict__:
                    module.__dict__["forward"] = node(module)
                    replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]
        for indexer, top_k in shortened:
            indexer.index_topk = top_k


def _node(module: Any) -> Callable[..., Tensor]:
    kind = type(module)
    named = tuple(inspect.signature(inspect.unwrap(kind.forward)).parameters)[1:]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(named, args, strict=False)), **kwargs}
        own = dict(module.named_parameters())
        if {*given} - {*ARGUMENTS} or given.get("cache") is not None or {*own} != {*PARAMETERS}:
            found: Tensor = kind.forward(module, *args, **kwargs)
            return found
        chosen: Tensor = torch.ops.shardwright_capture.pooled_choice(
            given["hidden_states"],
            given["q_resid"],
            given["attention_mask"],
            [own[name] for name in PARAMETERS],
            f"{kind.__module__}:{kind.__name__}",
            module.n_heads,
            module.index_topk,
            module.index_kpool,
            bool(module.index_kpool_always_select_tail),
        )
        return chosen

    return forward


def _mask_node(module: Any) -> Callable[..., Tensor]:
    """The leaf in place of a masking indexer; a call with a cache, or without a mask, runs the class itself."""
    kind = type(module)

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Any = None,
    ) -> Tensor:
        if cache is not None or attention_mask is None:
            found: Tensor = kind.forward(module, hidden_states, position_embeddings, attention_mask, cache)
            return found
        rule, own = f"{kind.__module__}:{kind.__name__}", list(module.parameters())
        chosen: Tensor = torch.ops.shardwright_capture.chosen_mask(
            hidden_states, *position_embeddings, attention_mask, own, rule
        )
        return chosen

    return forward
