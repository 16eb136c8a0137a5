"""When nothing fits: the smallest change of hardware or recipe that would."""

from __future__ import annotations

from shardwright.agents.strategy.oracle import Priced
from shardwright.agents.strategy.pricing import ByMesh, Pricer
from shardwright.agents.strategy.words import gib, term
from shardwright.schemas.cluster import ClusterSpec, LinkSpec
from shardwright.schemas.errors import InfeasibleError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.cost.memory import memory_of
from shardwright.search_spaces.space import enumerate_plans

LARGEST_WORLD = 4096
STEPS_BETWEEN = 8
SHORTEST_SEQUENCE = 128


def infeasible(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    leanest: Priced,
    counted: str,
    by_mesh: ByMesh | None = None,
) -> InfeasibleError:
    """The error for a cluster on which even the leanest legal strategy does not fit.

    Args:
        counted: how far fused operators were counted: "without fused operators", for example.
        by_mesh: those that were; without, the changes named fit without any.
    """
    memory = leanest.cost.memory
    alive = [c for c in memory.components if memory.peak_moment in c.moments]
    largest = max(alive, key=lambda c: c.bytes)
    changes = [f"devices with {gib(memory.reserved_bytes)} usable memory"]
    if world := smallest_world(profile, recipe, cluster, targets, by_mesh):
        changes.insert(0, f"{world} of these devices")
    if tokens := longest_sequence(profile, recipe, cluster, targets, by_mesh):
        changes.append(f"sequence_tokens = {tokens}")
    return InfeasibleError(
        "memory",
        f"no legal plan fits {counted}: the leanest, {leanest.strategy.text()}, needs "
        f"{gib(memory.reserved_bytes)} a rank and {gib(memory.budget_bytes)} are usable; most of it is "
        f"{term(largest.name)} ({gib(largest.bytes)})",
        where=f"{profile.architecture} on {cluster.world_size} × {cluster.device.name}",
        next_action="smallest changes that would fit: " + "; or ".join(changes),
    )


def smallest_world(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    by_mesh: ByMesh | None = None,
) -> int | None:
    """The fewest devices on which a plan fits, by doubling, then by whole nodes between; the batch grows to cover them.

    Doubling stops at ``LARGEST_WORLD``; ``None`` where nothing up to there fits. Between, at most ``STEPS_BETWEEN``
    worlds are tried.
    """

    def fits_on(world: int) -> bool:
        batch = recipe.batch.global_batch_sequences
        covering = recipe.batch.model_copy(update={"global_batch_sequences": -(-batch // world) * world})
        return fits(profile, recipe.model_copy(update={"batch": covering}), grown(cluster, world), targets, by_mesh)

    world = cluster.world_size * 2
    while not fits_on(world):
        world *= 2
        if world > LARGEST_WORLD:
            return None
    node = per_node(cluster, world)
    step = max(1, -(-world // 2 // node // STEPS_BETWEEN)) * node
    between = range(world // 2 + step, world, step) if world // 2 % node == 0 else ()
    return next((fewer for fewer in between if fits_on(fewer)), world)


def longest_sequence(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    by_mesh: ByMesh | None = None,
) -> int | None:
    """The longest sequence, by halving, with which a plan fits this cluster."""
    tokens = recipe.batch.sequence_tokens // 2
    while tokens >= SHORTEST_SEQUENCE:
        shorter = recipe.batch.model_copy(update={"sequence_tokens": tokens})
        if fits(profile, recipe.model_copy(update={"batch": shorter}), cluster, targets, by_mesh):
            return tokens
        tokens //= 2
    return None


def fits(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    by_mesh: ByMesh | None = None,
) -> bool:
    """Whether any legal strategy stays within the budget, by memory alone."""
    table = enumerate_plans(SearchContext(profile, recipe, cluster))
    if not len(table):
        return False
    pricer = Pricer(workload(profile, recipe, targets), cluster, by_mesh=by_mesh)
    return any(
        bool(memory_of(pricer.work, cluster, table.plans.take(positions), fused).fits.any())
        for fused, positions in pricer.groups(table.plans)
    )


def per_node(cluster: ClusterSpec, world: int) -> int:
    """Devices of a node in a larger world: as many as now, eight at least."""
    size = min(world, max(cluster.devices_per_node, 8))
    while world % size:
        size -= 1
    return size


def grown(cluster: ClusterSpec, world: int) -> ClusterSpec:
    """More of the same devices, for their memory alone: nothing is said about the links between them."""
    links = {link.name: link for link in cluster.links}
    for name in ("intra_node", "inter_node"):
        links.setdefault(name, LinkSpec(name=name, bandwidth_bytes_per_s=1e9, latency_s=0))
    size = per_node(cluster, world)
    return cluster.model_copy(update={"devices_per_node": size, "nodes": world // size, "links": tuple(links.values())})
