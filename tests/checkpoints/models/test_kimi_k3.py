"""Kimi K3 against a plain reference written from the formulas: token by token, expert by expert, in fp64."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.checkpoints.build import build_from_config, state_shapes
from shardwright.checkpoints.config import config_of
from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3TextConfig
from shardwright.checkpoints.models.kimi_k3.delta_rule import delta_rule
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForCausalLM, documents_mask
from shardwright.schemas.errors import CheckpointError

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attn_res_block_size": 2,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "a_log_size": 8,
        "full_attn_layers": [2, 5],
        "kda_layers": [1, 3, 4],
    },
}


SPARSE: dict[str, Any] = {
    **TINY,
    "num_experts": 16,
    "index_n_heads": 16,
    "index_head_dim": 6,
    "index_topk": 5,
    "linear_attn_config": {**TINY["linear_attn_config"], "sparse_attn_layers": [2]},
}
"""Delta-rule layers, one sparse and one dense latent attention, 16 experts."""


@pytest.fixture(scope="module")
def model() -> KimiK3ForCausalLM:
    return filled(KimiK3ForCausalLM(KimiK3TextConfig(**TINY)).double())


def filled(made: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.normal_(0, 0.3 if value.dim() > 1 else 0.2)
            if "norm" in name:
                value.add_(1)
        for name, value in made.named_buffers():
            if "correction" in name:
                value.normal_(0, 0.3)
    return made


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    scaled = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return scaled if weight is None else weight * scaled


def row_mix(rows: list[Tensor], norm: Tensor, projection: Tensor) -> Tensor:
    """One token's rows, each [H]."""
    logits = torch.stack([(norm * projection.view(-1)) @ row / torch.sqrt((row * row).mean() + 1e-5) for row in rows])
    shares = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
    return sum((share * row for share, row in zip(shares, rows, strict=True)), torch.zeros_like(rows[0]))


def reference_kda(w: dict[str, Tensor], x: Tensor, heads: int, width: int) -> Tensor:
    """x [T, H] of one sequence, the recurrence as it is written down."""

    def convolved(name: str) -> Tensor:
        raw = x @ w[f"{name}_proj.weight"].T
        kernel = w[f"{name}_conv1d.weight"][:, 0]
        out = []
        for t in range(len(x)):
            taps = [kernel[:, 3 - back] * raw[t - back] for back in range(4) if t - back >= 0]
            total = sum(taps[1:], taps[0])
            out.append(total * torch.sigmoid(total))
        return torch.stack(out).view(len(x), heads, width)

    q, k, v = convolved("q"), convolved("k"), convolved("v")
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) * width**-0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    raw = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).view(len(x), heads, width)
    g = -5.0 * torch.sigmoid(torch.exp(w["A_log"][:heads]).view(heads, 1) * raw)
    gate = torch.sigmoid(x @ w["g_proj.weight"].T).view(len(x), heads, width)
    out = []
    state = [torch.zeros(width, width, dtype=x.dtype) for _ in range(heads)]
    for t in range(len(x)):
        read = []
        for h in range(heads):
            state[h] = torch.exp(g[t, h])[:, None] * state[h]
            state[h] = state[h] + beta[t, h] * torch.outer(k[t, h], v[t, h] - state[h].T @ k[t, h])
            read.append(rms(state[h].T @ q[t, h], w["o_norm.weight"], 1e-5) * gate[t, h])
        out.append(torch.cat(read))
    return torch.stack(out) @ w["o_proj.weight"].T


