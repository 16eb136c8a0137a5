"""What attention takes and frees, in order, from ``y1`` to ``o`` and back from the gradient of ``o`` to ``gy``.

Read off traces of the executor over fake tensors (``benchmarks/trace_points.py``) and, for chunked linear attention,
off the allocator's record of a step on one H200. See ``sequence_layers``.

Legend: b bytes per value, r_q, r_kv latent widths, n heads, d_n + d_r query and key head, d_v value head, W = n·d of
linear attention, C tokens of a chunk, S tokens of a sequence.
"""

from __future__ import annotations

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.linear_attention import CHUNK, FAMILY_CHUNKS, linear_attention_bytes, unfused_chunks
from shardwright.search_spaces.cost.sequence import Passage
from shardwright.search_spaces.cost.workload import LayerWork, Workload
from shardwright.search_spaces.cost.workspaces import attention_workspace_bytes

CHOICES = frozenset(("c8", "c4"))
"""What sparse attention's recomputation takes from the first forward."""

MOST_PIECES = 64
"""Chunks of unfused linear attention that are run; of longer sequences several together."""


def attention_passage(work: Workload, layer: LayerWork, fused: FusedProviders) -> Passage:
    """From ``y1`` to ``o``, and from ``g`` to ``gy``."""
    if layer.kind.attention == "none":
        return Passage("+o", "+gy", {"o": work.base_bytes * work.hidden, "gy": work.base_bytes * work.hidden})
    if layer.kind.attention == "linear":
        return _linear(work, layer, fused)
    return _latent(work, layer, fused) if work.latent(layer) else _softmax(work, layer, fused)


def _softmax(work: Workload, layer: LayerWork, fused: FusedProviders) -> Passage:
    """Queries, keys and values, norms over heads, rotation, attention."""
    b, Q, K = work.base_bytes, work.query_width, work.key_width
    eager = fused.provider("qk_norm_rope") == "eager"
    taken, turned, gradient = "+@", "+@_r ?@" if work.head_norms else "+@_r -@", "+gz -g@ -@ -gz"
    if eager and work.head_norms:
        taken += " +@_copy +@_t -@_t +@_t ?@_copy +@_low +@_n -@_low -@_t -@"
        gradient = "+@_low -@_c +@_t -@_low +@_u +@_d -@_u -@_t +@_t +@_u +@_v +@_w -@_v -@_u -@_copy -@_t -@_w"
        gradient += " +@_low -@_d +gz -@_low -gz"
    elif eager or not work.head_norms:
        gradient = f"+gz -{'@_c' if eager else 'g@'} -gz"
    if eager:
        turned = f"+@_x +@_h +@_c -@_h +@_y -@_c +@_r -@_x -@_y -@{'_n' if work.head_norms else ''}"
    back = "+@_x +@_h +@_c -@_h +@_y -@_x -@_y +@_x -g@ -@_x" if eager else ""

    def of(words: str, *names: str) -> str:
        return " ".join(words.replace("@", name) for name in names)

    forward = f"{of(taken, 'q', 'k')} +v {of(turned, 'q', 'k')} +a +o ?a ?q_r ?k_r ?v"
    backward = f"+ga +gq +gk +gv -a -q_r -k_r -v -ga {of(back, 'q', 'k')} +gy -gv {of(gradient, 'k', 'q')}"
    sizes: dict[str, float] = {"o": b * work.hidden, "gy": b * work.hidden, "gz": b * work.hidden}
    sizes |= {"a": b * Q, "ga": b * Q, "v": b * K, "gv": b * K}
    for one, width in (("q", Q), ("k", K)):
        narrow = (f"{one}_{part}" for part in ("n", "low", "x", "c", "y", "r"))
        sizes |= dict.fromkeys((one, f"g{one}", *narrow), float(b * width)) | {f"{one}_h": b * width / 2}
        sizes |= dict.fromkeys((f"{one}_{wide}" for wide in ("copy", "t", "u", "v", "w", "d")), 4.0 * width)
    return Passage(forward, backward, sizes)


