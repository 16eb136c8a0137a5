"""The structure agent's language model: it looks at regions no pattern knows, names them, and proposes fusions.

Everything it proposes becomes a match like any other and meets the same certificate. It sees counted-out names,
operators, shapes, bytes and launches; it never sees a name out of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from shardwright.agents.llm.chat import Chat
from shardwright.agents.llm.loop import Ended, run_loop
from shardwright.agents.llm.open_regions import OpenRegion, open_regions
from shardwright.agents.llm.proposed import as_match
from shardwright.agents.llm.redact import facts_only, operator_word, printable
from shardwright.agents.llm.region_cost import gain, region_variants
from shardwright.agents.llm.tools import Arguments, Choices, NoArguments, Tool, Toolbox
from shardwright.agents.structure.capture import CAPTURE_ERRORS
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.facts import ModelFacts
from shardwright.agents.structure.patterns import Match
from shardwright.agents.structure.propose import Pairs
from shardwright.agents.structure.rank import Target
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionProposal, Region
from shardwright.schemas.llm import Suggestion
from shardwright.schemas.words import plural

MOST_REGIONS = 24
REPEATED = "repeated"
MOST_NODES = 200
TASK = (
    "List the open regions, look at those that waste most bytes or launches, and propose those that one kernel could "
    "compute. Name what you recognise. End with finish."
)


class RegionArgument(Arguments):
    """Which region, as list_regions names it."""

    region: str


class NameArguments(Arguments):
    """A region and what it computes, in a few words."""

    region: str
    words: str = Field(max_length=400)


class ProposeArguments(Arguments):
    """A region and those of its nodes that should be one kernel; an empty list means all."""

    region: str
    nodes: list[str]
    reason: str = Field(max_length=400)


class FinishArguments(Arguments):
    """The proposed regions, the most valuable first, and why."""

    order: list[str]
    reason: str = Field(max_length=600)


@dataclass
class StructureAdvice:
    """What came of it."""

    proposals: list[FusionProposal] = field(default_factory=list)
    matches: dict[str, tuple[Match, OpenRegion]] = field(default_factory=dict)
    """Proposal id → match and region, for compiling and measuring."""
    suggestions: list[Suggestion] = field(default_factory=list)


class StructureAdvisor:
    """Tools over the open regions of one model.

    Args:
        pairs: captured graphs with their canonical forms.
        matches: what patterns claim.
    """

    def __init__(self, pairs: Pairs, matches: tuple[Match, ...], facts: ModelFacts, target: Target) -> None:
        self.facts, self.target, self.advice = facts, target, StructureAdvice()
        self.regions: dict[str, OpenRegion] = {}
        found: list[OpenRegion] = []
        for captured, canonical in pairs:
            if canonical is not None:
                own = (m.region.canonical_ids for m in matches if m.captured is captured)
                found += open_regions(captured, canonical, {i for ids in own for i in ids})
        found.sort(key=lambda region: -self.saved_ms(region))
        self.regions = {f"region-{at + 1}": region for at, region in enumerate(found[:MOST_REGIONS])}
        self.asked: set[tuple[str, str]] = set()
        """Tool and region of calls that would tell or change nothing if they were made again."""

    def saved_ms(self, region: OpenRegion) -> float:
        """Modelled time that one kernel would save in all places of a step."""
        one = gain(region, "compile", self.target)
        return (one.eager_ms - one.time_ms) * len(region.captured.occurrences)

    def run(self, chat: Chat) -> Ended:
        """Let a model work; the advice holds what it got through, even where the wire fails."""
        return run_loop(chat, self.toolbox(), TASK)

    def toolbox(self) -> Toolbox:
        def fresh(tool: str) -> Callable[[], tuple[Choices, ...]]:
            return lambda: ({"region": tuple(name for name in self.regions if (tool, name) not in self.asked)},)

        return Toolbox(
            (
                Tool("list_regions", "Open regions: launches, bytes, places.", NoArguments, self.list_regions),
                Tool(
                    "show_region",
                    "Operators, shapes and edges of a region.",
                    RegionArgument,
                    self.show,
                    choices=fresh("show"),
                ),
                Tool(
                    "find_similar",
                    "Regions with like operators.",
                    RegionArgument,
                    self.similar,
                    choices=fresh("similar"),
                ),
                Tool(
                    "name_region",
                    "Say in words what a region computes.",
                    NameArguments,
                    self.name,
                    choices=fresh("name"),
                ),
                Tool(
                    "propose_region",
                    "Propose nodes of a region as one kernel.",
                    ProposeArguments,
                    self.propose,
                    choices=self.parts,
                ),
                Tool(
                    "finish",
                    "End, with the order of what was proposed.",
                    FinishArguments,
                    self.finish,
                    ends=True,
                    choices=self.orders,
                ),
            )
        )

    def parts(self) -> tuple[Choices, ...]:
        """Regions not proposed whole so far, each with its own nodes."""
        return tuple(
            {"region": (name,), "nodes": tuple(f"node-{at}" for at in range(len(region.nodes)))}
            for name, region in self.regions.items()
            if ("propose", name) not in self.asked
        )

    def orders(self) -> tuple[Choices, ...]:
        """An end is offered once something was proposed, or nothing is left to propose."""
        if self.parts() and not any(s.kind == "propose-region" for s in self.advice.suggestions):
            return ()
        return ({"order": tuple(self.proposed()) or ("none",)},)

    def proposed(self) -> dict[str, set[str]]:
        """Alias of a region → ids of the proposals accepted in it, of the whole and of parts."""
        found: dict[str, set[str]] = {}
        for name, whole in self.regions.items():
            for proposal, (_, region) in self.advice.matches.items():
                if region.captured is whole.captured and set(region.nodes) <= set(whole.nodes):
                    found.setdefault(name, set()).add(proposal)
        return found

    def list_regions(self, arguments: NoArguments) -> dict[str, Any]:
        rows = [
            {
                "region": name,
                "nodes": len(region.nodes),
                "launches": region.launches,
                "bytes": region.eager_bytes,
                "floor_bytes": region.floor_bytes,
                "places": len(region.captured.occurrences),
            }
            for name, region in self.regions.items()
        ]
        result: dict[str, Any] = facts_only({"regions": rows})
        return result

    def show(self, arguments: RegionArgument) -> dict[str, Any]:
        region = self.regions.get(arguments.region)
        if region is None:
            return {"error": "no such region"}
        self.asked.add(("show", arguments.region))
        names = {i: f"node-{at}" for at, i in enumerate(region.nodes)}
        names |= {i: f"input-{at}" for at, i in enumerate(region.inputs)}
        nodes = []
        for node in region.op_nodes[:MOST_NODES]:
            shape = list(node.output.shape) if node.output else []
            dtype = node.output.dtype if node.output else ""
            word = operator_word(node.target)
            one = {"node": names[node.id], "op": word, "reads": [names[i] for i in node.inputs], "shape": shape}
            nodes.append(facts_only(one, (word,)) | {"dtype": facts_only(dtype)})
        outputs = [names[i] for i in region.outputs]
        return {"region": arguments.region, "nodes": nodes, "outputs": outputs, "cut": len(region.nodes) > MOST_NODES}

    def similar(self, arguments: RegionArgument) -> dict[str, Any]:
        region = self.regions.get(arguments.region)
        if region is None:
            return {"error": "no such region"}
        self.asked.add(("similar", arguments.region))
        own = Counter(node.target for node in region.op_nodes)
        rows = []
        for name, other in self.regions.items():
            theirs = Counter(node.target for node in other.op_nodes)
            share = (own & theirs).total() / max((own | theirs).total(), 1)
            if name != arguments.region and share >= 0.5:
                rows.append({"region": name, "shared": round(share, 2)})
        return {"similar": sorted(rows, key=lambda row: -float(str(row["shared"])))}

    def name(self, arguments: NameArguments) -> dict[str, Any]:
        known = arguments.region in self.regions
        self.asked.add(("name", arguments.region))
        because = "kept as the model's words beside the region" if known else "no such region"
        subject = self.subject(arguments.region)
        self._note("name-region", subject, arguments.words, known, because)
        return {"result": "accepted" if known else "refused"}

    def propose(self, arguments: ProposeArguments) -> dict[str, Any]:
        whole = self.regions.get(arguments.region)
        if whole is None:
            self._note("propose-region", "other", arguments.reason, False, "no such region")
            return {"error": "no such region"}
        chosen = {i for at, i in enumerate(whole.nodes) if not arguments.nodes or f"node-{at}" in arguments.nodes}
        region, subject = whole.part(chosen), self.subject(arguments.region)
        because = self._gate(region)
        if len(region.nodes) == len(whole.nodes) or because.startswith(REPEATED):
            self.asked.add(("propose", arguments.region))
        self._note("propose-region", subject, arguments.reason, not because, because or "all obligations proved")
        return {"result": "refused", "obligation": because.split(":")[0][:60]} if because else {"result": "accepted"}

    def _gate(self, region: OpenRegion) -> str:
        """Why a region is refused; empty where it is proposed now."""
        if region.launches < 2:
            return "size: fewer than two launches, nothing to fuse"
        try:
            match = as_match(region)
        except LegalityError as error:
            return f"not-a-region: {error.what}"
        nodes = sha256_of(list(region.nodes))[:8]
        name = f"proposed-region:{region.captured.kind}:{region.nodes[0]}-{nodes}"
        if name in self.advice.matches:
            return f"{REPEATED}: this region is proposed already"
        try:
            certificate = certify(match, self.facts)
        except CAPTURE_ERRORS as error:
            return f"not-examined: {type(error).__name__} while its certificate was made"
        if not certificate.legal:
            return certificate.refused_because()
        faster = gain(region, "compile", self.target)
        if faster.speedup <= 1:
            return f"no-gain: modelled at {faster.speedup:.2f} of eager"
        adapted = any(parameter in self.facts.adapted for parameter in match.all_parameters())
        modules = match.modules()
        self.advice.matches[name] = (match, region)
        self.advice.proposals.append(
            FusionProposal(
                id=name,
                pattern=match.pattern.name,
                title=f"Proposed region of {plural(region.launches, 'launch')} at {match.label}, "
                f"{plural(len(modules), 'place')}",
                region=Region(layer_kind=match.captured.kind, modules=modules, roles=match.roles),
                certificate=certificate,
                variants=region_variants(match, region, self.target, adapted=adapted),
                chosen=None,
                reason="not chosen yet",
            )
        )
        return ""

    def finish(self, arguments: FinishArguments) -> dict[str, Any]:
        """Put proposals in the model's order, those it forgot last."""
        known = self.proposed()
        wanted = [name for name in dict.fromkeys(arguments.order) if name in known]
        rank = {proposal: at for at, name in enumerate(wanted) for proposal in known[name]}
        self.advice.proposals.sort(key=lambda p: rank.get(p.id, len(wanted)))
        accepted = bool(wanted)
        because = f"order of {len(wanted)} proposed" if accepted else "names nothing that was accepted"
        self._note("rank", "proposed regions", arguments.reason, accepted, because)
        return {"result": "accepted" if accepted else "refused"}

    def subject(self, alias: str) -> str:
        """Our own name of a region, for provenance."""
        region = self.regions.get(alias)
        return "other" if region is None else f"{region.captured.kind}:{region.nodes[0]}"

    def _note(self, kind: Any, subject: str, words: str, accepted: bool, because: str) -> None:
        self.advice.suggestions.append(
            Suggestion(kind=kind, subject=subject, words=printable(words), accepted=accepted, because=because[:400])
        )
