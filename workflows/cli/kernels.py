"""``shardwright kernels verify|bench|tune|prebuild|write|approve``: the fused operators on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.schemas.words import plural
from shardwright.workflows.cli import written
from shardwright.workflows.cli.common import PlainOutput, PlainOutputOption, demand_place, note, put, put_json

if TYPE_CHECKING:
    from shardwright.schemas.bench import BenchLine

app = typer.Typer(
    help="Verify, time, tune and prebuild the fused operators; have one written, approve it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def demand_operators(ops: list[str] | None) -> None:
    """Every name is an operator's.

    Raises:
        UsageError: ``unknown-operator``.
    """
    from shardwright.kernels.registry import OPERATORS
    from shardwright.schemas.errors import UsageError

    if unknown := [name for name in ops or () if name not in OPERATORS]:
        raise UsageError(
            "unknown-operator",
            f"no operator is called {' or '.join(map(repr, unknown))}",
            where="OP",
            next_action=f"name some of: {', '.join(OPERATORS)}",
        )


OpsArgument = Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operators. [default: all]")]


@app.command()
def verify(ops: OpsArgument = None, output: PlainOutputOption = PlainOutput.text) -> None:
    """Compare every operator, gradients included, with plain torch in fp64; exits 9 where one is wrong.

    On a machine without CUDA the kernels run in Triton's interpreter, on small shapes.
    """
    from shardwright.schemas.errors import CheckFailed
    from shardwright.workflows.operators import verify_operators

    demand_operators(ops)
    results = verify_operators(ops)
    if output is PlainOutput.json:
        put_json([result.model_dump(mode="json") for result in results])
    else:
        from shardwright.kernels.suite import verify_table

        _put_table(verify_table(results), output)
    if wrong := [f"{r.op} {r.case} {r.value}" for r in results if not r.ok]:
        raise CheckFailed(
            "kernel-wrong",
            f"{len(wrong)} of {len(results)} values differ from fp64 by more than is allowed: {', '.join(wrong[:5])}",
            where="kernels verify",
            next_action="do not use these kernels here: plan with a policy that does not allow `shardwright`",
        )


@app.command()
def bench(
    ops: OpsArgument = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result lines.")] = Path("benchmarks/results"),
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence", help="Also add the times to this file, which `plan` and `adapt` read by --evidence."
        ),
    ] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="Beginning of the names of the cases to time; repeatable.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="Time what this plan's fusions call, at its sizes."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="With --plan: say what would be timed and what has a time; needs no GPU.")
    ] = False,
) -> None:
    """Time every operator beside its rivals, on this machine's CUDA device; lines are kept as they are measured.

    With --evidence each operator is verified on the device first; exits 9 where one is wrong, which is then not timed.
    """
    from shardwright.kernels.suite import bench_table
    from shardwright.schemas.errors import CheckFailed, UsageError
    from shardwright.workflows.evidence import lines_of
    from shardwright.workflows.operators import bench_operators

    demand_operators(ops)
    if show and plan is None:
        raise UsageError(
            "list-without-plan",
            "--list says what --plan would time, and no plan is named",
            where="--list",
            next_action="name one: `shardwright kernels bench --plan PLAN --list`",
        )
    if evidence is not None:
        demand_place(evidence)
        if evidence.is_file() and (there := evidence.read_bytes()).strip():
            lines_of(there, where=str(evidence))  # what stands there is kept, and so looked at before the work
    if plan is not None:
        ended = _bench_plan(plan, ops, out, evidence, cases or ("",), show)
        if ended is None:
            return
        lines, wrong = ended
    else:
        lines, wrong = bench_operators(ops, out, evidence, cases or ("",), note)
    if lines:
        put(bench_table(lines))
    if evidence is not None and lines:
        note(f"wrote {evidence}; next: shardwright plan CKPT --cluster C --recipe R --evidence {evidence}")
    if wrong:
        raise CheckFailed(
            "kernel-wrong",
            f"wrong on this device, and not timed: {', '.join(wrong)}",
            where="kernels bench",
            next_action=f"`shardwright kernels verify {' '.join(wrong)}` names every value that differs",
        )


def _bench_plan(
    file: Path, ops: list[str] | None, out: Path, evidence: Path | None, prefixes: Sequence[str], show: bool
) -> tuple[list[BenchLine], tuple[str, ...]] | None:
    """The calls of a plan, listed or timed; ``None`` where that is all there is to do.

    Raises:
        PlanError: what keeps the plan from being read, or ``no-sizes``.
        KernelError: ``no-device``, or ``no-case`` where nothing of the plan can be timed.
        UsageError: ``other-device``.
    """
    from shardwright.schemas.errors import KernelError
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.operators import bench_called
    from shardwright.workflows.plan_calls import calls_of, cases_of, listing

    loaded = load_plan(file)
    device = loaded.evidence.cluster.device.name
    calls = cases_of(calls_of(loaded, where=str(file)), ops, prefixes)
    refusals = [one.refusal.text() for one in calls if one.refusal is not None]
    if show:
        rows = listing(calls, device, evidence) if calls else f"{file}: no operator of ours to time"
        put("\n".join((rows, *refusals)))
        return None
    if not any(one.pair for one in calls):
        raise KernelError(
            "no-case",
            f"nothing to time: {plural(len(calls), 'call')} of our operators, none with a case",
            where=str(file),
            next_action=f"`shardwright kernels bench --plan {file} --list` says what the plan calls",
        )
    ended = bench_called(calls, device, out, evidence, note)
    for text in refusals:
        note(f"not timed: {text}")
    return ended


@app.command()
def tune(
    ops: OpsArgument = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File of choices to write. [default: the shipped one of this device]"),
    ] = None,
) -> None:
    """Choose launch configurations on this machine's CUDA device; each is checked against fp64 before it is timed.

    Workers never tune: they take the file, whose choices a plan pins with the operators' code.
    """
    from shardwright.workflows.operators import tune_operators

    demand_operators(ops)
    file = tune_operators(ops, out, put)
    put(f"{plural(len(file.entries), 'choice')} for {file.device}")
    if out is not None:
        from shardwright.kernels import tuned

        note(f"workers read {tuned.path(tuned.slug(file.device))}: put {out} there, where plans are made too")


@app.command()
def prebuild(
    ops: OpsArgument = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device whose tuned choices to compile, such as nvidia-h200.")
    ] = None,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Compile every kernel at its chosen configuration into Triton's cache, so that workers start at once.

    For this machine's CUDA device; for sm_90 where there is none. Exits 9 where one does not fit or spills.
    """
    from shardwright.kernels.prebuild import prebuild as compile_all
    from shardwright.schemas.errors import CheckFailed

    demand_operators(ops)
    reports = compile_all(ops, device)
    if output is PlainOutput.json:
        from dataclasses import asdict

        put_json([asdict(report) for report in reports])
    else:
        lines = (
            f"{report.name}: {report.registers} registers, {report.shared_bytes} B shared memory, "
            f"{report.spill_bytes} B spilled {report.complaint and '✗ ' + report.complaint}".rstrip()
            for report in reports
        )
        _put_table("\n".join(lines), output)
    if complaints := [report.complaint for report in reports if report.complaint]:
        raise CheckFailed(
            "kernel-does-not-fit",
            "; ".join(complaints),
            where="kernels prebuild",
            next_action="choose a smaller tile in the operator's configs.py",
        )


def _put_table(text: str, output: PlainOutput) -> None:
    """Lined-up text, which Markdown keeps so in a block of code."""
    put(f"```\n{text.rstrip()}\n```" if output is PlainOutput.markdown else text)


written.register(app)
