"""The obligations of a fusion, one function each: what was looked at, what was seen.

``proved`` only where the evidence is complete; what cannot be examined is ``unknown``, and both ``unknown`` and
``refuted`` refuse the fusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import fx

from shardwright.agents.structure.capture import CAPTURE_ERRORS
from shardwright.agents.structure.differential import TOLERANCE, compare
from shardwright.agents.structure.facts import ModelFacts
from shardwright.agents.structure.interpret import Fp64Region
from shardwright.agents.structure.kernel_oracle import kernel_reference
from shardwright.agents.structure.patterns.base import Match, Tensors
from shardwright.agents.structure.region import canonical_region, escaping
from shardwright.agents.structure.retrace import first_difference, retrace
from shardwright.schemas.fusion import Obligation, ObligationName

Status = Literal["proved", "refuted", "unknown"]
Examiner = Callable[[Match, ModelFacts], tuple[Status, str]]


def no_escaping_value(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    found = escaping(match.region)
    if found:
        value, reader = found[0]
        return "refuted", f"{len(found)} reads from outside, first: {reader.name} reads the inner value {value.name}"
    inner = len(match.region.nodes) - len(match.region.result)
    return "proved", f"{inner} inner values of {len(match.region.nodes)} traced nodes, none read from outside"


def no_mutation_or_alias(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    storages, (first, last) = match.region.canonical.storages, match.region.interval
    members = (*match.region.border, *match.region.nodes)
    own = 0
    for mutation in storages.mutations:
        inside = mutation.node in match.region.nodes
        if not any(storages.share(w, m) for w in mutation.written for m in members):
            continue
        reaches_out = any(storages.share(w, b) for w in mutation.written for b in match.region.border)
        if inside and not reaches_out:
            own += 1
        elif inside or mutation.position > first:
            where = "inside" if inside or mutation.position < last else "after"
            return "refuted", f"{mutation.node.name} writes in place to a value of the region, {where} it"
    inputs = {role: node for node, role in match.region.border.items()}
    roles = [] if match.pattern.reads_views else sorted(inputs)
    for i, one in enumerate(roles):
        for other in roles[i + 1 :]:
            if inputs[one] is not inputs[other] and storages.share(inputs[one], inputs[other]):
                return "refuted", f"inputs {one} and {other} may share memory"
    count = len(storages.mutations)
    beside = f"; {own} by the region itself to values that it made and nothing else reads" if own else ""
    text = f"{count} in-place writes in the graph, none from outside to the region's {len(members)} values"
    return "proved", f"{text} from its start on{beside}"


def no_randomness(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    for node in match.region.nodes:
        if draws(node):
            return "refuted", f"{node.name} draws random numbers ({node.target})"
    return "proved", f"{len(match.region.nodes)} traced nodes in training mode, none draws random numbers"


def draws(node: fx.Node) -> bool:
    """Whether an operation takes random numbers with the arguments that it has here."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if torch.Tag.nondeterministic_seeded not in node.target.tags and "dropout" not in schema.name:
        return False
    values = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    values |= {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    values |= node.kwargs
    chances = [values[name] for name in ("p", "dropout_p") if name in values]
    off = values.get("train", values.get("training", True)) is False
    return not (off or (chances and chances[0] == 0))


def dtype_shape_stride_device(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    devices, dtypes = set(), set()
    for role in match.region.inputs:
        spec = match.region.spec(role)
        if 0 in spec.shape and role not in match.pattern.maybe_empty:
            return "refuted", f"{role} is empty: {spec.shape}"
        if spec.dtype.startswith(("float", "bfloat")):
            dtypes.add(spec.dtype)
            if spec.dtype not in match.pattern.dtypes:
                return "refuted", f"{role} is {spec.dtype}; the pattern holds for {', '.join(match.pattern.dtypes)}"
        if role in match.pattern.contiguous and spec.stride and spec.stride[-1] != 1 and spec.shape[-1] > 1:
            return "refuted", f"{role} has strides {spec.stride}; its innermost dimension must be dense"
    for node in (*match.region.border, *match.region.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            devices.add(str(value.device))
        elif not isinstance(value, (tuple, list)):
            return "unknown", f"{node.name} has no traced value"
    if len(devices) != 1:
        return "refuted", f"values on {len(devices)} devices: {', '.join(sorted(devices))}"
    shapes = ", ".join(f"{r} {list(match.region.spec(r).shape)}" for r in match.region.inputs)
    return "proved", f"{shapes}; {', '.join(sorted(dtypes))}; one device; innermost dimensions dense"


def tied_weights(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    shared = {name: facts.tied[name] for name in match.parameters.values() if name in facts.tied}
    if shared and match.pattern.relayout:
        name, others = next(iter(shared.items()))
        return "refuted", f"{name} is also {', '.join(others)}, and the fusion would change its layout"
    if shared:
        name, others = next(iter(shared.items()))
        return "proved", f"{name} is also {', '.join(others)}; the fusion reads it in place and changes no layout"
    return "proved", f"{len(match.parameters)} parameters, none shared with another module"


def hooks(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    if facts.global_hooks:
        return "refuted", f"hooks on all modules: {', '.join(facts.global_hooks)}"
    owners = {name.rpartition(".")[0] for name in match.parameters.values()}
    inside = {node.module_path for node in match.region.op_nodes} | owners
    inside -= {*facts.units, ""}  # a hook on a whole unit sees the unit's own inputs and outputs, which stay
    relative = {path.removeprefix(match.captured.module_path) for path in inside}
    for place in match.captured.occurrences:
        for inner in relative:
            path = (place + inner) if place else inner.removeprefix(".")
            if path in facts.module_hooks:
                return "refuted", f"{path} has {facts.module_hooks[path]}"
    for name in match.all_parameters():
        if name in facts.parameter_hooks:
            return "refuted", f"{name} has {facts.parameter_hooks[name]}"
    checked = len(relative) * len(match.captured.occurrences)
    return "proved", f"{checked} modules and {len(match.all_parameters())} parameters looked at, no hooks"


def lora_inside(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    adapted = [name for name in match.all_parameters() if name in facts.adapted]
    if not adapted:
        return "proved", f"no LoRA target among the region's {len(match.all_parameters())} parameters"
    if match.pattern.lora:
        return "proved", f"{len(adapted)} LoRA targets inside, first {adapted[0]}: {match.pattern.lora}"
    if any(v.predicate.lora_inside is not False for v in match.pattern.variants()):
        open_to = [v.name for v in match.pattern.variants() if v.predicate.lora_inside is not False]
        return (
            "proved",
            f"{len(adapted)} LoRA targets inside, first {adapted[0]}: only {', '.join(open_to)} may be used",
        )
    return "refuted", f"{adapted[0]} is a LoRA target and no variant computes adapters"


def sharding_boundary(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    if match.seam:
        return "refuted", f"the region spans two FSDP units: {match.seam}"
    names = {*(n.module_path for n in match.region.op_nodes), *match.parameters.values(), match.anchor}
    units = {facts.unit_of(name) for name in names}
    if len(units) != 1:
        return "refuted", f"the region lies in {len(units)} FSDP units: {', '.join(sorted(u or 'root' for u in units))}"
    unit = units.pop() or "the root unit"
    cut = f"; {match.pattern.cut}" if match.pattern.cut else "; expert parallelism does not cut it"
    return "proved", f"all parameters and operations lie in {unit}{cut}"


def reversible_layout(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    if match.pattern.relayout:
        try:
            undone = match.pattern.inverse(match)
        except ArithmeticError as error:
            return "refuted", f"{match.pattern.relayout}: {error}"
        if not undone:
            return "unknown", f"the fusion changes parameters: {match.pattern.relayout}; no inverse was tested"
        return "proved", f"{match.pattern.relayout}; {undone}"
    return "proved", f"{len(match.parameters)} parameters keep name, shape and layout, so saving is unchanged"


def re_trace(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    if match.seam:
        return "unknown", "the sum and the norm lie in two captures"
    try:
        again = retrace(match.pattern.reference, match.region, match.constants)
    except CAPTURE_ERRORS as error:
        return "unknown", f"the pattern's function could not be traced: {type(error).__name__}: {error}"[:200]
    difference = first_difference(canonical_region(match.region), again)
    if difference:
        return "refuted", f"the region is not the pattern's function: {difference}"
    return "proved", f"the pattern's function traced again gives the same {len(again.nodes)} nodes, {again.digest[:12]}"


def differential_test(match: Match, facts: ModelFacts) -> tuple[Status, str]:
    if match.seam:
        return "unknown", "the sum and the norm lie in two captures"
    trained = match.pattern.gradients(match)

    def region(values: Tensors) -> Tensors:
        return match.pattern.comparable(whole(values), match)

    try:
        sizes = match.pattern.sizes(match)
        cases, whole = match.pattern.cases(match, sizes), Fp64Region(match.region, sizes)
        seen = compare(region, lambda v: match.pattern.oracle(v, match.constants), cases, trained)
        kernel = kernel_reference(match)
        beside = ""
        if kernel is not None:
            second = compare(region, kernel, cases, trained)
            seen = max(seen, second, key=lambda c: c.error)
            beside = " and the kernel's reference"
        more = match.pattern.second_opinion(match)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        return "unknown", f"could not run in fp64: {type(error).__name__}: {str(error).splitlines()[0]}"[:200]
    except ArithmeticError as error:
        return "refuted", str(error)
    if not math.isfinite(seen.error) or seen.error > TOLERANCE:
        return "refuted", f"differs from the independent formula{beside} by {seen.error:.1e} at {seen.where}"
    text = (
        f"{seen.cases} cases, {seen.values} numbers forward and backward in fp64 against an independent formula{beside}"
    )
    return "proved", f"{text}: largest error {seen.error:.0e} (allowed {TOLERANCE:.0e}){more}"


EXAMINERS: dict[ObligationName, Examiner] = {
    "no-escaping-value": no_escaping_value,
    "no-mutation-or-alias": no_mutation_or_alias,
    "no-randomness": no_randomness,
    "dtype-shape-stride-device": dtype_shape_stride_device,
    "tied-weights": tied_weights,
    "hooks": hooks,
    "lora-inside": lora_inside,
    "sharding-boundary": sharding_boundary,
    "reversible-layout": reversible_layout,
    "re-trace": re_trace,
    "differential-test": differential_test,
}
"""Every obligation and who examines it; a test compares this table with the schema."""


def examine(match: Match, facts: ModelFacts) -> tuple[Obligation, ...]:
    """All obligations of one match, in the order of the table."""
    found = []
    for name, examiner in EXAMINERS.items():
        status, evidence = examiner(match, facts)
        found.append(Obligation(name=name, status=status, evidence=evidence))
    return tuple(found)
