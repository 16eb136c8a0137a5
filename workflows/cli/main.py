"""The command line. Every verb imports what it needs when it runs, so ``--help`` stays fast."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from types import FrameType

import typer

from shardwright.schemas.errors import ExitCode, ShardwrightError
from shardwright.workflows.cli import (
    adapt,
    adapters,
    apply,
    calibrate,
    cluster,
    doctor,
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


for module in (inspect, plan, review, apply, adapt, runs, show, calibrate, measured, adapters, doctor, watch):
    module.register(app)
app.add_typer(cluster.app, name="cluster")
app.add_typer(kernels.app, name="kernels")
app.add_typer(policies.app, name="policy")
app.add_typer(history.app, name="runs")


def main() -> None:
    """Run the command line; errors become ``code / where / next`` on stderr and the exit code of their kind."""
    _quiet_libraries()
    signal.signal(signal.SIGTERM, _stop)
    try:
        app()
    except ShardwrightError as error:
        _end(f"error: {error.text()}", error.exit_code)
    except KeyboardInterrupt:
        _end("interrupted; the same command goes on from here", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # whoever read stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _end(f"error: {system_error(error)}", ExitCode.ERROR)


def _end(words: str, code: ExitCode) -> None:
    """Say why and end, at once where a node's thread was left behind."""
    sys.stderr.write(f"{words}\n")
    limits = sys.modules.get("shardwright.workflows.limits")
    if limits is not None and any(thread.is_alive() for thread in limits.LEFT_BEHIND):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))
    sys.exit(int(code))


def system_error(error: OSError) -> str:
    """What the operating system refused, in the form of every other error."""
    code = errno.errorcode.get(error.errno or 0, "unknown").lower()
    where = error.filename if error.filename is not None else "this machine"
    advice = {
        errno.ENOSPC: "free some space there, then start the same command again",
        errno.EACCES: "check its owner and permissions, or name another place",
        errno.EROFS: "name a place that can be written",
    }.get(error.errno or 0, "mend that, then start the same command again")
    return f"[system/{code}] {error.strerror or error}\n  where: {where}\n  next:  {advice}"


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
