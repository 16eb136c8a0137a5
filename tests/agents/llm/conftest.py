"""Chats with a scripted server on the loopback, where any other connection fails; and a captured model."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.agents.llm.budget import Budget
from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.open_regions import open_regions
from shardwright.agents.llm.proposed import as_match
from shardwright.agents.llm.recording import Recorder
from shardwright.agents.llm.scripted import Script, Served, serve
from shardwright.agents.llm.structure_advisor import StructureAdvisor
from shardwright.agents.llm.wire import OpenAIWire
from shardwright.agents.structure.canonical import canonical_graphs
from shardwright.agents.structure.capture import capture_model
from shardwright.agents.structure.facts import observe
from shardwright.agents.structure.propose import find_matches
from shardwright.agents.structure.rank import Target
from shardwright.schemas.llm import LlmEndpoint, LlmLimits
from shardwright.schemas.profile import LayerKind
from shardwright.schemas.recipe import DataSpec, LoraSpec, PrecisionSpec, Recipe
from shardwright.search_spaces.catalogue import load_cluster

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise AssertionError(f"a connection to {address[0]} in an offline test")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def talk() -> Iterator[Callable[..., tuple[Chat, Served]]]:
    """Script and limits → a chat with that server."""
    with ExitStack() as open_servers:

        def start(script: Script, **limits: Any) -> tuple[Chat, Served]:
            served = open_servers.enter_context(serve(script))
            endpoint = LlmEndpoint(
                base_url=served.base_url, model="scripted", limits=LlmLimits(**{"reply_seconds": 5, **limits})
            )
            wire = OpenAIWire(endpoint, "key", sleep=lambda seconds: None)
            return Chat(Recorder(wire), Budget(endpoint)), served

        yield start


@pytest.fixture(scope="session")
def gpt_oss() -> SimpleNamespace:
    """A tiny gpt_oss on meta: its captured graphs, matches, facts, and an advisor for one H200."""
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=264, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=1, layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kind = LayerKind(name="layer", attention="full", mlp="moe", layer_indices=(0, 1), parameters=1)
    pairs = canonical_graphs(capture_model(model, (kind,), 2))
    matches = find_matches(pairs)
    facts = observe(model, ["model.layers.0", "model.layers.1"], ())
    recipe = Recipe(
        data=DataSpec(train="train.jsonl", held_out="held_out.jsonl"),
        lora=LoraSpec(targets=("attention", "experts"), rank=4),
        precision=PrecisionSpec(base="bfloat16"),
    )
    regions = [
        region
        for captured, canonical in pairs
        if canonical is not None
        for region in open_regions(
            captured, canonical, {i for m in matches if m.captured is captured for i in m.region.canonical_ids}
        )
    ]

    def match(*operators: str) -> Any:
        """The part of one region that has all these operators and no other."""
        for region in regions:
            part = region.part([n.id for n in region.op_nodes if n.target in operators])
            if {n.target for n in part.op_nodes} == {*operators} and "softmax" in {n.target for n in region.op_nodes}:
                return as_match(part)
        raise AssertionError(f"no region has {operators}")

    def advisor() -> StructureAdvisor:
        return StructureAdvisor(pairs, matches, facts, Target(load_cluster("h200-1"), profile_stub(), recipe))

    return SimpleNamespace(pairs=pairs, matches=matches, facts=facts, regions=regions, match=match, advisor=advisor)


def profile_stub() -> Any:
    """The one thing that ranking asks of a profile."""
    return SimpleNamespace(packing=())
