"""Write a byte-level BPE tokenizer in the Hugging Face format from its vocabulary and merges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.shards import write_json


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte 0…255 in byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def write_tokenizer(
    folder: Path,
    *,
    vocabulary: Sequence[str],
    merges: Sequence[str],
    special: Sequence[str],
    split_digits: bool,
    options: dict[str, object],
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        folder: the checkpoint.
        vocabulary: token of each id.
        merges: ``"left right"`` in order of rank.
        special: tokens that are matched before splitting and skipped in decoded text.
        split_digits: each digit is a token of its own.
        options: further keys of ``tokenizer_config.json``: the roles of special tokens, a chat template.
    """
    ids = {token: number for number, token in enumerate(vocabulary)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps: list[dict[str, object]] = [{"type": "Digits", "individual_digits": True}] if split_digits else []
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": ids[token],
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for token in special
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": ids,
                "merges": list(merges),
            },
        },
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **options}
    write_json(folder / "tokenizer_config.json", config)
