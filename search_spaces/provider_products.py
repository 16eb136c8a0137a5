"""What regions around dense products cost: merged projections, shared and latent experts, adapters.

Weights are frozen; adapters learn. A dense product reads both operands and writes its result once, whoever runs it:
providers differ in how many products there are and in what stands around them. Compiled, the products stay library
calls and everything elementwise between two of them is one kernel.

Legend: T rows, H input width, N output width, P projections, I expert width, L latent width, r rank, E experts,
b bytes per value.
"""

from __future__ import annotations

from shardwright.schemas.ops import OpCost
from shardwright.search_spaces.provider_chain import BYTES, Moves, Step, by_kernels, moved, product, steps_of
from shardwright.search_spaces.provider_norms import rms_norm


def _merged(op: str, provider: str, dtype: str, T: int, H: int, N: int, P: int) -> OpCost:
    """P projections of one input, N columns together.

    Eager and compiled read the input P times and add P gradients of it; ``merged`` is one product whose result is cut
    into views, so that backward first puts the P gradients side by side.
    """
    b = BYTES[dtype]
    x, y, weights = T * H * b, T * N * b, N * H * b
    flops = 2 * T * H * N
    if provider == "merged":
        forward = [product(T, H, N, b)]
        backward = [Step(y, y), product(T, N, H, b)]
    else:
        first, rest = Step(x + weights, y, flops), [Step(x, 0)] * (P - 1)
        forward = [first, *rest]
        products = [Step(y + weights, x, flops), *[Step(0, x)] * (P - 1)]
        sums: Moves = [(2 * x, x)] * (P - 1) if provider == "eager" else [(P * x, x)] * (P > 1)
        backward = [*products, *moved(sums)]
    shape = {"T": T, "H": H, "N": N, "P": P}
    floor = x + weights + y
    return by_kernels(
        op, provider, dtype, shape, (forward, backward), floor_bytes=(floor, floor), floor_flops=(flops, flops)
    )


def qkv_merge(provider: str, dtype: str, T: int, H: int, N: int, P: int) -> OpCost:
    """All projections at an attention's entrance."""
    return _merged("qkv_merge", provider, dtype, T, H, N, P)


def gate_up_merge(provider: str, dtype: str, T: int, H: int, N: int, P: int) -> OpCost:
    """Gate and up of an MLP."""
    return _merged("gate_up_merge", provider, dtype, T, H, N, P)


def shared_expert(provider: str, dtype: str, T: int, H: int, I: int, U: int = 2, P: int = 2, O: int = 0) -> OpCost:
    """``routed + [σ(x gᵀ) ·] down(act(gate x) · up x)``.

    Args:
        U: widths that the entrance makes: 2 with a gate, 1 without.
        P: products that make them: 1 where they are one matrix.
        O: 1 where a learned scalar gate opens the result.
    """
    b, eager = BYTES[dtype], provider == "eager"
    n, x, small, entrance = T * I * b, T * H * b, T * b, U * I * H * b
    products = 2 * T * H * U * I
    acts: Moves = [(n, n), (2 * n, n)][: max(1, U)] if eager else [(U * n, n)]
    back_acts: Moves = [(2 * n, n)] * (2 * U - 1) if eager else [((U + 1) * n, U * n)]
    into = [Step(P * x + entrance, U * n, products), *[Step(0, 0)] * (P - 1)]
    back_into = [Step(U * n + entrance, P * x, products), *[Step(0, 0)] * (P - 1)]
    opening, back_opening = _opening(T, H, b, eager=eager) if O else ([], [])
    tail = Step(2 * x + (0 if eager else O * small), x)
    paths = P + O
    sums: Moves = [(2 * x, x)] * (paths - 1) if eager else [(paths * x, x)] * (paths > 1)
    forward = [*into, *moved(acts), product(T, I, H, b), *opening, tail]
    backward = [*back_opening, product(T, H, I, b), *moved(back_acts), *back_into, *moved(sums)]
    flops = 2 * T * H * I * (U + 1) + 2 * T * H * O
    floor = (U + 1) * I * H * b + O * H * b
    return by_kernels(
        "shared_expert",
        provider,
        dtype,
        {"T": T, "H": H, "I": I, "U": U, "P": P, "O": O},
        (forward, backward),
        floor_bytes=(floor + 3 * x, floor + 2 * x),
        floor_flops=(flops, 2 * T * H * I * (U + 1)),
        saved=n,
    )


def _opening(T: int, H: int, b: int, *, eager: bool) -> tuple[list[Step], list[Step]]:
    """``σ(x gᵀ) · y`` forward and backward; compiled, sigmoid and product belong to the sum behind them."""
    x, small = T * H * b, T * b
    forward, outer = [product(T, H, 1, b)], Step(small + H * b, x)
    if not eager:
        return forward, [Step(2 * x + small, x + small), outer]
    return [*forward, *moved([(small, small), (x + small, x)])], [
        *moved([(x + small, x), (2 * x, small), (2 * small, small)]),
        outer,
    ]


def latent_moe(provider: str, dtype: str, T: int, H: int, L: int, norms: int = 0) -> OpCost:
    """The projections down to the experts' width and up again, with a norm before and after the experts or without.

    What the experts read and give is counted as an output and an input of the region.
    """
    b, parts = BYTES[dtype], [rms_norm(provider, dtype, T, L) for _ in range(norms)]
    forward = [product(T, H, L, b), product(T, L, H, b)]
    backward = [product(T, H, L, b), product(T, L, H, b)]
    for norm in parts:
        forward += steps_of(norm.forward)
        assert norm.backward is not None
        backward += steps_of(norm.backward)
    flops, floor = 4 * T * H * L, 2 * (H * L + T * (H + L)) * b
    return by_kernels(
        "latent_moe",
        provider,
        dtype,
        {"T": T, "H": H, "L": L, "norms": norms},
        (forward, backward),
        floor_bytes=(floor, floor),
        floor_flops=(flops, flops),
    )


def lora_linear(provider: str, dtype: str, T: int, H: int, N: int, r: int, E: int = 1) -> OpCost:
    """``y = x Wᵀ + s (x Aᵀ) Bᵀ``: three products, a scale, a sum; backward makes dx, dA and dB.

    Args:
        E: matrices of each kind where every row chooses one; all are counted as read.
    """
    b, eager, used = BYTES[dtype], provider == "eager", min(E, T)
    x, y, low = T * H * b, T * N * b, T * r * b
    forward = [product(T, H, N, b, stacks=used), product(T, H, r, b, stacks=used), product(T, r, N, b, stacks=used)]
    forward += moved([(y, y), (2 * y, y)] if eager else [(2 * y, y)])
    learned = [
        Step(y + low, used * r * N * b, 2 * T * r * N),
        product(T, N, r, b, stacks=used),
        Step(x + low, used * r * H * b, 2 * T * r * H),
    ]
    backward = [product(T, N, H, b, stacks=used), Step(y, y), *learned, product(T, r, H, b, stacks=used)]
    backward += [Step(2 * x, x)]
    base, adapter = 2 * T * H * N, 2 * T * r * (H + N)
    weights, factors = used * H * N * b, used * r * (H + N) * b
    return by_kernels(
        "lora_linear",
        provider,
        dtype,
        {"T": T, "H": H, "N": N, "r": r, "E": E},
        (forward, backward),
        floor_bytes=(weights + factors + x + y, weights + 2 * factors + 2 * x + y),
        floor_flops=(base + adapter, base + 2 * adapter),
        saved=low,
    )
