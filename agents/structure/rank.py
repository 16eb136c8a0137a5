"""Providers of a region on a target device: time from counted work, or a measured time where there is one.

The base is frozen, so backward is the gradient of activations alone.
Legend: T tokens of one sequence on one rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.agents.structure.kernel_oracle import OPERANDS
from shardwright.agents.structure.measured import find, verified
from shardwright.agents.structure.patterns.base import Match, VariantSpec
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.errors import KernelError
from shardwright.schemas.fusion import Gain, Variant, VariantPredicate
from shardwright.schemas.ops import EvidenceOrigin, OpCost, OperatorCall, PassCost, PassName
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.cost.compute import flops_rate, op_time_ms
from shardwright.search_spaces.provider_libraries import Library, libraries
from shardwright.search_spaces.providers import REWRITTEN, provider_cost

MODELLED_PASS: PassName = "fwd+dx"
Parts = tuple[tuple[str, dict[str, int]], ...]
"""Operators with their named sizes, one after the other."""


@dataclass(frozen=True)
class Target:
    """What regions are ranked for."""

    cluster: ClusterSpec
    profile: CheckpointProfile
    recipe: Recipe
    evidence: tuple[Path, ...] = ()
    """Files of measured times, JSON lines, the user's own last; a later file goes before an earlier one."""
    packed: Mapping[str, str] | None = None
    """Parameter → storage format where it is not plain; ``None`` where it is not known which, only that some are."""

    @property
    def tokens(self) -> int:
        """One sequence: the smallest micro-batch of a rank."""
        return self.recipe.batch.sequence_tokens

    @property
    def dtype(self) -> str:
        return self.recipe.precision.base

    def stored(self, match: Match) -> dict[str, str]:
        """A region's packed parameters with their format; every one of them where it is not known which are packed."""
        if self.packed is not None:
            return {name: self.packed[name] for name in match.all_parameters() if name in self.packed}
        formats = sorted({packing.format for packing in self.profile.packing} - {"plain"})
        return {name: ", ".join(formats) for name in match.all_parameters()} if formats else {}


@dataclass(frozen=True)
class Timing:
    """Time of one provider for one occurrence, forward and backward."""

    time_ms: float
    floor_ms: float
    origin: EvidenceOrigin
    basis: str
    files: tuple[str, ...] = ()
    """The user's own files that it was measured in, by hash."""
    calls: tuple[OperatorCall, ...] = ()
    """What was timed, in order."""


def variants(match: Match, target: Target, *, adapted: bool) -> tuple[Variant, ...]:
    """All ways to run a region with their gains: the usable ones, the unusable, libraries' ones; each fastest first.

    Args:
        adapted: whether a LoRA target lies inside the region.
    """
    whole = ((match.pattern.name, match.pattern.cost_shape(match, target.tokens)),)
    eager = timing_of(whole, "eager", target) if match.pattern.costed else None
    made = [_variant(match, spec, target, whole, eager, adapted) for spec in match.pattern.variants()]
    if eager is not None:
        made += [_rival(match, library, parts, target, eager) for library, parts in rivals(match, target)]
    return tuple(sorted(made, key=_order))


def _order(variant: Variant) -> tuple[bool, bool, float, str]:
    time_ms = variant.gain.time_ms if variant.gain else float("inf")
    return not variant.available, variant.rival, time_ms, variant.name


def _variant(
    match: Match, spec: VariantSpec, target: Target, whole: Parts, eager: Timing | None, adapted: bool
) -> Variant:
    because, unranked = _unavailable(match, spec, target, adapted), match.pattern.unranked(match, spec)
    ours, gain = spec.provider == "shardwright", None
    if ours and not registered(spec.op):
        unranked = f"no operator {spec.op} exists"
    if eager is None:
        unranked = "its providers are not described"
    elif not unranked:
        parts = match.pattern.kernel_parts(match, spec, target.tokens) if ours else whole
        own = eager if spec.provider == "eager" else timing_of(parts, spec.provider, target)
        gain = _gain(spec.provider, own, eager)
    return Variant(
        name=spec.name,
        provider=spec.provider,
        op=spec.op,
        predicate=spec.predicate,
        gain=gain,
        available=not because,
        unavailable_because=because,
        unranked_because=unranked,
        way="" if because else match.pattern.way(match, spec, target.recipe, target.cluster.device),
    )