def reference_mla(w: dict[str, Tensor], x: Tensor, c: KimiK3TextConfig) -> Tensor:
    heads, nope, extra, value = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    q = (rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T).view(
        len(x), heads, -1
    )
    both = x @ w["kv_a_proj_with_mqa.weight"].T
    latent, shared = both[:, : c.kv_lora_rank], both[:, c.kv_lora_rank :]
    kv = (rms(latent, w["kv_a_layernorm.weight"], 1e-6) @ w["kv_b_proj.weight"].T).view(len(x), heads, nope + value)
    out = []
    for t in range(len(x)):
        read = []
        for h in range(heads):
            keys = torch.cat([kv[: t + 1, h, :nope], shared[: t + 1]], -1)
            scores = keys @ q[t, h] / math.sqrt(nope + extra)
            seen = indexed(w, x, t, c) if "indexer.wk.weight" in w else list(range(t + 1))
            read.append(torch.softmax(scores[seen], 0) @ kv[seen, h, nope:])
        out.append(torch.cat(read))
    return (torch.stack(out) * torch.sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T


@torch.no_grad()
def indexed(w: dict[str, Tensor], x: Tensor, t: int, c: KimiK3TextConfig) -> list[int]:
    """The tokens that token t looks at; the last that is chosen and the first that is not must differ in score."""
    query = rms(w["q_a_proj.weight"] @ x[t], w["q_a_layernorm.weight"], 1e-6)
    heads = (w["indexer.wq_b.weight"] @ query).view(c.index_n_heads, c.index_head_dim)
    weights = w["indexer.weights_proj.weight"] @ x[t]
    scores = []
    for s in range(t + 1):
        key = w["indexer.wk.weight"] @ x[s]
        key = (key - key.mean()) / torch.sqrt(((key - key.mean()) ** 2).mean() + 1e-6)
        key = key * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"]
        dots = [max(float(heads[j] @ key), 0.0) / math.sqrt(c.index_head_dim) for j in range(c.index_n_heads)]
        scores.append(sum(float(weights[j]) * dots[j] for j in range(c.index_n_heads)) / math.sqrt(c.index_n_heads))
    order = sorted(range(t + 1), key=lambda s: -scores[s])
    if t >= c.index_topk:
        assert scores[order[c.index_topk - 1]] - scores[order[c.index_topk]] > 1e-9, "a tie: choose another seed"
    return sorted(order[: c.index_topk])


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def reference_moe(w: dict[str, Tensor], x: Tensor, c: KimiK3TextConfig) -> Tensor:
    out = []
    for token in x:
        scores = torch.sigmoid(w["gate.weight"] @ token)
        chosen = sorted(
            range(c.num_experts), key=lambda e: -float((scores[e] + w["gate.e_score_correction_bias"][e]).detach())
        )
        chosen = chosen[: c.num_experts_per_token]
        total = torch.stack([scores[e] for e in chosen]).sum()
        latent = w["routed_expert_down_proj.weight"] @ token
        mixed = torch.zeros_like(latent)
        for e in chosen:
            inner = w["experts.gate_up_proj"][e] @ latent
            gate, up = inner[: c.moe_intermediate_size], inner[c.moe_intermediate_size :]
            mixed = mixed + scores[e] / total * (w["experts.down_proj"][e] @ situ(gate, up))
        routed = w["routed_expert_up_proj.weight"] @ rms(mixed, w["routed_expert_norm.weight"], 1e-5)
        out.append(routed + dense(w, "shared_experts.", token))
    return torch.stack(out)


def dense(w: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ w[f"{prefix}gate_proj.weight"].T, x @ w[f"{prefix}up_proj.weight"].T
    return situ(gate, up) @ w[f"{prefix}down_proj.weight"].T


def reference_logits(model: KimiK3ForCausalLM, ids: Tensor) -> Tensor:
    """One sequence of ids [T] → logits [T, V]."""
    w = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    c = model.config

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}

    running: list[Tensor] | None = list(w["model.embed_tokens.weight"][ids])
    bank: list[list[Tensor]] = []
    for index in range(c.num_hidden_layers):
        layer = below(f"model.layers.{index}.")

        def mixed(kind: str, rows: list[list[Tensor]], layer: dict[str, Tensor] = layer) -> Tensor:
            per_token = [[row[t] for row in rows] for t in range(len(ids))]
            norm, projection = layer[f"{kind}_res_norm.weight"], layer[f"{kind}_res_proj.weight"]
            return torch.stack([row_mix(one, norm, projection) for one in per_token])

        rows = [*bank, *([running] if running is not None else [])]
        read = rms(mixed("self_attention", rows), layer["input_layernorm.weight"], 1e-5)
        if index % c.attn_res_block_size == 0:
            assert running is not None
            bank.append(running)
            running = None
        attention = below(f"model.layers.{index}.self_attn.")
        linear = c.layer_types[index] == "linear_attention"
        y = reference_kda(attention, read, 3, 8) if linear else reference_mla(attention, read, c)
        running = list(y) if running is None else [p + one for p, one in zip(running, y, strict=True)]
        read = rms(mixed("mlp", [*bank, running]), layer["post_attention_layernorm.weight"], 1e-5)
        if index == 0:
            y = dense(below("model.layers.0.mlp."), "", read)
        else:
            y = reference_moe(below(f"model.layers.{index}.block_sparse_moe."), read, c)
        running = [p + one for p, one in zip(running, y, strict=True)]
    assert running is not None
    rows = [*bank, running]
    norm, projection = w["model.output_attn_res_norm.weight"], w["model.output_attn_res_proj.weight"]
    last = torch.stack([row_mix([row[t] for row in rows], norm, projection) for t in range(len(ids))])
    return rms(last, w["model.norm.weight"], 1e-5) @ w["lm_head.weight"].T


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_model_is_its_formulas(model: KimiK3ForCausalLM, form: str) -> None:
    """Logits and the gradient of every parameter; experts that no token chose have none, indexers never."""
    if form == "sparse":
        model = filled(KimiK3ForCausalLM(KimiK3TextConfig(**SPARSE)).double())
        assert [type(layer.self_attn).__name__ for layer in model.model.layers][1:] == [
            "GatedSparseAttention", "DeltaAttention", "DeltaAttention", "GatedLatentAttention",
        ]  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 18))
    direction = torch.randn(2, 18, 64, dtype=torch.float64)
    model.zero_grad()
    logits = model(ids).logits
    (logits * direction).sum().backward()
    ours = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    expected = torch.stack([reference_logits(model, row) for row in ids])
    (expected * direction).sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for name, value in model.named_parameters():
        right = torch.zeros_like(value) if value.grad is None else value.grad
        scale = float(right.abs().max()) or 1.0
        if "indexer" in name:
            assert ours[name] is None
            continue
        assert ours[name] is not None, name
        assert float((ours[name] - right).abs().max()) <= 1e-5 * scale, name


