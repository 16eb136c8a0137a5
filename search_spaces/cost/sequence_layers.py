"""What a layer, and head with loss, take and free, in order: the family's own modules under the runtime's executor.

Read off traces of the executor over fake tensors (``benchmarks/trace_points.py``): every tensor of about the hidden
width or more. ``x`` is a layer's input, ``y1`` and ``y2`` what its blocks read, ``x2`` what stands between them, ``x3``
its result; ``g`` the gradient of the result, into which those of the blocks are added in place, ``gy`` that of what a
block reads.

Legend: H hidden, b bytes per value, I width of an MLP or of an expert, K experts per token, V vocabulary.
"""

from __future__ import annotations

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.sequence import Passage, apart, joined
from shardwright.search_spaces.cost.sequence_attention import CHOICES, attention_passage
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.cost.workspaces import OVERWRITING

SHARED = frozenset(("x", "x2", "x3", "y1", "y2", "o", "gx", "gy"))
"""Tensors that pass between the pieces of a layer."""

REPEATED = frozenset(f"a.{name}" for name in CHOICES)
"""What a recomputation takes from the first forward."""


def layer_passage(work: Workload, layer: LayerWork, fused: FusedProviders, headless: bool = False) -> Passage:
    """A decoder layer: norm, attention, sum, norm, MLP or experts, sum.

    Args:
        headless: no gradient reaches its attention, which keeps nothing.
    """
    H, b = work.hidden, work.base_bytes
    fp32 = fused.norms(work.profile.shape.num_layers)["eager"] >= 1
    adapted = layer.adapters.attention_widths > 0
    leaves = "-" if fp32 else "?"
    read = Passage(f"{'?' if adapted else '-'}y1", sizes={"y1": b * H})
    given_back = Passage(backward="-y1" if adapted else "")
    middle = Passage(f"+x2 -o {leaves}x", sizes={"x2": b * H, "x": b * H, "o": b * H})
    end = Passage(f"+x3 -o {leaves}x2", sizes={"x3": b * H})
    before = Passage("", f"-gx{'' if fp32 else ' -x'}", {"gx": b * H, "gy": b * H})
    between = Passage("", f"-gx{'' if fp32 else ' -x2'}")
    attention = apart(attention_passage(work, layer, fused), "a.", SHARED)
    mlp = apart(mlp_passage(work, layer, fused), "m.", SHARED)
    upper = joined([before, norm("y1", H, fp32, b), given_back, attention, read, middle])
    if headless:
        upper = Passage(upper.forward.replace("?", "-"), "", upper.sizes)
    return joined([upper, between, norm("y2", H, fp32, b), mlp, end])


def head_passage(work: Workload, fused: FusedProviders) -> Passage:
    """Final norm, head and loss. Unfused: logits, their fp32 copy and log-softmax; two fp32 gradients."""
    H, V, b = work.hidden, work.vocabulary, work.base_bytes
    fp32 = fused.norms(work.profile.shape.num_layers)["eager"] >= 1
    last = norm("y", H, fp32, b)
    sizes = {"logits": b * V, "wide": 4 * V, "kept": 4 * V, "of_kept": 4 * V, "of_wide": 4 * V}
    if fused.provider("linear_cross_entropy") == "eager":
        forward = "+logits -y +wide +kept -logits -wide"
        backward = "+of_kept +of_wide -of_kept -kept +logits -of_wide +gy -logits"
    else:
        forward, backward = "-y", "+gy"
    leaves = Passage("-x", "", {"x": b * H}) if fp32 else Passage("?x", sizes={"x": b * H})
    before = Passage(backward="" if fp32 else "-x")
    return joined([before, last, leaves, Passage(forward, backward, {**sizes, "y": b * H, "gy": b * H})])


def norm(name: str, width: float, fp32: bool, base: int) -> Passage:
    """RMSNorm over values of ``width``. Eager keeps an fp32 copy of its input; an operator keeps nothing new.

    Its result is ``name``; its backward turns ``gy`` into ``gx``.
    """
    if not fp32:
        return Passage(f"+{name}", "+gx -gy", {name: base * width, "gx": base * width, "gy": base * width})
    forward = f"+@copy +@t -@t +@t ?@copy +@low +{name} -@low -@t"
    backward = "+@low -gy +@t -@low +@u +@d -@u -@t +@t +@u +@v +@w -@v -@u -@copy -@t -@w +gx -@d"
    wide = dict.fromkeys((f"{name}.{one}" for one in ("copy", "t", "u", "v", "w", "d")), 4.0 * width)
    narrow = dict.fromkeys((name, f"{name}.low", "gx", "gy"), float(base * width))
    return Passage(forward.replace("@", f"{name}."), backward.replace("@", f"{name}."), {**wide, **narrow})


