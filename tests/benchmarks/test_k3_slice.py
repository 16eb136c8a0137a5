"""The slice benchmark on tiny widths, and the full-width slices as the product describes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_slice
from k3_model import Slice
from k3_slice_model import build, decisions, described, install_delta_rule
from lines import line

from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3Config
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForConditionalGeneration
from shardwright.kernels.kda.reference import kda_recurrent_reference
from shardwright.runtime.experts.module import LoraExperts


def test_decisions_bind_every_place(tmp_path: Path) -> None:
    """Packed SiTU experts, routers, norms by epsilon, gated norms, delta-rule layers, the head."""
    what = described(Slice("kimi_k3", ("kda+dense", "kda", "dsa", "mla"), k3_slice.TINY_K3), tmp_path)
    assert [kind.name for kind in what.profile.layer_kinds] == [
        "linear-attention+dense", "linear-attention+moe", "dsa+moe", "mla+moe",
    ]  # fmt: skip
    side = build(what, (), torch.float32)
    experts = [module for module in side.model.modules() if isinstance(module, LoraExperts)]
    assert len(experts) == 3 and all(one.packing == "mxfp4" for one in experts)
    found = decisions(side.model, k3_slice.FUSIONS)
    by_op: dict[str, int] = {}
    for one in found:
        by_op[one.op] = by_op.get(one.op, 0) + len(one.modules)
    norms = 4 * 2 + 1 + 3 + 2 * 2
    assert by_op == {
        "packed_experts": 3, "router": 3, "rms_norm": norms, "gated_rms_norm": 2, "linear_cross_entropy": 1,
    }  # fmt: skip
    constants = next(one.constants for one in found if one.op == "packed_experts")
    assert (constants["activation"], constants["limit"], constants["alpha"]) == ("situ", "4", "25")
    adapted = {target.module.rsplit(".", 1)[-1] for target in what.targets}
    assert {"routed_expert_down_proj", "routed_expert_up_proj", "g_proj", "q_b_proj", "experts"} <= adapted


@pytest.mark.parametrize("case", ["k3-gated-dsa-slice", "glm5-slice", "v32-slice"])
def test_sparse_attentions_take_their_operator(case: str, tmp_path: Path) -> None:
    """Every part that the operator's layer wants is there under the name that the decision gives it."""
    what = described(k3_slice.CASES[case].cut(3, tiny=True), tmp_path)
    side = build(what, ("dsa",), torch.float32)
    attentions = [module.self_attn for module in k3_slice.decoder_layers(side.model).values()]
    sparse = [one for one in attentions if hasattr(one, "indexer")]
    assert len(sparse) == (1 if case.startswith("k3") else 3)
    assert all("forward" in vars(one) for one in sparse), "each has another forward than its class"


def test_operators_by_hand_are_the_layers_own_functions() -> None:
    """The delta-rule operator's meaning in place of the layer's chunks, in fp64: output and gradient of the input."""
    sizes = {**k3_slice.TINY_K3, "rms_norm_eps": 1e-5}
    document = Slice("kimi_k3", ("kda+dense", "kda", "mla"), sizes).document
    config = KimiK3Config(**{name: value for name, value in document.items() if name.endswith("_config")})
    torch.manual_seed(0)
    model = KimiK3ForConditionalGeneration(config).double()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    layer = model.language_model.model.layers[0].self_attn
    x = torch.randn(2, 21, 128, dtype=torch.float64, requires_grad=True)
    own = layer(x)
    (expected,) = torch.autograd.grad(own.square().sum(), x)
    install_delta_rule(model, kda_recurrent_reference)
    found = layer(x)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-7)


def test_the_128_device_step_is_put_together_from_a_slice() -> None:
    """Made-up layers: delta-rule with experts twice as slow as predicted, the others as predicted."""
    predicted = k3_slice.Priced(None, {"linear-attention+dense": 5.0, "linear-attention+moe": 7.0, "mla+moe": 9.0})  # type: ignore[arg-type]
    kinds = {"linear-attention+dense": (5.0, 0.0), "linear-attention+moe": (14.0, 1.0), "mla+moe": (9.0, 0.0)}
    found = k3_slice.Run(1.0, 0, 0, (1.0,), kinds, 0)
    cluster = k3_slice.load_cluster("h200-128")
    made = k3_slice.assembled(found, predicted, k3_slice.fused_by(k3_slice.FUSIONS))
    assert made.corrections == {"linear-attention+dense": 1.0, "linear-attention+moe": 2.0, "mla+moe": 1.0}
    assert made.modelled_ms < made.step_ms < 2 * made.modelled_ms and made.sources_ms["not_measured"] == 0
    written = line({**k3_slice.assembly_fields(made, cluster), "device": "made up"})
    assert written.ours == pytest.approx(made.step_ms, rel=1e-6)
    assert written.metrics["low_ms"] < written.ours < written.metrics["high_ms"]


@pytest.mark.parametrize("model", ["kimi_k3", "glm_moe_dsa", "deepseek_v32"])
def test_full_width_layers_are_the_published_ones(model: str, tmp_path: Path) -> None:
    """One dense and one expert layer: what a layer of each family holds, from the headers of the slice."""
    kinds = ("kda+dense", "kda", "mla") if model == "kimi_k3" else ("dsa+dense", "dsa")
    profile = described(Slice(model, kinds), tmp_path).profile
    found = {kind.name: (kind.parameters, kind.expert_parameters) for kind in profile.layer_kinds}
    routed, rest = found["linear-attention+moe" if model == "kimi_k3" else "dsa+moe"][::-1]
    expected = {
        "kimi_k3": (29_595_009_024, 443_740_416 + 132_120_576 + 51_383_808 + 6_422_528 + 6 * 7168),
        "glm_moe_dsa": (
            724_775_731_200 // 75,
            (12_871_732_224 + 731_008_512) // 78 + 3 * 6144 * 2048 + 256 * 6144 + 2 * 6144,
        ),
        "deepseek_v32": (
            653_908_770_816 // 58,
            (11_413_547_008 + 851_524_864) // 61 + 3 * 7168 * 2048 + 256 * 7168 + 2 * 7168,
        ),
    }
    assert routed == expected[model][0]
    assert rest - routed == pytest.approx(expected[model][1], abs=1024), "router biases apart"


@pytest.mark.slow
@pytest.mark.parametrize("case", list(k3_slice.CASES))
def test_tiny_widths_train_and_give_a_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert k3_slice.main([case, "--self-test", "--steps", "1"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    metrics = made["metrics"]
    assert made["case"] == f"{case}/h200" and made["ours"] > 0
    assert metrics["last_loss"] < metrics["first_loss"]
    kinds = [name for name in metrics if name.endswith("_predicted_ms")]
    assert len(kinds) >= 2 and all(metrics[name.replace("_predicted", "")] > 0 for name in kinds)


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert k3_slice.main(["k4-slice"]) == 2
    assert "k4-slice" in capsys.readouterr().err