def rivals(match: Match, target: Target) -> tuple[tuple[Library, Parts], ...]:
    """Libraries that compute a region, by its own name or by the operators of a variant of ours, each once."""
    pattern = match.pattern
    candidates: list[Parts] = [((pattern.name, pattern.cost_shape(match, target.tokens)),)]
    for spec in pattern.variants():
        ours = spec.provider == "shardwright" and spec.computes(match.constants) and registered(spec.op)
        if ours and not pattern.unranked(match, spec):
            candidates.append(pattern.kernel_parts(match, spec, target.tokens))
    found: dict[str, tuple[Library, Parts]] = {}
    for parts in candidates:
        for library in libraries(tuple(op for op, _ in parts), match.constants):
            found.setdefault(library.provider, (library, parts))
    return tuple(found.values())


def _rival(match: Match, library: Library, parts: Parts, target: Target, eager: Timing) -> Variant:
    """A library's way: ranked, never available."""
    beside = [v.predicate for v in match.pattern.variants() if v.op == parts[0][0]]
    own = timing_of(parts, library.provider, target, library.source)
    return Variant(
        name=library.provider,
        provider=library.provider,
        op="-",
        predicate=beside[0] if beside else VariantPredicate(device_types=("cuda",)),
        gain=_gain(library.provider, own, eager),
        available=False,
        unavailable_because=library.not_installable,
        rival=True,
    )


def _unavailable(match: Match, spec: VariantSpec, target: Target, adapted: bool) -> str:
    """Why a variant cannot run here; empty where it can."""
    device = target.cluster.device.type
    if device not in spec.predicate.device_types:
        return f"needs {' or '.join(spec.predicate.device_types)}; the cluster has {device}"
    if spec.not_installable:
        return spec.not_installable
    if not spec.computes(match.constants):
        return f"computes {' or '.join(spec.forms)}; the region is {match.constants.get('form')}"
    if refused := match.pattern.refuses(match, spec):
        return refused
    if refused := unverified(match, spec, target.evidence):
        return refused
    if adapted and (refused := match.pattern.refuses_adapter(spec, target.recipe.lora)):
        return refused
    if refused := _stored_otherwise(match, spec, target):
        return refused
    if spec.provider == "shardwright":
        return _outside_contract(match, spec.op, target) if registered(spec.op) else f"no operator {spec.op} exists"
    return ""


def unverified(match: Match, spec: VariantSpec, files: tuple[Path, ...] = ()) -> str:
    """Operators that no device has verified, and what does so; empty where a plan may run all that the variant runs.

    Args:
        files: measured times beside those that come with the package.
    """
    missing = [op for op in match.pattern.must_verify(match, spec) if not verified(op, files)]
    if not missing:
        return ""
    bench = f"`shardwright kernels bench {' '.join(missing)} --evidence FILE`"
    return (
        f"no device has verified {', '.join(missing)} at its present source: {bench} does, for `plan --evidence FILE`"
    )


def _stored_otherwise(match: Match, spec: VariantSpec, target: Target) -> str:
    """A parameter that the files do not hold as a variant needs it; empty where all are."""
    for name, form in target.stored(match).items():
        if form not in spec.predicate.packing:
            return f"{name} is stored as {form}"
    if spec.packed and target.packed is None:
        return "which parameters are packed is not known"
    plain = [name for name in match.all_parameters(spec.packed) if name not in (target.packed or {})]
    return f"{plain[0]} is stored plainly" if plain else ""


