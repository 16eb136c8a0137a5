"""Benchmark cases for operators at the sizes that somebody else names, such as a plan's.

A suite makes inputs for the sizes that it reads. What it does not read it decides by itself: by one value for all its
cases, by a table over the model's sizes, or by one over rows too. Such a size is taken only where the suite would
decide it as it is named, since a time is filed under the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.kernels.cases import BenchCase, OpSuite, Shape
from shardwright.kernels.evidence import ROW_DIMENSIONS, shape_bucket
from shardwright.kernels.registry import operator
from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import OperatorCall, PassName


@dataclass(frozen=True)
class Called:
    """A call with the case that times it; without one it says why none does."""

    call: OperatorCall
    suite: OpSuite | None = None
    case: BenchCase | None = None
    because: str = ""

    @property
    def pair(self) -> tuple[tuple[OpSuite, BenchCase], ...]:
        """Suite and case; empty where there is none."""
        return () if self.suite is None or self.case is None else ((self.suite, self.case),)

    @property
    def refusal(self) -> KernelError | None:
        """What to say of a call that nothing times; it is not raised, since the others go on."""
        if self.case is not None:
            return None
        return KernelError(
            "no-inputs",
            self.because,
            where=f"{self.call.op} at {shape_bucket(self.call.sizes)}, {self.call.dtype}",
            next_action=f"none: it stays modelled; `shardwright kernels bench {self.call.op}` times its suites' cases",
        )


class _Read(Mapping[str, int]):
    """Sizes that remember which of them were asked for."""

    def __init__(self, shape: Shape) -> None:
        self._shape = dict(shape)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> int:
        self.names.add(name)
        return self._shape[name]

    def __contains__(self, name: object) -> bool:
        return name in self._shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._shape)

    def __len__(self) -> int:
        return len(self._shape)


def called(call: OperatorCall, passes: Sequence[PassName]) -> Called:
    """The case of a call, in the suite of its operator that fits best.

    One that is timed at these model sizes anyway goes first, then one that is timed at all, then the main one.

    Args:
        passes: those that a time may stand for a step by, best first; the first that the suite times is taken.

    Raises:
        KernelError: ``unknown-operator``.
    """
    found, refused = [], []
    for at, suite in enumerate(operator(call.op).load_suites()):
        shape, because = fitted(suite, call)
        if shape is None:
            refused.append(because)
        else:
            found.append((not _timed_anyway(suite, call), not suite.bench, at, suite, shape))
    if not found:
        return Called(call, because="; ".join(dict.fromkeys(refused)))
    *_, suite, shape = min(found, key=lambda one: one[:3])
    dtype = getattr(torch, call.dtype)
    name = f"plan/{call.op}/{'-'.join(f'{key}{size}' for key, size in sorted(shape.items()))}"
    return Called(call, suite, BenchCase(name, shape, dtype, (_pass_of(suite, passes),)))


def fitted(suite: OpSuite, call: OperatorCall) -> tuple[Shape | None, str]:
    """The sizes to time a call at, whose bucket is the call's; ``None`` and why, where the suite has no inputs."""
    if getattr(torch, call.dtype) not in suite.dtypes:
        kinds = ", ".join(str(dtype).rpartition(".")[2] for dtype in suite.dtypes)
        return None, f"{call.op} is timed in {kinds}, not in {call.dtype}"
    unread = _unread(suite, frozenset(call.sizes))
    if unread is None or not _costed(suite, call):
        return None, f"no suite of {call.op} makes inputs from {', '.join(sorted(call.sizes))}"
    if not unread:
        return dict(call.sizes), ""
    alike = [dict(shape) for shape in _declared(suite) if shape_bucket(shape) == shape_bucket(call.sizes)]
    if dict(call.sizes) in alike or all(_decided(suite, call, name, unread) for name in unread):
        return dict(call.sizes), ""
    if alike:
        return alike[0], ""
    return None, f"a suite of {call.op} decides {', '.join(sorted(unread))} by itself, and has no case of these sizes"


def _declared(suite: OpSuite) -> tuple[Shape, ...]:
    return (*(case.shape for case in suite.bench), *suite.large_shapes, *suite.small_shapes)


def _unread(suite: OpSuite, names: frozenset[str]) -> frozenset[str] | None:
    """Of sizes so named those that inputs are made without; ``None`` where inputs need others."""
    probe = _Read(_probe(suite, names))
    if set(probe) != names:
        return None
    try:
        suite.inputs(probe, suite.dtypes[0], "cpu", 0)
    except KeyError:
        return None
    return names - probe.names


def _probe(suite: OpSuite, names: frozenset[str]) -> Shape:
    """Sizes so named, as small as the suite declares them; fewer where it does not declare all."""
    small = max(suite.small_shapes, key=lambda shape: (len(names & set(shape)), min(shape.values()) > 0))
    declared = next((shape for shape in _declared(suite) if set(shape) == names), {})
    return {name: size for name, size in {**declared, **small}.items() if name in names}


def _costed(suite: OpSuite, call: OperatorCall) -> bool:
    """Whether the work of the suite is counted by exactly these sizes."""
    try:
        inspect.signature(suite.cost).bind(**call.sizes, dtype=call.dtype, weight_gradient=False)
    except TypeError:
        return False
    return True


def _decided(suite: OpSuite, call: OperatorCall, name: str, unread: frozenset[str]) -> bool:
    """Whether the suite decides a size that it does not read as the call names it, whatever the rows are."""
    declared = [shape for shape in _declared(suite) if set(shape) == set(call.sizes)]
    if len({shape[name] for shape in declared}) == 1 and len(declared) > 1:
        return declared[0][name] == call.sizes[name]
    table: dict[str, set[int]] = {}
    for shape in declared:
        table.setdefault(_model_sizes(shape, unread), set()).add(shape[name])
    if any(len(values) > 1 for values in table.values()):
        return False
    return table.get(_model_sizes(call.sizes, unread)) == {call.sizes[name]}


def _model_sizes(shape: Shape, without: frozenset[str] = frozenset()) -> str:
    """Key of the sizes that are no rows."""
    return shape_bucket({key: size for key, size in shape.items() if key not in ROW_DIMENSIONS | without})


def _timed_anyway(suite: OpSuite, call: OperatorCall) -> bool:
    return any(_model_sizes(case.shape) == _model_sizes(call.sizes) for case in suite.bench)


def _pass_of(suite: OpSuite, passes: Sequence[PassName]) -> PassName:
    """The best pass that the suite times; of one that times nothing the one that leaves frozen weights out, if any."""
    timed = {name for case in suite.bench for name in case.passes}
    frozen: PassName = "fwd+dx" if suite.frozen else "fwd+bwd"
    return next((name for name in passes if name in timed), frozen)