def test_padding_of_a_log_takes_no_part(model: KimiK3ForCausalLM) -> None:
    attention = model.model.layers[0].self_attn
    assert attention.A_log.shape == (8,) and attention.heads == 3
    before = model(torch.arange(9)[None]).logits
    with torch.no_grad():
        kept = attention.A_log.clone()
        attention.A_log[3:] = 100
        after = model(torch.arange(9)[None]).logits
        attention.A_log.copy_(kept)
    assert torch.equal(before, after)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
def test_chunks_are_the_recurrence(tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(1, tokens, 2, 4, dtype=torch.float64) for _ in range(3))
    g = -30 * torch.rand(1, tokens, 2, 4, dtype=torch.float64) ** 4
    beta, state = torch.rand(1, tokens, 2, dtype=torch.float64), torch.randn(1, 2, 4, 4, dtype=torch.float64)
    o, last = delta_rule(q, k, v, g, beta, state)
    s = state.clone()
    for t in range(tokens):
        s = torch.exp(g[:, t])[..., None] * s
        error = v[:, t] - (s * k[:, t][..., None]).sum(-2)
        s = s + beta[:, t][..., None, None] * k[:, t][..., None] * error[..., None, :]
        torch.testing.assert_close(o[:, t], (s * q[:, t][..., None]).sum(-2), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(last, s, rtol=1e-10, atol=1e-10)


def test_later_tokens_change_nothing_before(model: KimiK3ForCausalLM) -> None:
    ids = torch.randint(0, 64, (1, 20))
    changed = ids.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 64
    with torch.no_grad():
        before, after = model(ids).logits[:, :12], model(changed).logits[:, :12]
    torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)  # experts' products round by their row counts


def load_published() -> Any:
    path = Path(__file__).resolve().parents[1] / "published.py"
    spec = importlib.util.spec_from_file_location("published_k3", path)
    assert spec is not None and spec.loader is not None
    published = importlib.util.module_from_spec(spec)
    sys.modules["published_k3"] = published
    spec.loader.exec_module(published)
    return published


