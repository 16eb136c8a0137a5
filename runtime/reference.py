"""The plain model in one process: transformers' own forward, and the most straightforward LoRA on it.

Nothing here is shared with the training path: no FSDP, no dispatch, no grouped products, no fused operators. What the
training model computes is compared with this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.checkpoints.build import rebuild_buffers, state_shapes, tied_names
from shardwright.checkpoints.layouts import expert_layout
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.batch import IGNORE
from shardwright.runtime.experts.dense_block import is_dense
from shardwright.runtime.files import Files, open_files
from shardwright.runtime.images import seen_images
from shardwright.runtime.load.decode import read_base
from shardwright.runtime.lora.inject import adapter_names
from shardwright.runtime.lora.stack import WEIGHT, takes_sizes
from shardwright.schemas.lora import LoraTarget


@dataclass(frozen=True)
class ReferenceStep:
    """Loss per token and global gradient norm of one batch."""

    loss: float
    grad_norm: float


def load_plain(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Files]:
    """The unmodified model with its weights, whole, frozen; and the files it came from."""
    model, files = open_files(folder, dtype)
    tied = tied_names(model)
    with ShardReader(folder, files.headers) as reader:
        shapes = state_shapes(model)
        parameters = {name for name, _ in model.named_parameters()}
        for name, shape in shapes.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            value = read_base(reader, files.names, name, shape)
            held: dict[str, Any] = owner._parameters if name in parameters else owner._buffers
            value = value.to(device, held[leaf].dtype)
            held[leaf] = nn.Parameter(value, requires_grad=False) if name in parameters else value
    for alias, name in tied.items():
        owner, source = (model.get_submodule(one.rpartition(".")[0]) for one in (alias, name))
        owner._parameters[alias.rpartition(".")[2]] = source._parameters[name.rpartition(".")[2]]
    rebuild_buffers(model, device)
    return model, files


def add_plain_lora(
    model: nn.Module, targets: tuple[LoraTarget, ...], adapters: dict[str, Tensor], model_type: str
) -> dict[str, Tensor]:
    """Hook adapters onto a plain model.

    Args:
        model: from :func:`load_plain`.
        targets: what is adapted.
        adapters: whole tensors under the training model's names.
        model_type: the family.

    Returns:
        The adapters as leaves that collect gradients.
    """
    leaves = {name: value.detach().clone().requires_grad_(True) for name, value in adapters.items()}
    stacks: dict[str, dict[str, tuple[Tensor, Tensor, float]]] = {}
    for target in targets:
        a, b = (leaves[name] for name in adapter_names(target))
        scaling = float(target.scaling)
        if target.role == "router":  # a balancing loss reads them beside the matrix
            gate: Any = model.get_submodule(target.module)
            gate.lora_a, gate.lora_b, gate.lora_scaling = a, b, scaling
        if target.kind == "experts":
            stacks.setdefault(target.module, {})[target.parameter.rsplit(".", 1)[1]] = (a, b, scaling)
        elif target.role == "router" and type(router := model.get_submodule(target.module)) is not nn.Linear:
            router.forward = partial(_merged, router, router.forward, a, b, scaling)
        else:
            model.get_submodule(target.module).register_forward_hook(_linear_hook(a, b, scaling))
    for name, adapted in stacks.items():
        module: Any = model.get_submodule(name)
        if takes_sizes(module):
            module.forward = partial(_by_sizes, module, *adapted[WEIGHT])
            continue
        loop = _ExpertLoop(module, adapted, model_type)
        module.forward = loop.every_expert if is_dense(module) else loop
    return leaves


def _linear_hook(a: Tensor, b: Tensor, scaling: float) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        return output + scaling * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))

    return hook


def _merged(router: nn.Module, forward: Any, a: Tensor, b: Tensor, scaling: float, *args: Any, **kwargs: Any) -> Any:
    """A router's own forward on the merged matrix."""
    weight = router._parameters.pop("weight")
    assert weight is not None
    try:
        router.weight = weight + scaling * (b @ a).to(weight)
        return forward(*args, **kwargs)
    finally:
        del router.weight
        router._parameters["weight"] = weight


def _by_sizes(module: Any, a: Tensor, b: Tensor, scaling: float, inputs: Tensor, expert_size: list[int]) -> Tensor:
    """Every expert of a stack inside a linear, on its own rows."""
    parts = []
    for expert, x in enumerate(inputs.split(expert_size)):
        down, up = (a[expert], b[expert]) if a.dim() == 3 else (a, b)
        y = F.linear(x, module.weight[expert])
        parts.append(y + scaling * F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype)))
    return torch.cat(parts)


