"""Kimi K3's vision tower and projector against a reference written patch by patch from the formulas, in fp64."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3Config, KimiK3VisionConfig
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForConditionalGeneration
from shardwright.schemas.errors import CheckpointError, RecipeError

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "linear_attn_config": {"num_heads": 3, "head_dim": 8, "full_attn_layers": [2], "kda_layers": [1]},
}
VISION: dict[str, Any] = {
    "patch_size": 2,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "vt_hidden_size": 12,
    "vt_intermediate_size": 20,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 16,
    "mm_hidden_size": 12,
}
PLACEHOLDER = 63
GRIDS = [(1, 4, 4), (1, 2, 6), (3, 2, 4)]


@pytest.fixture(scope="module")
def model() -> KimiK3ForConditionalGeneration:
    config = KimiK3Config(text_config=dict(TEXT), vision_config=VISION, media_placeholder_token_id=PLACEHOLDER)
    made = KimiK3ForConditionalGeneration(config).double()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.normal_(0, 0.3)
            if "norm" in name:
                value.add_(1)
    return made


@pytest.fixture(scope="module")
def patches() -> Tensor:
    torch.manual_seed(6)
    return torch.randn(sum(t * h * w for t, h, w in GRIDS), 3, 2, 2, dtype=torch.float64)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def place(table: Tensor, h: int, w: int, row: int, column: int) -> Tensor:
    """The table at the centre of a patch: bilinear between the four nearest entries, edges repeated."""
    sides = table.shape[:2]
    y = min(max((row + 0.5) * sides[0] / h - 0.5, 0), sides[0] - 1)
    x = min(max((column + 0.5) * sides[1] / w - 0.5, 0), sides[1] - 1)
    top, left = min(int(y), sides[0] - 1), min(int(x), sides[1] - 1)
    down, right = min(top + 1, sides[0] - 1), min(left + 1, sides[1] - 1)
    fy, fx = y - top, x - left
    above = table[top, left] * (1 - fx) + table[top, right] * fx
    below = table[down, left] * (1 - fx) + table[down, right] * fx
    return above * (1 - fy) + below * fy


def turned(head: Tensor, row: int, column: int) -> Tensor:
    """Pairs as complex numbers, turned by column, row, column, row … at falling rates."""
    width, out = len(head), []
    for pair in range(width // 2):
        angle = (row if pair % 2 else column) * 10_000.0 ** (-4 * (pair // 2) / width)
        turn = cmath.exp(1j * angle)
        a, b = head[2 * pair], head[2 * pair + 1]
        out += [a * turn.real - b * turn.imag, a * turn.imag + b * turn.real]
    return torch.stack(out)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    if tanh:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def reference(model: Any, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """One image or clip: merged and projected rows."""
    w = {n: v for n, v in model.named_parameters() if n.startswith(("vision_tower", "mm_projector"))}
    t, h, wide = grid
    seats = [(f, r, c) for f in range(t) for r in range(h) for c in range(wide)]
    x = []
    for patch, (frame, row, column) in zip(patches, seats, strict=True):
        value = w["vision_tower.patch_embed.proj.weight"].flatten(1) @ patch.flatten()
        value = value + place(w["vision_tower.patch_embed.pos_emb.weight"], h, wide, row, column)
        if t > 1:
            rates = [10_000.0 ** (-2 * i / 12) for i in range(6)]
            sines = [math.sin(frame * rate) for rate in rates] + [math.cos(frame * rate) for rate in rates]
            value = value + torch.tensor(sines, dtype=torch.float64)
        x.append(value)
    for block in range(2):
        stem = f"vision_tower.encoder.blocks.{block}."
        normed = [rms(one, w[f"{stem}norm0.weight"], 2**-7) for one in x]
        qkv = [(w[f"{stem}wqkv.weight"] @ one).view(3, 2, 8) for one in normed]
        read = []
        for i in range(len(x)):
            heads = []
            for g in range(2):
                q = turned(qkv[i][0, g], *seats[i][1:])
                keys = torch.stack([turned(qkv[j][1, g], *seats[j][1:]) for j in range(len(x))])
                heads.append(torch.softmax(keys @ q / math.sqrt(8), 0) @ torch.stack([one[2, g] for one in qkv]))
            read.append(w[f"{stem}wo.weight"] @ torch.cat(heads))
        x = [a + b for a, b in zip(x, read, strict=True)]
        for i, one in enumerate(x):
            inner = gelu(w[f"{stem}mlp.fc0.weight"] @ rms(one, w[f"{stem}norm1.weight"], 2**-7), tanh=True)
            x[i] = one + w[f"{stem}mlp.fc1.weight"] @ inner
    x = [rms(one, w["vision_tower.encoder.final_layernorm.weight"], 2**-7) for one in x]
    at = dict(zip(seats, x, strict=True))
    rows = []
    for r in range(0, h, 2):
        for c in range(0, wide, 2):
            corner = [sum(at[f, r + i, c + j] for f in range(t)) / t for i in (0, 1) for j in (0, 1)]
            inner = gelu(w["mm_projector.proj.0.weight"] @ torch.cat(corner), tanh=False)
            rows.append(rms(w["mm_projector.proj.2.weight"] @ inner, w["mm_projector.post_norm.weight"], 1e-5))
    return torch.stack(rows)


def test_tower_and_projector_are_their_formulas(model: Any, patches: Tensor) -> None:
    """Features of three grids, one a clip of three frames, and the gradient of every parameter."""
    model.zero_grad()
    found = model.mm_projector(model.vision_tower(patches, GRIDS))
    torch.manual_seed(0)
    direction = torch.randn_like(found)
    (found * direction).sum().backward()
    ours = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    sizes = [t * h * w for t, h, w in GRIDS]
    expected = torch.cat([reference(model, part, grid) for part, grid in zip(patches.split(sizes), GRIDS, strict=True)])
    (expected * direction).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    seen = [name for name, _ in model.named_parameters() if name.startswith(("vision_tower", "mm_projector"))]
    for name, value in model.named_parameters():
        if name in seen:
            torch.testing.assert_close(ours[name], value.grad, rtol=1e-7, atol=1e-9, msg=name)
    assert set(ours) == set(seen) and len(seen) == 2 * 6 + 3 + 3


def test_features_stand_where_the_placeholders_stand(model: Any, patches: Tensor) -> None:
    rows = 4 + 3 + 2
    ids = torch.tensor([[1, 2, *[PLACEHOLDER] * 7, 3, 4], [5, *[PLACEHOLDER] * 2, *range(6, 14)]])
    assert int((ids == PLACEHOLDER).sum()) == rows
    with torch.no_grad():
        found = model(ids, pixel_values=patches, image_grids=torch.tensor(GRIDS)).logits
        features = model.mm_projector(model.vision_tower(patches, GRIDS))
        embedded = model.get_input_embeddings()(ids).clone()
        embedded[0, 2:9], embedded[1, 1:3] = features[:7], features[7:]
        expected = model.language_model(inputs_embeds=embedded).logits
        assert torch.equal(found, expected)
        assert not torch.allclose(found, model(ids).logits)


def test_bad_images_are_refused(model: Any, patches: Tensor) -> None:
    grids = torch.tensor(GRIDS)
    with pytest.raises(RecipeError, match="9 merged patches") as caught:
        model(torch.tensor([[PLACEHOLDER] * 8]), pixel_values=patches, image_grids=grids)
    assert caught.value.code == "recipe/image-tokens"
    with pytest.raises(RecipeError) as caught:
        model(torch.tensor([[PLACEHOLDER] * 9]), pixel_values=patches[1:], image_grids=grids)
    assert caught.value.code == "recipe/image-grid"
    with pytest.raises(RecipeError) as caught:
        model.vision_tower(patches[:6], [(1, 3, 2)])
    assert caught.value.code == "recipe/image-grid"
    with pytest.raises(RecipeError) as caught:
        model.vision_tower(torch.cat([patches] * 2)[:20], [(5, 2, 2)])
    assert caught.value.code == "recipe/too-many-frames"
    blind = KimiK3ForConditionalGeneration(KimiK3Config(text_config=dict(TEXT)))
    with pytest.raises(RecipeError) as caught:
        blind(torch.tensor([[PLACEHOLDER]]), pixel_values=patches.float(), image_grids=grids)
    assert caught.value.code == "recipe/images-without-vision-tower"


def test_another_form_of_tower_is_refused() -> None:
    with pytest.raises(CheckpointError, match="norm_type 'layernorm'"):
        KimiK3VisionConfig(norm_type="layernorm")
    with pytest.raises(CheckpointError, match="multiple of 4"):
        KimiK3VisionConfig(qkv_hidden_size=20, vt_num_attention_heads=2)
