"""Layers of Kimi K3, GLM-5 and DeepSeek-V3.2 at full width on one H200, trained, beside the cost model's prediction.

``python benchmarks/k3_slice.py [k3-slice|k3-gated-dsa-slice|glm5-slice|v32-slice ...] [--layers N] [--tokens T]
[--fusions A,B,...] [--calibration FILE] [--without] [--append] [--self-test]``

As many layers as the cost model says fit, in the published order of kinds; LoRA r = 16 on attention, latent projections
and experts; Kimi K3's experts stay packed in MXFP4. A step is forward, backward, clip and AdamW with every layer
recomputed. Then each kind of layer runs alone on the inputs it had in the step. One result line a case: tokens a
second, peak and the time of each kind, beside what the product predicts for the same slice with the same kernels by
the newest calibration of an H200 among the results, and by the catalogue alone (``catalogue_...``). ``--without`` adds
a line of a short slice with no kernel installed, and each kind's ``_unfused_ratio``. ``k3-slice`` also assembles the
step of the 128-device plan from its layers. Lines are written as they are measured. ``--self-test`` runs tiny widths on
any device and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from k3_assembly import Assembled, Measured, assemble, kind_times
from k3_model import Slice
from k3_slice_model import Described, Sliced, build, described
from k3_slice_priced import Priced, calibration_of, fused_everywhere, fused_in, most_layers, newest_calibration, priced
from lines import append, line
from torch import Tensor, nn

from shardwright.runtime.launch.allocator import choose_allocator
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders

FUSIONS = ("experts", "router", "rms_norm", "kda", "mla", "dsa", "linear_cross_entropy")
K3_LAYERS = 93
IN_A_ROW = 4
"""Passes of a layer between two looks at the clock, where one is shorter than ``LONG_MS``."""
LONG_MS = 250.0
"""A pass in which the clock's wait for the device is nothing."""
SHORTEST = 3
"""Layers of a slice without kernels, whose chains of operators take the memory of several layers."""
TINY_K3 = {
    "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "routed_expert_hidden_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 8, "num_experts_per_token": 2, "vocab_size": 256,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "linear": {"num_heads": 2, "head_dim": 16},
}  # fmt: skip
TINY_LATENT = {
    "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_attention_heads": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256, "index_n_heads": 2, "index_head_dim": 16,
    "index_topk": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, the order of its layers, and what to train on."""

    name: str
    model: str
    order: tuple[str, ...]
    """Kinds in the order in which layers are added while they fit; all of the first three are always there."""
    tokens: int
    tiny: dict[str, Any]
    assembles: bool = False
    """Whether its layers are those of the 128-device plan."""

    def cut(self, layers: int, tiny: bool) -> Slice:
        return Slice(self.model, self.order[:layers], self.tiny if tiny else {})


DSA = ("dsa+dense", "dsa", "dsa", "dsa", "dsa", "dsa", "dsa")
CASES = {
    one.name: one
    for one in (
        Case(
            "k3-slice", "kimi_k3", ("kda+dense", "kda", "mla", "kda", "kda", "mla", "kda", "kda"), 4096, TINY_K3, True
        ),
        Case("k3-gated-dsa-slice", "kimi_k3", ("kda+dense", "kda", "dsa", "kda", "kda", "dsa"), 4096, TINY_K3),
        Case("glm5-slice", "glm_moe_dsa", DSA, 4096, TINY_LATENT),
        Case("v32-slice", "deepseek_v32", DSA, 4096, TINY_LATENT),
    )
}


@dataclass(frozen=True)
class Run:
    """What a device did: seconds of the steps, bytes, milliseconds of each kind of layer with their spread."""

    step_s: float
    weights: int
    peak: int
    losses: tuple[float, ...]
    kinds: dict[str, tuple[float, float]]
    trainable: int


@dataclass(frozen=True)
class Predicted:
    """By measured curves of such a device, and by the catalogue alone."""

    calibrated: Priced
    catalogue: Priced


def run(
    what: Described,
    tokens: int,
    fusions: tuple[str, ...],
    steps: int,
    dtype: torch.dtype,
    calibration: Calibration | None,
) -> tuple[Run, Predicted]:
    """Build, train some steps, then run each kind of layer alone."""
    side = build(what, fusions, dtype)
    fused = fused_in(side.model, fusions)
    predicted = Predicted(priced(what, tokens, fused, calibration), priced(what, tokens, fused))
    vocabulary = side.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(side.device.torch_device)
    weights = _allocated()
    losses = [side.step(ids)]
    _reset_peak()
    times = []
    for _ in range(steps):
        began = _clock()
        losses.append(side.step(ids))
        times.append(_clock() - began)
    peak = _peak()
    kinds = layer_times(side, ids, what, max(2, steps))
    trainable = sum(value.numel() for value in side.model.parameters() if value.requires_grad)
    found = Run(statistics.median(times), weights, peak, tuple(losses), kinds, trainable)
    del side
    _free()
    return found, predicted


def layer_times(side: Sliced, ids: Tensor, what: Described, repeats: int) -> dict[str, tuple[float, float]]:
    """Kind → (median milliseconds of forward, recomputation and backward; half the range in per cent of it)."""
    layers = list(decoder_layers(side.model).values())
    first = {kind.name: kind.layer_indices[0] for kind in what.profile.layer_kinds}
    seen: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[index] = _detached(args), _detached(kwargs)

        return hook

    hooks = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in first.values()]
    with torch.no_grad(), side.device.attention():
        side.loss(ids)
    for hook in hooks:
        hook.remove()
    found = {}
    for kind, index in first.items():
        passes = 1 if _one_layer(side, layers[index], *seen[index], passes=1) > LONG_MS else IN_A_ROW
        times = [_one_layer(side, layers[index], *seen[index], passes=passes) for _ in range(repeats)]
        middle = statistics.median(times)
        found[kind] = (middle, 50 * (max(times) - min(times)) / middle)
        side.optimizer.clear()
    return found


def _one_layer(side: Sliced, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, passes: int) -> float:
    """Milliseconds of one pass among several, so that the host is ahead of the device as it is in a step."""
    learning = [value.requires_grad_(True) for value in args if isinstance(value, Tensor) and value.is_floating_point()]
    began = _clock()
    with side.device.attention():
        for _ in range(passes):
            out = layer(*args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(torch.ones_like(out))
            for value in learning:
                value.grad = None
    return 1e3 * (_clock() - began) / passes


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return tuple(_detached(one) for one in value)
    return {key: _detached(one) for key, one in value.items()} if isinstance(value, dict) else value


def plain_name(kind: str) -> str:
    """A kind of layer as part of a metric's name."""
    return kind.replace("+", "_").replace("-", "_").replace("#", "_")


def fields(case: Case, suffix: str, what: Described, tokens: int, found: Run, predicted: Predicted) -> dict[str, Any]:
    """A result line: measured, predicted, and the prediction's errors in per cent."""
    modelled, catalogue_ms = predicted.calibrated.report, predicted.catalogue.report.time.step_ms
    metrics: dict[str, float] = {
        "layers": what.profile.shape.num_layers,
        "step_s": found.step_s,
        "predicted_step_s": modelled.time.step_ms / 1e3,
        "time_error_pct": abs(100 * (modelled.time.step_ms / 1e3 / found.step_s - 1)),
        "catalogue_step_s": catalogue_ms / 1e3,
        "catalogue_time_error_pct": abs(100 * (catalogue_ms / 1e3 / found.step_s - 1)),
        "weights_bytes": found.weights,
        "trainable": found.trainable,
        "first_loss": found.losses[0],
        "last_loss": found.losses[-1],
    }
    if found.peak:
        parts = {one.name: one.bytes for one in modelled.memory.components}
        reserve, unpacked = parts.get("runtime_reserve", 0), parts.get("unpacked_layer", 0)
        metrics |= {
            "predicted_peak_bytes": modelled.memory.peak_bytes,
            "predicted_reserve_bytes": reserve,
            "predicted_unpacked_layer_bytes": unpacked,
            "memory_error_pct": abs(100 * (modelled.memory.peak_bytes / found.peak - 1)),
        }
    for kind, (milliseconds, spread) in found.kinds.items():
        name = plain_name(kind)
        metrics |= {
            f"{name}_ms": milliseconds,
            f"{name}_spread_pct": spread,
            f"{name}_predicted_ms": predicted.calibrated.kinds[kind],
        }
    return {
        "bench": "k3-slice",
        "case": f"{case.name}/h200{suffix}",
        "passes": "step",
        "unit": "tok/s",
        "ours": round(tokens / found.step_s, 2),
        "peak_bytes": found.peak or None,
        "metrics": {name: round(float(value), 5) for name, value in metrics.items()},
    }


def assembled(
    found: Run, predicted: Priced, fused: FusedProviders, calibration: Calibration | None = None
) -> Assembled:
    """The step of FSDP2 × EP64 on 128 × H200 from the slice's layers."""
    from models import kimi_k3, recipe_for, targets_for

    model, cluster = kimi_k3("mxfp4"), load_cluster("h200-128")
    work = workload(model, recipe_for(batch=128, tokens=4096), targets_for(model, rank=16))
    strategy = ParallelStrategy(mesh=Mesh(replicate=2, ep=64), checkpointing="full", base_format="mxfp4")
    report = price(work, cluster, strategy, fused, calibration)
    exposed = sum(one.milliseconds for one in report.time.components if one.kind == "exposed_communication")
    kinds = kind_times(work, cluster, strategy, fused, calibration)
    names = {kind.kind.replace("linear+", "linear-attention+") for kind in kinds}
    measured = tuple(
        Measured(kind, milliseconds, predicted.kinds[kind], spread)
        for kind, (milliseconds, spread) in found.kinds.items()
        if kind in names
    )
    renamed = tuple(replace(kind, kind=kind.kind.replace("linear+", "linear-attention+")) for kind in kinds)
    return assemble(report.time.step_ms, exposed, renamed, measured)


def assembly_fields(made: Assembled, cluster: ClusterSpec) -> dict[str, Any]:
    metrics = {
        "modelled_step_ms": made.modelled_ms,
        "low_ms": made.low_ms,
        "high_ms": made.high_ms,
        **{f"uncertainty_{name}_ms": size for name, size in made.sources_ms.items()},
        **{f"correction_{plain_name(kind)}": value for kind, value in made.corrections.items()},
    }
    return {
        "bench": "k3-slice",
        "case": f"k3-assembled/{cluster.name}",
        "unit": "ms",
        "ours": round(made.step_ms, 3),
        "metrics": {name: round(float(value), 4) for name, value in metrics.items()},
    }


def measure(case: Case, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of one case, each as soon as it is measured."""
    tiny = bool(options.self_test)
    tokens = options.tokens or (64 if tiny else case.tokens)
    default = () if tiny else FUSIONS
    fusions = default if options.fusions is None else tuple(name for name in options.fusions.split(",") if name)
    calibration = calibration_of(options.calibration)
    layers = options.layers or SHORTEST
    if not tiny and not options.layers:
        layers = most_layers(lambda n: case.cut(n, False), len(case.order), SHORTEST, tokens, fusions, folder)
    what = described(case.cut(layers, tiny), folder / "slice")
    dtype = torch.float32 if tiny else torch.bfloat16
    found, predicted = run(what, tokens, fusions, options.steps, dtype, calibration)
    yield fields(case, f"-{layers}-layers" if options.layers else "", what, tokens, found, predicted)
    if case.assembles and not tiny and not options.layers:
        plan = fused_everywhere(fusions, K3_LAYERS, packed=True)
        made = assembled(found, predicted.calibrated, plan, calibration)
        yield assembly_fields(made, load_cluster("h200-128"))
    if options.without:
        short = described(case.cut(SHORTEST, tiny), folder / "short")
        plain, plain_predicted = run(short, tokens, (), 1, dtype, calibration)
        without = fields(case, "-unfused", short, tokens, plain, plain_predicted)
        without["metrics"] |= {
            f"{plain_name(kind)}_unfused_ratio": round(plain.kinds[kind][0] / milliseconds, 4)
            for kind, (milliseconds, _) in found.kinds.items()
            if kind in plain.kinds
        }
        yield without


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="k3_slice.py")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; the first unless told")
    parser.add_argument("--layers", type=int, default=0, help="so many layers, not as many as fit")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of the one sequence of a step")
    parser.add_argument("--steps", type=int, default=3, help="timed steps after one of warm-up")
    parser.add_argument("--fusions", help=f"operators to install, empty for none; {','.join(FUSIONS)} unless told")
    parser.add_argument("--without", action="store_true", help="one step more with no operator installed")
    parser.add_argument("--calibration", type=Path, default=newest_calibration(), help="measured curves to predict by")
    parser.add_argument("--append", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--self-test", action="store_true", help="tiny widths on any device; writes nothing")
    options = parser.parse_args(arguments)
    names = options.cases or ["k3-slice"]
    if unknown := [name for name in names if name not in CASES]:
        sys.stderr.write(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}\n")
        return 2
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for found in measure(CASES[name], options, Path(folder)):
                one = line(found)
                sys.stdout.write(one.model_dump_json() + "\n")
                sys.stdout.flush()
                if options.append and not options.self_test:
                    append([one])
    return 0


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _allocated() -> int:
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def _peak() -> int:
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    choose_allocator(os.environ)
    raise SystemExit(main())