class _ExpertLoop:
    """Every expert in turn, with ordinary differentiable operations."""

    def __init__(self, module: Any, adapted: dict[str, tuple[Tensor, Tensor, float]], model_type: str) -> None:
        self.module, self.adapted, self.layout = module, adapted, expert_layout(model_type)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert in range(getattr(self.module, self.layout.down).shape[0]):
            token, choice = torch.where(top_k_index == expert)
            if token.numel() == 0:
                continue
            up = self._linear(hidden_states[token], self.layout.up, expert)
            down = self._linear(self._activate(up), self.layout.down, expert)
            weighted = (down * top_k_weights[token, choice, None]).to(total.dtype)
            total = total.index_add(0, token, weighted)
        return total

    def every_expert(self, hidden_states: Tensor) -> Tensor:
        """[E · T, H] → [E · T, H]: the e-th T rows through expert e."""
        experts = getattr(self.module, self.layout.down).shape[0]
        parts = []
        for expert, rows in enumerate(hidden_states.view(experts, -1, hidden_states.shape[-1])):
            up = self._linear(rows, self.layout.up, expert)
            parts.append(self._linear(self._activate(up), self.layout.down, expert))
        return torch.cat(parts)

    def _linear(self, x: Tensor, stack: str, expert: int) -> Tensor:
        weight = getattr(self.module, stack)[expert]
        y = F.linear(x, weight if self.layout.order == "out_in" else weight.T)
        if self.layout.biased:
            y = y + getattr(self.module, f"{stack}_bias")[expert]
        if stack in self.adapted:
            a, b, scaling = self.adapted[stack]
            a, b = (a[expert], b[expert]) if a.dim() == 3 else (a, b)
            y = y + scaling * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))
        return y

    def _activate(self, up: Tensor) -> Tensor:
        if not self.layout.gated:
            return self.module.act_fn(up)
        if hasattr(self.module, "_apply_gate"):
            return self.module._apply_gate(up)
        gate, value = up.chunk(2, dim=-1)
        return self.module.act_fn(gate) * value


def _documents(row: Tensor, every: bool) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """[3 or 4, S] planes → (ids, labels, images) [1, s] of each document, so that each runs alone.

    Args:
        every: those without a label too, padding among them; else only what counts.
    """
    starts = [place for place, position in enumerate(row[2].tolist()) if position == 0]
    pieces = [row[:, first:last] for first, last in zip(starts, [*starts[1:], row.shape[1]], strict=True)]
    images = [piece[3:4] if len(piece) == 4 else None for piece in pieces]
    counted = [every or bool((piece[1] != IGNORE).any()) for piece in pieces]
    return [(p[:1], p[1:2], image) for p, image, counts in zip(pieces, images, counted, strict=True) if counts]


class Weighed(Protocol):
    """A loss that layers attach by themselves, the mean over the tokens of what runs, times ``share``."""

    share: float


def reference_step(
    model: nn.Module,
    leaves: dict[str, Tensor],
    batch: Tensor,
    device: torch.device,
    rows: int = 1,
    attached: Weighed | None = None,
) -> ReferenceStep:
    """Loss per predicted token and gradient norm of a whole batch, some rows or one document at a time.

    Args:
        batch: [G, S] ids, or [G, 3 or 4, S] planes of ids, labels, positions and images.
        rows: ids of so many sequences run together.
        attached: what layers add to the gradient by themselves; it is told which share of the batch's tokens runs, so
            that every token weighs the same however the batch is cut, those without a label too.
    """
    planes = batch.dim() == 3
    tokens = int((batch[:, 1] != IGNORE).sum()) if planes else batch.shape[0] * (batch.shape[1] - 1)
    loss = 0.0
    for part in batch.to(device).split(1 if planes else rows):
        every = attached is not None
        for ids, labels, images in _documents(part[0], every) if planes else ((part, part[:, 1:], None),):
            if attached is not None:
                attached.share = ids.numel() / (batch.shape[0] * batch.shape[-1])
            seen = seen_images(model, images)
            logits = model(input_ids=ids, use_cache=False, **seen).logits[:, : labels.shape[1]].float()
            summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            share = summed / tokens
            if leaves:
                share.backward()
            loss += float(share.detach())
    squares = [value.grad.double().square().sum() for value in leaves.values() if value.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    return ReferenceStep(loss, norm)
