"""Ask for a kernel, judge it, send back what was wrong, a bounded number of times."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.kernel_writer.judge import Verdict, judge, plausible
from shardwright.agents.llm.kernel_writer.screen import SOURCE_BYTES
from shardwright.agents.llm.kernel_writer.task import Task
from shardwright.schemas.canonical import sha256_hex

ATTEMPTS = 3
KERNEL_TOKENS = 8000
RULES = """Write one Python module with Triton kernels for the operations below.
It imports torch, triton and triton.language as tl, and nothing else. It defines forward(x0, x1, ...) -> tuple of
y0, y1, ... and backward(x0, x1, ..., dy0, dy1, ...) -> tuple with the gradient of each floating input, in order.
Launchers only make empty memory and launch kernels decorated with @triton.jit; sizes come from the tensors' shapes.
Every number of tokens must work. Inputs are not changed; nothing is kept between calls."""


class Written(BaseModel):
    """A kernel file."""

    model_config = ConfigDict(extra="forbid")
    source: str = Field(max_length=SOURCE_BYTES)


@dataclass(frozen=True)
class Outcome:
    """The last source and its verdict."""

    source: str
    verdict: Verdict
    attempts: int


def seed_of(source: str) -> int:
    """Inputs depend on the text, so the text cannot depend on them; a replay draws the same."""
    return int(sha256_hex(source.encode())[:7], 16)


def write_kernel(chat: Chat, task: Task, *, device: str = "cpu", floor_ms: float = 0.0) -> Outcome:
    """Let a model write a kernel for a region.

    Args:
        floor_ms: of both passes at the timed size; what claims to be faster is refused.

    Raises:
        LlmError: as ``Chat.ask``; ``no-sandbox``.
    """
    asked = f"{RULES}\n\nOperations:\n{task.text()}"
    messages = [{"role": "user", "content": asked}]
    source, verdict = "", Verdict(False, "nothing was written")
    for attempt in range(ATTEMPTS):
        source = chat.ask(messages, Written, tokens=KERNEL_TOKENS).source
        verdict = plausible(judge(source, task, seed=seed_of(source), device=device), floor_ms)
        if verdict.accepted:
            return Outcome(source, verdict, attempt + 1)
        messages = [
            {"role": "user", "content": f"{asked}\n\nThe last attempt failed: {verdict.because[:300]}. Write it again."}
        ]
    return Outcome(source, verdict, ATTEMPTS)
