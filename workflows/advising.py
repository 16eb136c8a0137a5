"""Which language model advises, how it is reached, and where its recording goes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import LlmUnavailableError, RunError, UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.llm import LlmMode
from shardwright.workflows.advice import Advice
from shardwright.workflows.llm_options import LlmOptions
from shardwright.workflows.request import LlmRequest

if TYPE_CHECKING:
    from shardwright.agents.llm.wire import Wire

RECORDING = "llm.jsonl"
"""A run's exchanges with a language model, in its folder."""


def llm_request(
    wanted: Advice,
    *,
    url: str = "",
    model: str = "",
    replay: Path | None = None,
    offline: bool = False,
    options: LlmOptions | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[LlmRequest | None, str]:
    """Look whether a language model can be asked, before any work is done.

    Args:
        replay: a recording to play in place of asking.
        options: budgets, prices, and an address that ``url`` and ``model`` come before.

    Returns:
        The request, ``None`` where rules alone decide; and what to tell the user of that, empty where nothing.

    Raises:
        LlmUnavailableError: ``no-endpoint``, ``no-key``, ``no-client`` or ``offline``, where one is required.
        UsageError: the address, or the recording, cannot be one.
    """
    from shardwright.agents.llm.endpoint import endpoint_from, key_of

    if wanted is Advice.off:
        return None, ""
    given = os.environ if environment is None else environment
    try:
        if offline and replay is None:
            raise _unavailable("offline", "--offline asks no other machine")
        chosen = options or LlmOptions()
        endpoint = endpoint_from(
            given,
            url=url or chosen.base_url,
            model=model or chosen.model,
            limits=chosen.limits,
            key_variable=chosen.key_variable,
            prices=(chosen.price_in, chosen.price_out),
        )
        if replay is not None:
            return _replayed(wanted, endpoint, replay), ""
        if importlib.util.find_spec("openai") is None:
            raise _unavailable("no-client", "the openai package is not installed", "pip install 'shardwright[llm]'")
        key_of(endpoint, given)
    except LlmUnavailableError as error:
        if wanted is Advice.required:
            raise
        return None, f"no language model advises ({error.what}); rules alone decide"
    return LlmRequest(mode=cast(LlmMode, wanted.value), endpoint=endpoint), ""


def _replayed(wanted: Advice, endpoint: object, replay: Path) -> LlmRequest:
    if not replay.is_file():
        raise UsageError("missing-recording", "no such recording", where=str(replay), next_action="name its llm.jsonl")
    fields = {"mode": wanted.value, "endpoint": endpoint, "replay": str(replay.resolve())}
    return LlmRequest.model_validate({**fields, "replay_sha256": sha256_file(replay)})


def _unavailable(code: str, what: str, then: str = "") -> LlmUnavailableError:
    words = "leave --llm out, or say --llm advise: rules alone give a complete plan"
    return LlmUnavailableError(code, what, where="--llm required", next_action=f"{then}; or {words}" if then else words)


def wire_for(asked: LlmRequest) -> Wire:
    """The wire of a request: its recording, or the server.

    Raises:
        RunError: ``changed-input``: the recording is not the one that the run began with.
        LlmUnavailableError: ``no-key``.
    """
    from shardwright.agents.llm.endpoint import key_of
    from shardwright.agents.llm.recording import Replay
    from shardwright.agents.llm.wire import OpenAIWire

    if not asked.replay:
        return OpenAIWire(asked.endpoint, key_of(asked.endpoint, os.environ))
    path = Path(asked.replay)
    if not path.is_file() or sha256_file(path) != asked.replay_sha256:
        raise RunError(
            "changed-input",
            "the recording is not the one that this run began with",
            where=asked.replay,
            next_action="restore it, or start a new run with it as it is now",
        )
    return Replay.load(path)


def keep_recording(run_dir: Path, plan_file: Path) -> Path | None:
    """Put a run's recording beside the plan that it led to; ``None`` where no model was asked."""
    recording = run_dir / RECORDING
    if not recording.is_file():
        return None
    kept = plan_file.with_suffix(f".{RECORDING}")
    write_atomic(kept, recording.read_bytes())
    return kept
