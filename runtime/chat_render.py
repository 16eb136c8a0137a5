"""A chat template rendered in a process of its own, which ends itself where a template takes too long.

Started by path, it imports jinja2 and the standard library alone. Templates come with checkpoints, so they run in
jinja2's immutable sandbox: no attribute that starts with an underscore, no call that changes a value. That bounds no
time: loops can be nested, and a power of two numbers is one operation. Nor could it be counted from inside, for neither
a product of strings nor a filter passes through jinja2 while it runs. So the system's clock of processor time ends this
process wherever it is, and its limit of memory turns a text without end into an error. Without a parent there is no
next line to wait for.

Each line of standard input is an object, and each is answered by one. The first: ``template``, ``seconds`` of
processor time for one answer, ``bytes`` of memory. Then ``messages``, ``tokens``, and ``cuts``: for each text how many
of the messages, and whether an answer is to follow.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RAISED = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What a template can raise."""


class Generation(Extension):
    """``{% generation %}`` … ``{% endgeneration %}``, which marks answers: its body, as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def compiled(text: str) -> Any:
    """A template as checkpoints expect it. It sees no clock, so a conversation is the same text on every day."""
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = ImmutableSandboxedEnvironment(**options, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _tojson
    return environment.from_string(text)


def _raise(text: str) -> None:
    raise TemplateError(text)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))


def _rendered(template: Any, asked: dict[str, Any]) -> dict[str, Any]:
    messages, tokens = asked["messages"], asked["tokens"]
    return {
        "texts": [
            template.render(messages=messages[:count], add_generation_prompt=opened, **tokens)
            for count, opened in asked["cuts"]
        ]
    }


def main() -> None:
    """Answer until standard input ends."""
    begun = json.loads(sys.stdin.readline())
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(begun["bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    template: Any = None
    asked: dict[str, Any] = {}
    while True:
        signal.setitimer(signal.ITIMER_PROF, float(begun["seconds"]))
        try:
            if template is None:
                template, answer = compiled(begun["template"]), {}
            else:
                answer = _rendered(template, asked)
        except RAISED as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if template is None or not line:
            return
        asked = json.loads(line)


if __name__ == "__main__":
    main()