def test_the_published_size_to_the_digit() -> None:
    """Section by section of the published audit of the language model, with its buffers."""
    published = load_published()
    text = dict(published.kimi_k3().config["text_config"])
    config = KimiK3TextConfig(**{k: v for k, v in text.items() if k not in ("model_type", "architectures")})
    with torch.device("meta"):
        whole = KimiK3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    everything = [*whole.named_parameters(), *whole.named_buffers()]
    assert sum(value.numel() for _, value in everything) == 2_779_484_478_208
    counts = {
        ".experts.": 2_722_740_830_208,
        ".shared_experts.": 12_155_092_992,
        ".routed_expert_": 4_727_310_336,
        ".gate.": 590_955_008,
        "_res_": 2_680_832,
    }
    for part, expected in counts.items():
        assert sum(v.numel() for n, v in everything if part in n) == expected, part
    attention = {True: 0, False: 0}
    for index, layer in enumerate(whole.model.layers):
        attention[layer.full] += sum(v.numel() for v in layer.self_attn.parameters())
        assert layer.full == (index + 1 in text["linear_attn_config"]["full_attn_layers"])
    assert attention == {False: 30_618_088_704, True: 5_572_706_304}


def test_the_whole_model_is_the_headers_to_the_digit(tmp_path: Path) -> None:
    """Every name and every value of the published files, vision tower and projector too, has its place, and no other.

    ``state_shapes`` holds packed experts as the values that they decode to; 2,779,931,837,184 with the router's biases
    and the padding of A_log (84,640).
    """
    published = load_published()
    one = published.kimi_k3()
    config = config_of(one.config, tmp_path)
    whole = build_from_config(config, torch.bfloat16)
    shapes = state_shapes(whole)
    assert sum(math.prod(shape) for shape in shapes.values()) == 2_779_931_752_544 + 84_640
    padding = sum(shapes[name][0] - 96 for name in shapes if name.endswith("A_log"))
    biases = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("e_score_correction_bias"))
    assert padding + biases == 84_640
    stored = {name.removesuffix("_packed"): shape for name, _, shape in one.tensors if not name.endswith("_scale")}
    plain = {name: shape for name, shape in stored.items() if ".experts." not in name}
    assert {name: shape for name, shape in shapes.items() if ".experts." not in name} == plain
    routed = sum(2 * math.prod(shape) for name, shape in stored.items() if ".experts." in name)
    assert routed == sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    parts = {"vision_tower.": 401_214_464, "mm_projector.": 46_144_512}
    for part, expected in parts.items():
        assert sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(part)) == expected, part


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_attn_config": {**TINY["linear_attn_config"], "kda_layers": [1, 3]}}, "4 of 5 layers"),
        ({"linear_attn_config": {**TINY["linear_attn_config"], "full_attn_layers": [0, 5]}}, "counted from 1"),
        ({"linear_attn_config": {**TINY["linear_attn_config"], "a_log_size": 2}}, "does not hold 3 heads"),
        ({"index_topk": 4}, "index_n_heads"),
        ({**SPARSE, "linear_attn_config": {**TINY["linear_attn_config"], "sparse_attn_layers": [1]}}, "counted from 1"),
    ],
)
def test_a_contradiction_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        KimiK3TextConfig(**{**TINY, **change})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(CheckpointError, match="kv_lora_rank"):
        KimiK3TextConfig(**{k: v for k, v in TINY.items() if k != "kv_lora_rank"})


def test_documents_of_a_row_do_not_see_each_other(model: KimiK3ForCausalLM) -> None:
    """Full attention by the positions that start anew; the delta-rule layers are cut by who runs the rows."""
    sparse = filled(KimiK3ForCausalLM(KimiK3TextConfig(**SPARSE)).double())
    torch.manual_seed(1)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    positions = torch.cat([torch.arange(9), torch.arange(11)]).unsqueeze(0)
    mask = documents_mask(positions, None)
    for attention in (model.model.layers[1].self_attn, sparse.model.layers[1].self_attn):
        together = attention(x, mask)
        alone = torch.cat([attention(x[:, :9]), attention(x[:, 9:])], 1)
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert documents_mask(torch.arange(20).unsqueeze(0), None) is None