def _latent(work: Workload, layer: LayerWork, fused: FusedProviders) -> Passage:
    """Compressed queries and keys, their expansion, the indexer where attention is sparse, attention.

    An unfused indexer has the fp32 scores of every head over the sequence twice at a time. What it chooses, ``c8`` and
    ``c4``, stands until the backward of a layer that is recomputed.
    """
    shape, b, n = work.profile.shape, work.base_bytes, work.profile.shape.num_attention_heads
    nope, turned, S = shape.qk_nope_head_dim, shape.qk_rope_head_dim, work.recipe.batch.sequence_tokens
    eager = fused.norms(work.profile.shape.num_layers)["eager"] >= 1
    sparse = layer.kind.attention == "dsa"
    unfused = sparse and fused.provider("dsa") == "eager"
    squeezed = "+@ +@c +@t -@t +@t ?@c +@l +@n -@l -@t -@" if eager else "+@ +@n ?@"
    rotated = "+t1 +t2 +t3 -t1 -t2 +t4 +t5 +t6 -t4 -t5 +rot -t6 -t3"
    forward = [squeezed.replace("@", "lq"), "+q", squeezed.replace("@", "lk"), rotated, "+qq +kv +kk"]
    if unfused:
        turn = "+u1 +u2 +u3 -u1 -u2 +u4 +u5 +u6 -u4 -u5 +iu -u6 -u3"
        forward += ["+iq", turn, "+ic +if +s1 -if +s2 -s1 +s1 -s2 +ix +no +im -no -ix +top +c8 -top +cl +ga4 -ga4 +c4"]
        forward += ["-cl -ic -iu -iq -s1 -im +on +cl +sel -on -cl +no +mask -no +bias +a ?bias +aa ?a +o"]
        forward += [f"{'?' if layer.adapters.attention_out else '-'}aa -mask"]
    elif sparse:
        forward += ["+iq +c4 -iq +a +o ?a"]
    else:
        forward += ["+a +o ?a"]
    forward += ["-lqn -q -rot -lkn ?qq ?kk ?kv", "-sel -c8 -c4" if unfused else "-c4" if sparse else ""]
    backward = ["+ga", "-aa" if unfused and layer.adapters.attention_out else "", "+gq +gk +gv -a -kv -qq -kk"]
    backward += ["-bias" if unfused else ""]
    backward += ["-ga +g1 -gq +g2 -gk -gv +g3 -g2 +gy -g3 +gz -g1 -gz", "-lqc -lkc" if eager else "-lq -lk"]
    query, H = float(b * n * (nope + turned)), float(b * work.hidden)
    sizes = dict.fromkeys(("q", "qq", "kk", "gq", "gk", "g1"), query) | dict.fromkeys(("o", "gy", "gz"), H)
    sizes |= dict.fromkeys(("a", "aa", "ga", "gv"), float(b * n * shape.v_head_dim))
    sizes |= dict.fromkeys(("kv", "g2", "g3"), float(b * n * (nope + shape.v_head_dim)))
    sizes |= dict.fromkeys((f"t{i}" for i in range(1, 7)), b * n * turned / 2) | {"rot": float(b * n * turned)}
    for name, width in (("lq", shape.q_lora_rank), ("lk", shape.kv_lora_rank)):
        sizes |= dict.fromkeys((name, f"{name}n", f"{name}l"), float(b * width))
        sizes |= dict.fromkeys((f"{name}c", f"{name}t"), 4.0 * width)
    index, heads = min(shape.index_topk, S), shape.index_num_heads
    sizes |= {"c8": 8.0 * index, "cl": 8.0 * index, "c4": 4.0 * index, "ga4": 4.0 * index, "top": 4.0 * index}
    sizes |= dict.fromkeys(("iq", "ic"), float(b * heads * shape.index_head_dim)) | {
        "if": 4.0 * heads * shape.index_head_dim
    }
    sizes |= dict.fromkeys((f"u{i}" for i in range(1, 7)), b * heads * turned / 2) | {"iu": float(b * heads * turned)}
    sizes |= dict.fromkeys(("s1", "s2"), 4.0 * heads * S) | dict.fromkeys(("ix", "im"), 4.0 * S)
    sizes |= dict.fromkeys(("no", "on", "sel", "mask"), float(S)) | {"bias": float(b * S)}
    return Passage(" ".join(forward), " ".join(backward), sizes)


def _linear(work: Workload, layer: LayerWork, fused: FusedProviders) -> Passage:
    """Linear attention: what a library keeps and its workspace, or transformers' chunked chain."""
    b, H, W = float(work.base_bytes), work.hidden, work.linear_width
    out = ("?ao", "-ao") if layer.adapters.attention_out else ("-ao", "")
    sizes = {"o": b * H, "gy": b * H, "gz": b * H, "ao": b * W}
    if unfused_chunks(work, fused) and work.profile.model_type not in FAMILY_CHUNKS:
        return _chunked(work, out, sizes)
    sizes["all"] = linear_attention_bytes(work, fused)
    sizes["fore"] = attention_workspace_bytes(work, layer, fused, False)
    sizes["back"] = attention_workspace_bytes(work, layer, fused, True)
    return Passage(f"+all +fore -fore +ao ?all +o {out[0]}", f"{out[1]} +back -all -back +gy", sizes)


