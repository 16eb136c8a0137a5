"""The command line. Every verb imports what it needs when it runs, so ``--help`` stays fast."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from inspect import cleandoc
from types import FrameType, TracebackType

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
from shardwright.workflows.cli.examples import EXAMPLES

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


def _told_whole(group: typer.Typer, path: str = "") -> None:
    """Lists of verbs show each first sentence whole, not cut to a line; every verb ends with an example."""
    for verb in group.registered_commands:
        words = cleandoc(verb.callback.__doc__ or "").replace("``", "`")
        first, *_ = " ".join(words.split("\n\n")[0].split()).split(". ")
        verb.help, verb.short_help = words, first.rstrip(".") + "."
        name = verb.name or getattr(verb.callback, "__name__", "")
        verb.epilog = f"\b\nExample:\n  {EXAMPLES[f'{path} {name}'.strip()]}"
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            inner.short_help = str(inner.typer_instance.info.help)
            if inner.name in EXAMPLES:
                inner.epilog = f"\b\nExample:\n  {EXAMPLES[inner.name]}"
            _told_whole(inner.typer_instance, inner.name or "")


for module in (inspect, plan, review, apply, adapt, runs, show, calibrate, measured, adapters, doctor, watch):
    module.register(app)
app.add_typer(cluster.app, name="cluster")
app.add_typer(kernels.app, name="kernels")
app.add_typer(policies.app, name="policy")
app.add_typer(history.app, name="runs")
_told_whole(app)


def main() -> None:
    """Run the command line; errors become ``code / where / next`` on stderr and the exit code of their kind."""
    _quiet_libraries()
    STDOUT.used = False
    signal.signal(signal.SIGTERM, _stop)
    try:
        _demand_text([*sys.argv[1:], os.getcwd()])
        _demand_words(sys.argv[1:])
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
    except (ShardwrightError, OSError, RecursionError) as error:
        _tell(error)
        _end(f"error: {faults.typed(error).text()}", faults.typed(error).exit_code)
    finally:
        sys.excepthook = _unexpected  # Typer has put its own in place


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


MAY_BE_EMPTY = ("--reason", "--prompt", "--llm-url", "--llm-model")


def _demand_words(words: list[str]) -> None:
    """An empty word is a shell variable that is not set; taken as a path it would mean the current folder.

    Raises:
        UsageError: ``empty-argument``.
    """
    for before, word in zip(["", *words], words, strict=False):
        if not word and before not in MAY_BE_EMPTY:
            raise UsageError(
                "empty-argument",
                f"the word after {before!r} is empty" if before else "the first word is empty",
                where="command line",
                next_action="look at the shell variable that stands there: it is empty or not set",
            )


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nobody foresaw, told in the form of every other error; SHARDWRIGHT_TRACEBACK=1 shows where it came from."""
    if os.environ.get("SHARDWRIGHT_TRACEBACK", "") not in ("", "0"):
        sys.__excepthook__(kind, error, trace)
        return
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if f"{os.sep}shardwright{os.sep}" in frame.filename] or frames
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}, {own[-1].name}" if own else "this program"
    sys.stderr.write(f"error: {faults.internal(error, where).text()}\n")


def _swallowed(ended: SystemExit) -> BaseException | None:
    """The signal or closed pipe that Typer turned into an exit code without a word."""
    inner = ended.__context__
    return inner if isinstance(inner, BrokenPipeError) else getattr(inner, "__cause__", None)


def _drop_stdout() -> None:
    """Whoever read stdout has seen enough; what Python still flushes at the end goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)


def _tell(error: faults.Fault) -> None:
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
