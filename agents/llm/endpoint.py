"""Which server is asked, from flags or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pydantic import ValidationError

from shardwright.schemas.errors import LlmUnavailableError, UsageError
from shardwright.schemas.llm import LlmEndpoint, LlmLimits
from shardwright.schemas.validation import explain

URL, MODEL, KEY = "SHARDWRIGHT_LLM_URL", "SHARDWRIGHT_LLM_MODEL", "SHARDWRIGHT_LLM_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


def endpoint_from(
    environment: Mapping[str, str],
    *,
    url: str = "",
    model: str = "",
    limits: LlmLimits | None = None,
    key_variable: str = KEY,
    prices: tuple[float | None, float | None] = (None, None),
) -> LlmEndpoint:
    """The endpoint to ask; flags before the environment.

    Args:
        key_variable: environment variable that holds the key.
        prices: per million prompt tokens, per million completion tokens.

    Raises:
        LlmUnavailableError: ``no-endpoint`` where neither names one.
        UsageError: ``bad-endpoint`` where the address or the model's name cannot be one.
    """
    url, model = url or environment.get(URL, ""), model or environment.get(MODEL, "")
    if not url or not model:
        missing = URL if not url else MODEL
        raise LlmUnavailableError(
            "no-endpoint",
            f"no language model is named: {missing} is not set",
            where="environment",
            next_action=f"set {URL} and {MODEL} to an OpenAI-compatible server, or leave --llm out: "
            "rules alone give a complete plan",
        )
    try:
        return LlmEndpoint(
            base_url=url,
            model=model,
            key_variable=key_variable,
            price_in=prices[0],
            price_out=prices[1],
            limits=limits or LlmLimits(),
        )
    except ValidationError as error:
        raise UsageError(
            "bad-endpoint", explain(error), where=URL, next_action="give http(s)://HOST/v1 without user or password"
        ) from error


def key_of(endpoint: LlmEndpoint, environment: Mapping[str, str]) -> str:
    """The key; a server on this machine may go without.

    Raises:
        LlmUnavailableError: ``no-key`` for a server elsewhere.
    """
    key = environment.get(endpoint.key_variable, "")
    if key or urlsplit(endpoint.base_url).hostname in LOCAL:
        return key or "none"
    raise LlmUnavailableError(
        "no-key",
        f"{endpoint.key_variable} is not set",
        where=endpoint.base_url,
        next_action=f"export {endpoint.key_variable}, or use --llm off",
    )
