"""Documents of packed rows as sparse attention needs them: on the device, without waiting for it.

Where sequences are cut over ranks (``runtime.context``) the tokens at hand are a rank's own, and keys are those of all
ranks: places and documents are of the whole packed rows.
Legend: B rows, S tokens a row at hand, T = B · S, N keys: T, or cp · T of cut rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime import context
from shardwright.runtime.segments import active
from shardwright.schemas.errors import LegalityError


@dataclass(frozen=True)
class Borders:
    """Where the documents of the packed rows begin; on the device, without waiting for it."""

    B: int
    S: int
    first: Tensor
    """``[T]`` int64: first token of each token's document."""
    ends: tuple[int, ...] | None = None
    """0 and the end of every document, where the host knows them."""
    cut: context.Cut | None = None
    """How the rows at hand are cut over ranks."""

    @classmethod
    def of(cls, hidden: Tensor, positions: Tensor | None) -> Borders:
        """From positions ``[B, S]`` that start anew with every document; each row is one where there are none."""
        B, S = hidden.shape[:2]
        if (cut := context.active()) is not None:
            return cls._of_cut(B, S, cut)
        at = torch.arange(B * S, device=hidden.device)
        begins = at % S == 0
        if positions is not None:
            begins = begins | (positions.expand(B, S).reshape(-1) == 0)
        return cls(B, S, torch.where(begins, at, 0).cummax(0).values, known_ends(B, S, one_each=positions is None))

    @classmethod
    def of_mask(cls, hidden: Tensor, mask: Tensor | None) -> Borders:
        """From what each token sees ``[B, 1, S, S]``: its document begins with the first; ``None``: a row each."""
        if mask is None or context.active() is not None:
            return cls.of(hidden, None)
        B, S = hidden.shape[:2]
        first = mask[:, 0].to(torch.int8).argmax(-1).expand(B, S)
        row = torch.arange(B, device=hidden.device)[:, None] * S
        return cls(B, S, (first + row).reshape(-1), known_ends(B, S, one_each=False))

    @classmethod
    def _of_cut(cls, B: int, S: int, cut: context.Cut) -> Borders:
        row = torch.arange(B, device=cut.positions.device)[:, None] * cut.tokens
        first = row if cut.starts is None else cut.place.own(cut.starts) + row
        return cls(B, S, first.expand(B, S).reshape(-1), cut=cut)

    @property
    def at(self) -> Tensor:
        """``[T]``: each token's own place."""
        if self.cut is None:
            return self.keys
        return self.cut.place.own(self.keys.view(self.B, self.row_tokens)).reshape(-1)

    @property
    def row_tokens(self) -> int:
        """Tokens of a whole row."""
        return self.S if self.cut is None else self.cut.tokens

    @property
    def keys(self) -> Tensor:
        """``[N]``: the places of all keys."""
        return torch.arange(self.B * self.row_tokens, device=self.first.device)

    def gathered(self, own: Tensor) -> Tensor:
        """``[T, ·]`` of the tokens at hand → ``[N, ·]`` of all keys; of cut rows a collective, its gradient a sum."""
        if self.cut is None:
            return own
        return context.gather_tokens(own.view(self.B, 1, self.S, -1), self.cut.place).flatten(0, 2)

    def cu_seqlens(self) -> Tensor:
        """``[T + 1]`` int64: begins of documents in order, then T as often as needed: a length that is known here."""
        T = self.B * self.S
        begins = torch.where(self.first == self.at, self.at, T).sort().values
        return torch.cat((begins, begins.new_full((1,), T)))

    def bounds(self) -> Tensor:
        """``[T, 2]`` int32: first key that a query may see, and the one past its last."""
        return torch.stack((self.first, self.at + 1), 1).to(torch.int32)

    def require(self, mask: Tensor, name: str) -> None:
        """Compare the family's mask with these documents: ``[B, 1, S, S]``, or ``[B, S]`` of tokens that are there.

        Raises:
            LegalityError: ``fusion-dsa``.
        """
        B, S = self.B, self.S
        if mask.dim() == 2:
            if missing := int((mask == 0).sum()):
                raise refused(name, f"{missing} of {mask.numel()} tokens are padding, and nothing keeps them apart")
            return
        seen = (mask if mask.dtype == torch.bool else mask == 0).expand(B, -1, S, S)[:, 0]
        if not torch.equal(seen, self.seen()):
            count = int((seen != self.seen()).sum())
            raise refused(name, f"the mask differs from causal documents at {count} of {B * S * S} places")

    def seen(self) -> Tensor:
        """``[B, S, S]``: which keys of its row a query may see."""
        row = torch.arange(self.B, device=self.first.device)[:, None] * self.S
        first = (self.first.view(self.B, self.S) - row)[..., None]
        keys = torch.arange(self.S, device=self.first.device)
        return (keys <= keys[:, None]) & (keys >= first)


def known_ends(B: int, S: int, *, one_each: bool) -> tuple[int, ...] | None:
    """Ends of the documents of the rows that run now, as far as the host knows them without asking the device."""
    bounds = active()
    if bounds is not None and (len(bounds), bounds[0][-1]) == (B, S):
        return (0, *(row * S + end for row, of_row in enumerate(bounds) for end in of_row[1:]))
    return tuple(range(0, B * S + 1, S)) if one_each else None


def refused(name: str, what: str) -> LegalityError:
    """What is not as the plan has it."""
    return LegalityError("fusion-dsa", what, where=name, next_action="reject the dsa proposal for this family")
