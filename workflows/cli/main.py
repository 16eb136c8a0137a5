"""The command line. Every verb imports what it needs when it runs, so ``--help`` stays fast."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType

import typer

from shardwright.schemas.errors import ExitCode, ShardwrightError, UsageError
from shardwright.workflows.cli import (
    adapt,
    adapters,
    apply,
    calibrate,
    cluster,
    doctor,
    faults,
    history,
    inspect,
    kernels,
    measured,
    plan,
    policies,
    review,
    runs,
    show,
    watch,
)
from shardwright.workflows.cli.common import STDOUT, put_json

EXIT_CODES = """\b
Exit codes: 0 ok, 1 error, 2 usage, 3 needs approval, 4 policy denied, 5 stale plan, 6 legality failed,
7 infeasible, 8 language model required but unavailable, 9 a check failed, 130 interrupted.
stdout is data, stderr is progress."""

app = typer.Typer(
    name="shardwright",
    help=(
        "Adapt a mixture-of-experts checkpoint to your cluster by LoRA: plan, review, run what was approved.\n\n"
        "First steps: `shardwright doctor`, then `shardwright inspect CKPT`, then `shardwright plan CKPT --cluster C "
        "--recipe R -o plan.json`."
    ),
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from shardwright import __version__

        typer.echo(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def shardwright(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that stand before the verb."""


def _whole_summaries(group: typer.Typer) -> None:
    """Lists of verbs show each first sentence whole; without this they are cut to the width of a line."""
    for verb in group.registered_commands:
        first, *_ = " ".join((verb.callback.__doc__ or "").split("\n\n")[0].split()).split(". ")
        verb.short_help = first.rstrip(".") + "."
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            inner.short_help = str(inner.typer_instance.info.help)
            _whole_summaries(inner.typer_instance)


for module in (inspect, plan, review, apply, adapt, runs, show, calibrate, measured, adapters, doctor, watch):
    module.register(app)
app.add_typer(cluster.app, name="cluster")
app.add_typer(kernels.app, name="kernels")
app.add_typer(policies.app, name="policy")
app.add_typer(history.app, name="runs")
_whole_summaries(app)


def main() -> None:
    """Run the command line; errors become ``code / where / next`` on stderr and the exit code of their kind."""
    _quiet_libraries()
    STDOUT.used = False
    signal.signal(signal.SIGTERM, _stop)
    try:
        _demand_text([*sys.argv[1:], os.getcwd()])
        app()
    except SystemExit as ended:
        cause = _swallowed(ended)
        if isinstance(cause, KeyboardInterrupt):
            _tell(cause)
            echoed = "\n" if sys.stderr.isatty() else ""  # a terminal has written ^C
            _end(f"{echoed}interrupted; {faults.GO_ON}", ExitCode.INTERRUPTED)
        if not isinstance(cause, BrokenPipeError):
            raise
        _drop_stdout()
    except BrokenPipeError:
        _drop_stdout()
    except (ShardwrightError, OSError) as error:
        _tell(error)
        _end(f"error: {faults.typed(error).text()}", faults.typed(error).exit_code)


def _demand_text(words: list[str]) -> None:
    """Names go into plans and records, which are UTF-8.

    Raises:
        UsageError: ``not-text``.
    """
    for word in words:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(
                "not-text",
                f"{word!a} is not UTF-8",
                where="command line",
                next_action="rename the file or folder: plans and run records keep names as UTF-8 text",
            )


def _swallowed(ended: SystemExit) -> BaseException | None:
    """The signal or closed pipe that Typer turned into an exit code without a word."""
    inner = ended.__context__
    return inner if isinstance(inner, BrokenPipeError) else getattr(inner, "__cause__", None)


def _drop_stdout() -> None:
    """Whoever read stdout has seen enough; what Python still flushes at the end goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)


def _tell(error: ShardwrightError | KeyboardInterrupt | OSError) -> None:
    """Put the error on stdout where JSON was asked for, unless a result stands there already: one document, not two."""
    if STDOUT.used or not faults.wants_json(sys.argv[1:]):
        return
    try:
        put_json({"schema_version": 1, "error": faults.typed(error).as_dict()})
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()


def _end(words: str, code: ExitCode) -> None:
    """Say why and end, at once where a node's thread was left behind."""
    sys.stderr.write(f"{words}\n")
    limits = sys.modules.get("shardwright.workflows.limits")
    if limits is not None and any(thread.is_alive() for thread in limits.LEFT_BEHIND):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))
    sys.exit(int(code))


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM, as a scheduler sends it, ends like SIGINT: workers save first."""
    raise KeyboardInterrupt


def _quiet_libraries() -> None:
    """Nothing is fetched from a hub unless an address of it is named, and libraries' own warnings stay out.

    ``PYTHONWARNINGS`` and the hub's variables, where set, are left as they are.
    """
    if not any(word.startswith("hf:/") for word in sys.argv[1:]):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        for library in ("torch", "transformers", "peft"):
            warnings.filterwarnings("ignore", module=rf"{library}\b")


if __name__ == "__main__":
    main()