def mlp_passage(work: Workload, layer: LayerWork, fused: FusedProviders) -> Passage:
    """From ``y2`` to ``o``: a dense MLP, or routed experts with the shared ones behind them."""
    H, b = work.hidden, work.base_bytes
    sizes: dict[str, float] = {"o": b * H, "o2": b * H, "gy": b * H, "gz": b * H, "y2": b * H}
    kept = layer.adapters.mlp_in or (layer.adapters.experts_in and fused.kernel("experts") == "moe_layer")
    leaves, ends = ("?y2", "-y2") if kept else ("-y2", "")
    if not layer.routed:
        dense = _dense(work, layer, fused, "o", "gy")
        return joined([Passage(backward=ends, sizes=sizes), dense, Passage(leaves)])
    routed = _routed(work, layer, fused)
    if not layer.mlp_width:
        return joined([Passage(backward=ends, sizes=sizes), routed, Passage(leaves)])
    shared = _dense(work, layer, fused, "o2", "gz")
    return joined([Passage(backward=f"-gz {ends}", sizes=sizes), routed, shared, Passage(f"-o2 {leaves}")])


def _dense(work: Workload, layer: LayerWork, fused: FusedProviders, out: str, gradient: str) -> Passage:
    size = float(work.base_bytes * layer.mlp_width)
    last = ("?d.m", "-d.m") if layer.adapters.mlp_out else ("-d.m", "")
    if fused.provider("swiglu") == "eager":
        forward = f"+d.g +d.s ?d.g +d.u +d.m ?d.s ?d.u +{out} {last[0]}"
        backward = f"+d.m2 {last[1]} +d.a +d.b -d.s -d.u -d.m2 +d.c -d.g -d.b +d.o -d.a +{gradient} -d.c -d.o"
    else:
        forward = f"+d.g +d.u +d.m ?d.g ?d.u +{out} {last[0]}"
        backward = f"+d.m2 {last[1]} +d.a +d.c -d.g -d.u -d.m2 +d.o -d.a +{gradient} -d.c -d.o"
    names = ("g", "s", "u", "m", "m2", "a", "b", "c")
    H = float(work.base_bytes * work.hidden)
    return Passage(
        forward, backward, {**dict.fromkeys((f"d.{one}" for one in names), size), "d.o": H, out: H, gradient: H}
    )


def _routed(work: Workload, layer: LayerWork, fused: FusedProviders) -> Passage:
    """Rows gathered by expert, gate and up, activation, down, weighting and sum; adapters add in place."""
    b, lora, rows = work.base_bytes, layer.adapters, work.profile.shape.experts_per_token
    row, inner = float(rows * b * work.row_width), float(rows * b * work.profile.shape.expert_intermediate_size)
    sizes = dict.fromkeys(("xs", "d", "w", "t", "ga", "gb", "lo"), row) | dict.fromkeys(
        ("si", "mi", "a", "c", "e"), inner
    )
    sizes |= {"gu": 2 * inner, "lu": 2 * inner, "gm": inner, "lm": inner, "o": b * work.hidden, "gy": b * work.hidden}
    down_in, rows_in = ("?", "-mi ") if lora.experts_out else ("-", ""), lora.experts_in
    adapted = bool(lora.experts_in or lora.experts_out)
    if fused.provider("experts") == "eager":
        added, mid = ("+lu -lu ", "+lo -lo ") if adapted else ("", "")
        forward = f"+xs +gu {added}+si +mi ?si +d {mid}{down_in[0]}mi {'?' if rows_in else '-'}xs ?gu +w +t +o -t -w ?d"
        backward = (
            f"+t +gb -t +t +w -w -d -t {down_in[1]}+gm {'+lm -lm ' if adapted else ''}-gb +a +c -si -gm +e -gu -c "
        )
        backward += f"+lu -e -a {'-xs ' if rows_in else ''}+gb {mid}-lu +t +gy -t -gb"
        return Passage(forward, backward, sizes)
    mi = ("+mi ", "?mi ", "-mi ") if adapted else ("", "", "")
    before = mi[2] if adapted else "+gm -gm "
    if fused.kernel("experts") == "moe_layer":
        return Passage(f"+gu {mi[0]}+d +o -d ?gu {mi[1]}", f"{before}+gb -gu +gy -gb", sizes)
    xs = ("?xs", "-xs ") if adapted else ("-xs", "")
    over = fused.kernel("experts") in OVERWRITING
    forward = f"+xs +gu {mi[0]}+d {mi[1]}{xs[0]} ?gu +o ?d"
    backward = f"+gb -d {before}{xs[1]}+ga -gu" if over else f"+gb -d +lu {mi[2]}-gu {xs[1]}+ga -lu"
    return Passage(forward, f"{backward} -gb +gy -ga", sizes)
