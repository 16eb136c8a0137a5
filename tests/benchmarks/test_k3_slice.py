"""The slice benchmark on tiny widths, and the full-width slices as the product describes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_slice
from k3_model import Slice
from k3_slice_fusions import decisions
from k3_slice_model import build, described
from lines import line

from shardwright.agents.structure.patterns.delta_rule_layer import DeltaRuleLayer
from shardwright.agents.structure.testkit import captured_examples
from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3Config
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForConditionalGeneration
from shardwright.runtime.experts.module import LoraExperts


def tiny_k3(layers: tuple[str, ...]) -> KimiK3ForConditionalGeneration:
    document = Slice("kimi_k3", layers, {**k3_slice.TINY_K3, "rms_norm_eps": 1e-5}).document
    config = KimiK3Config(**{name: value for name, value in document.items() if name.endswith("_config")})
    return KimiK3ForConditionalGeneration(config)


def test_decisions_bind_every_place(tmp_path: Path) -> None:
    """Packed SiTU experts, routers, norms by epsilon, gated norms, delta-rule layers, the head."""
    what = described(Slice("kimi_k3", ("kda+dense", "kda", "dsa", "mla"), k3_slice.TINY_K3), tmp_path)
    assert [kind.name for kind in what.profile.layer_kinds] == [
        "linear-attention+dense", "linear-attention+moe", "dsa+moe", "mla+moe",
    ]  # fmt: skip
    side = build(what, (), torch.float32)
    experts = [module for module in side.model.modules() if isinstance(module, LoraExperts)]
    assert len(experts) == 3 and all(one.packing == "mxfp4" for one in experts)
    found = decisions(side.model, (*k3_slice.FUSIONS, "attention_residual"))
    by_op: dict[str, int] = {}
    for one in found:
        by_op[one.op] = by_op.get(one.op, 0) + len(one.modules)
    norms = 4 * 2 + 1 + 3 + 2
    assert by_op == {
        "packed_experts": 3, "router": 3, "rms_norm": norms, "kda": 2, "dsa": 2, "linear_cross_entropy": 1,
        "attention_residual": 4 * 2 + 1,
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


def test_a_delta_rule_layer_is_bound_as_the_structure_agent_binds_it() -> None:
    """Roles and every number that the runtime reads."""
    layer = tiny_k3(("kda+dense", "kda", "mla")).language_model.model.layers[0].self_attn
    model = torch.nn.ModuleDict({"self_attn": layer})
    (found,) = decisions(model, ("kda",))
    given = (torch.empty(2, 12, 128, dtype=torch.bfloat16, device="meta"),)
    (pair, *_), _ = captured_examples(lambda: (layer.to("meta"), given))
    (match,) = DeltaRuleLayer().find(*pair)
    assert found.roles == match.roles
    constants = {name: match.constants[name] for name in found.constants}
    assert {**found.constants, "lower_bound": -5.0, "eps": 1e-5} == {**constants, "lower_bound": -5.0, "eps": 1e-5}
    assert float(found.constants["lower_bound"]) == float(match.constants["lower_bound"])
    assert float(found.constants["eps"]) == float(match.constants["eps"])
    assert [found.op, *found.beside] == str(match.constants["operators"]).split()


@pytest.mark.parametrize("case", list(k3_slice.CASES))
def test_rows_of_fused_modules_are_dense(case: str, tmp_path: Path) -> None:
    """Kernels take dense rows: what every module that a decision names is given, as the model's own code runs."""
    what = described(k3_slice.CASES[case].cut(3, tiny=True), tmp_path)
    side = build(what, (), torch.float32)
    ran = set()

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
            ran.add(name)
            assert all(one.is_contiguous() for one in given if isinstance(one, torch.Tensor)), name

        return hook

    fusions = (*k3_slice.FUSIONS, "attention_residual")
    names = {name for one in decisions(side.model, fusions) for name in one.modules}
    for name in names:
        side.model.get_submodule(name).register_forward_pre_hook(look(name))
    with torch.no_grad():
        side.loss(torch.arange(40).view(1, 40))
    assert ran == names, "every one of them runs"


def test_the_128_device_step_is_put_together_from_a_slice() -> None:
    """Made-up layers: delta-rule with experts twice as slow as predicted, the others as predicted."""
    predicted = k3_slice.Priced(None, {"linear-attention+dense": 5.0, "linear-attention+moe": 7.0, "mla+moe": 9.0})  # type: ignore[arg-type]
    kinds = {"linear-attention+dense": (5.0, 0.0), "linear-attention+moe": (14.0, 1.0), "mla+moe": (9.0, 0.0)}
    found = k3_slice.Run(1.0, 0, 0, (1.0,), kinds, 0)
    cluster = k3_slice.load_cluster("h200-128")
    made = k3_slice.assembled(found, predicted, k3_slice.fused_everywhere(k3_slice.FUSIONS, 93, packed=True))
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
    assert k3_slice.main([case, "--self-test", "--steps", "1", "--without"]) == 0
    made, without = map(json.loads, capsys.readouterr().out.splitlines())
    ratios = [name for name in without["metrics"] if name.endswith("_unfused_ratio")]
    assert without["case"] == f"{case}/h200-unfused" and len(ratios) >= 2
    metrics = made["metrics"]
    assert made["case"] == f"{case}/h200" and made["ours"] > 0
    assert metrics["last_loss"] < metrics["first_loss"]
    kinds = [name for name in metrics if name.endswith("_predicted_ms")]
    assert len(kinds) >= 2 and all(metrics[name.replace("_predicted", "")] > 0 for name in kinds)


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert k3_slice.main(["k4-slice"]) == 2
    assert "k4-slice" in capsys.readouterr().err