def _chunked(work: Workload, out: tuple[str, str], sizes: dict[str, float]) -> Passage:
    """The chain of transformers' classes: convolution, gate, chunks, and the gated norm behind them.

    ``s``: squares [T, C, W]; ``p``: one chunk's part of such a square, kept; ``r``: rows that solve each chunk's
    triangle, kept; ``z``: gradients that all chunks add to. In backward each chunk's part of a square's gradient is
    written into zeros of the whole, ``sum``.
    """
    shape, W, C = work.profile.shape, work.linear_width, CHUNK
    heads, chunks = shape.linear_num_heads or shape.num_attention_heads, work.recipe.batch.sequence_tokens / C
    pieces, rows = max(1, min(MOST_PIECES, int(chunks))), range(1, C)
    solved = " ".join(f"+r{i} +rt{i} -rt{i} ?r{i}" for i in rows)
    parts = " ".join(f"+p{i} +p -p ?p{i}" for i in range(pieces))
    forward = f"""
        +bq +bk +bv +cin -bv -bk -bq +cc +cout ?cin -cc +conv ?cout
        +bq +t +f -t +fb +f1 +f2 ?f1 +u ?f2 +v ?fb -u +f3 -bq -f -v
        +bq +q -bq +bk +k -bk +bv +v -bv +g +t -t +qn ?q +t -t +kn ?k +t +qs -t -qn +kp -kn +vp -v +u -g +vb +kb +cum -u
        +s1 +s2 -s1 +e -s2 +kk +s1 ?kk +h -s1 +h2 -h {solved} +so -h2 +sol ?vp +fe +fk ?fe +w ?fk +out
        {parts} +t +ob -t -out -sol -cum ?vb ?kb ?e ?w ?qs ?kp ?so
        +bq +nc +t -t +t ?nc +nw -t +t +sg -t +t +ao -t ?sg ?nw -ob -bq +o {out[0]} -conv -f3"""
    first = pieces - 1
    backward = f"""
        +h {out[1]} +t -h +u +v -nw -t +t -sg -u +h -t +t -v +u +v -u -t +n1 +n2 +n3 +n4 -n3 -n2 -nc -n1 -n4
        +h2 -v -h +gz +t -h2 +out -t
        +z0 +p +pr -p{first} +sum -p +p +pp -pp -p -pr +z1 +z2 +z3 +z4"""
    for i in reversed(range(first)):
        names = ("out", "out2") if (first - i) % 2 else ("out2", "out")
        backward += f" +{names[1]} -{names[0]} +t -t +p +pr -p{i} +s1 -p -s1 +p +pp -pp -p -pr" + " +t -t" * 4
    backward += f" -{'out2' if first % 2 else 'out'} -w -qs +t +h -fk -z0 +u +za -t +v -fe -u -v +zb +h2 -so -vb -z2"
    backward += " +h3 -h -h2 +h -h3"
    for i in reversed(rows):
        backward += f" +x{i} +rt{i} -r{i} -rt{i} +h3 -x{i} -h3 +h3 -h -h3 +h"
    backward += """
        +s1 +s2 -kk -h -s1 +s3 +s4 -kb +t -s4 +u -s3 -s2 -u -t +s1 -e -sum +s2 -s1 +s3 +t +u -s3 -s2 -u -t
        +t +u +v -u -t -z1 +t +u -kp -t -za +vg -z3 -u +t +u -vp -t -zb +ya -v +yb -u +yc -vg +t -z4 +yd -t
        +t +u +v +n1 -v -u -t +ye -n1 -yc +t +u -k -u -t +t +u +v +n1 -v -u -t +yf -n1 -yd +t +u -q -u -t
        +h -yb +h2 -ye +h3 -yf +gy -gz +t -ya +u +v -fb -t +n1 -f2 -u +n2 -f1 -n1 -n2 +bq -v -bq
        +bq -h +bk -h2 +bv -h3 +ci -bv -bk -bq +cc -ci +ci -cout -cc +cc -ci +ci +conv -ci -cin -cc -conv"""
    wide, half, whole, tall = 4.0 * W, 2.0 * W, 6.0 * W, 4.0 * W * C
    same_width = (
        "t u v f f1 f2 f3 q k g qn kn qs kp vp vb kb cum sol fe fk w out out2 nc nw sg n1 n2 n3 n4 z0 z1 z2 z3 z4 za zb"
    )
    sizes |= dict.fromkeys((*same_width.split(), "vg", "ya", "yb", "yc", "yd", "ye", "yf"), wide)
    sizes |= dict.fromkeys(("bq", "bk", "bv", "ob"), half) | dict.fromkeys(("cin", "cout", "cc", "conv", "ci"), whole)
    sizes |= dict.fromkeys(("h", "h2", "h3", "so"), 4.0 * heads * C) | {"fb": W}
    sizes |= dict.fromkeys(("s1", "s2", "s3", "s4", "e", "kk", "sum"), tall)
    sizes |= dict.fromkeys(("p", "pp", "pr", *(f"p{i}" for i in range(pieces))), tall / pieces)
    for i in rows:
        sizes |= dict.fromkeys((f"r{i}", f"rt{i}", f"x{i}"), 4.0 * heads * i * i / C)
    return Passage(forward, backward, sizes)