def _outside_contract(match: Match, op: str, target: Target) -> str:
    """Why an operator's own contract refuses these sizes and formats; empty where it accepts them."""
    contract = importlib.import_module(f"shardwright.kernels.{op}.contract")
    dtype = getattr(torch, target.dtype)
    try:
        if match.pattern.check_kernel(match, op, dtype):
            return ""
    except KernelError as error:
        return error.what
    tensors = []
    for role in OPERANDS[op]:
        spec = match.region.spec(role)
        tensors.append(torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta"))
        if not tensors[-1].is_contiguous():
            return f"{role} has strides {list(spec.stride)}, and {op} takes contiguous tensors"
    try:
        contract.check_static(*tensors, match.constants["eps"])
    except KernelError as error:
        return error.what
    return ""


def registered(op: str) -> bool:
    """Whether an operator of ours exists."""
    from shardwright.kernels.registry import OPERATORS

    return op in OPERATORS


def counted(op: str, provider: str, shape: dict[str, int], dtype: str) -> OpCost:
    """The counted work of a provider."""
    if provider != "shardwright" or provider in REWRITTEN.get(op, ()):
        return provider_cost(op, provider, shape, dtype)
    from shardwright.kernels.registry import operator

    return operator(op).load_cost()(**shape, dtype=dtype)


def timing(op: str, provider: str, shape: dict[str, int], target: Target, source: str = "") -> Timing:
    """Measured where the evidence has this device, these sources and this size; modelled otherwise.

    Args:
        source: where the counts of a library's kernel come from.
    """
    seen = find(op, provider, shape, target.cluster.device.name, target.dtype, target.evidence)
    if seen is not None:
        files, call = (seen.file,) if seen.file else (), _call(op, shape, target, seen.time.pass_name)
        return Timing(seen.time.median_ms, seen.time.floor_ms, "measured", seen.basis, files, (call,))
    cost, device = counted(op, provider, shape, target.dtype), target.cluster.device
    sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
    basis = f"counted flops and bytes over the rates of {device.name}; {sizes}, {target.dtype}, {MODELLED_PASS}"
    basis = f"{basis}; {source}" if source else basis
    call = _call(op, shape, target, MODELLED_PASS)
    return Timing(op_time_ms(cost, device, MODELLED_PASS), floor_ms(cost, target), "modelled", basis, calls=(call,))


def _call(op: str, shape: dict[str, int], target: Target, pass_name: PassName) -> OperatorCall:
    return OperatorCall(op=op, dtype=target.dtype, sizes=shape, pass_name=pass_name)


def timing_of(parts: Parts, provider: str, target: Target, source: str = "") -> Timing:
    """The operators of a way one after the other; measured where each of them is."""
    each = [timing(op, provider, sizes, target, source) for op, sizes in parts]
    if len(each) == 1:
        return each[0]
    return Timing(
        sum(one.time_ms for one in each),
        sum(one.floor_ms for one in each),
        "measured" if all(one.origin == "measured" for one in each) else "modelled",
        "; ".join(f"{op}: {one.basis}" for (op, _), one in zip(parts, each, strict=True)),
        tuple(file for one in each for file in one.files),
        tuple(call for one in each for call in one.calls),
    )


def _gain(provider: str, own: Timing, eager: Timing) -> Gain:
    alike = own.origin == eager.origin
    return Gain(
        provider=provider,
        time_ms=own.time_ms,
        eager_ms=eager.time_ms,
        floor_ms=own.floor_ms,
        speedup=eager.time_ms / own.time_ms if own.time_ms > 0 else 1.0,
        origin=own.origin if alike else "modelled",
        basis=own.basis if alike else f"{own.basis}; eager: {eager.basis}",
        evidence=tuple(sorted({*own.files, *eager.files})),
        calls=own.calls if provider == "shardwright" else (),
    )


def floor_ms(cost: OpCost, target: Target) -> float:
    """The least time that any implementation needs: floor bytes over bandwidth or floor flops over rate."""
    device = target.cluster.device

    def one(work: PassCost) -> float:
        bytes_s = work.floor_bytes / device.memory_bandwidth_bytes_per_s
        return 1e3 * max(bytes_s, work.floor_flops / flops_rate(device, cost.dtype))

    return one(cost.forward) + (one(cost.backward) if cost.backward else 0.0)
