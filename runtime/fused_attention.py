"""An attention module whose rotation, with query and key norms or without, is one operator; all else stays.

Legend: B batch, S tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.lora.siblings import joint
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
"""Children of an attention, and those that norms on each head add; the plan may name them otherwise."""
ROTATION_ALONE = "rope"
"""Pattern of a rotation without norms."""
CACHES = ("cache", "past_key_values")
"""Arguments with which a family hands over its cache: decoding runs the module's own forward."""
PAIRINGS = {"half-split": "half", "half": "half", "interleaved": "interleaved"}
"""How a plan calls a rotation → how the operator does."""


def fused_attention(module: nn.Module, name: str, decision: FusionDecision) -> Callable[..., Any]:
    """The forward of an attention that returns (output [B, S, H], weights or ``None``).

    Constants of the decision: ``pairing`` (``half`` unless told); with norms ``eps`` and ``unit_offset``. Without
    norms tables may be narrower than a head: its first dimensions turn.

    Raises:
        LegalityError: ``fusion-attention`` where the module is not such an attention.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    children = dict(module.named_children())
    normed = decision.pattern != ROTATION_ALONE
    bound = {role: decision.roles.get(role, role) for role in (*PROJECTIONS, *(NORMS if normed else ()))}
    family: Any = module
    missing = [child for child in bound.values() if child not in children]
    others = sorted(set(children) - set(bound.values()))
    implementation = getattr(getattr(family, "config", None), "_attn_implementation", "eager")
    pairing = PAIRINGS.get(str(decision.constants.get("pairing", "half")), "")
    told = not normed or "eps" in decision.constants
    if missing or others or implementation == "eager" or not told or not pairing:
        raise _refused(
            name,
            f"the plan binds {', '.join(bound.values())}; missing {missing}, not bound {others}, attention "
            f"{implementation!r}, constants {sorted(decision.constants)}",
        )
    q_proj, k_proj, v_proj, o_proj = (children[bound[role]] for role in PROJECTIONS)
    op: Callable[..., tuple[Tensor, Tensor]] = OPERATORS["qk_norm_rope"].load_op()
    norms: Callable[[], dict[str, Any]] = dict
    if normed:
        norms = _norms(name, children[bound["q_norm"]], children[bound["k_norm"]], family.head_dim, decision)
    original: Callable[..., Any] = module.forward

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if any(kwargs.get(key) is not None for key in CACHES):
            out: tuple[Tensor, Tensor | None] = original(
                hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
            )
            return out
        given = {key: value for key, value in kwargs.items() if key not in CACHES}
        lead = hidden_states.shape[:-1]
        heads = (*lead, -1, family.head_dim)
        cos, sin = position_embeddings
        queries, keys, values = joint(hidden_states, (q_proj, k_proj, v_proj))
        q, k = op(
            queries.view(heads),
            keys.view(heads),
            cos,
            sin,
            width=cos.shape[-1],
            pairing=pairing,
            **norms(),
        )
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
        mixed, maps = attend(
            module,
            q.transpose(1, 2),
            k.transpose(1, 2),
            values.view(heads).transpose(1, 2),
            attention_mask,
            dropout=0.0,
            scaling=family.scaling,
            sliding_window=getattr(family, "sliding_window", None),
            **given,
        )
        return o_proj(mixed.reshape(*lead, -1)), maps

    return forward


def _norms(
    name: str, q_norm: nn.Module, k_norm: nn.Module, width: int, decision: FusionDecision
) -> Callable[[], dict[str, Any]]:
    """What the operator is given for its norms, read at each call.

    Raises:
        LegalityError: ``fusion-attention`` where they are not over one head's width.
    """
    weights: list[Any] = [q_norm.weight, k_norm.weight]
    if any(weight.dim() != 1 or weight.shape[0] != width for weight in weights):
        raise _refused(name, f"norms of {[tuple(w.shape) for w in weights]} are not over heads of {width}")
    eps, unit = float(decision.constants["eps"]), bool(decision.constants.get("unit_offset", False))
    return lambda: {"q_weight": q_norm.weight, "k_weight": k_norm.weight, "eps": eps, "unit_offset": unit}


def _refused(name: str, what: str) -> LegalityError:
    return LegalityError("fusion-attention", what, where=name, next_action="reject this proposal of the attention")
