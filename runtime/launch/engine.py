"""What an engine is: one file of this folder that says, as its ``ENGINE``, how workers are started with it.

``registry.py`` lists the files; the values of ``--launch``, the options that a file for it may hold, the table of
docs/runs.md, what ``apply --dry-run`` prints and the tests of ``testkit.py`` are all read from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.runtime.launch.job import Job
from shardwright.runtime.launch.options import LaunchOptions

Say = Callable[[str], None]


@dataclass(frozen=True)
class Engine:
    """One way to start workers.

    Whatever it does, a worker is ``python -m shardwright.runtime.worker`` with :attr:`Job.worker_arguments`, in
    torchrun's environment (``runtime.launch.job``); killed workers are started again up to
    :attr:`LaunchOptions.max_restarts` times.
    """

    name: str
    """Its word for ``--launch``, and its file here."""
    happens: str
    """What it does with a plan, for docs/runs.md."""
    tested_on: str
    """Where that was seen to work, for docs/runs.md."""
    render: Callable[[Job, LaunchOptions], dict[str, str]]
    """File name → text of what is submitted. Reads its arguments alone and writes nothing. A name's ending says how
    its text is read: ``.yaml``, ``.json``, anything else as a shell does.

    Raises a ``UsageError`` for an option that it cannot do without."""
    options: frozenset[str] = frozenset()
    """The fields of :class:`LaunchOptions` that it reads beside ``options.COMMON``; others are refused."""
    start: Callable[[Job, LaunchOptions, Say], int] | None = None
    """Starts the job and waits for its end; returns the workers' exit code. ``None``: files are written, and
    submitting them is the user's.

    Notes the job by ``write_state``. Raises ``ClusterError`` before anything is written: ``no-NAME`` where
    :attr:`command` or :attr:`package` is missing, ``too-small`` for a cluster below the plan's size; ``RunError`` for
    an end that no worker explained."""
    submit_with: str = ""
    """Without :attr:`start`: the command that submits ``{path}``, the first of the written files."""
    command: str = ""
    """A program that :attr:`start` cannot do without."""
    package: str = ""
    """A Python package that :attr:`start` cannot do without."""
    state: Callable[[str], str] | None = None
    """Job id → its state in a few words, also where the scheduler cannot be reached; ``None``: nobody is asked."""
    cancel: Callable[[str], str | None] | None = None
    """Asks a job to stop and says which; ``None`` for one that has ended. Raises ``RunError`` ``cancel-failed``."""
