"""The identity of the model in a folder, beyond tensor sizes: a run can resume only checkpoints with the same identity.

It is cheap and equal for copies of a folder: the settings that change results, a digest of the weights from their
headers and a few blocks, and a digest of each file of the tokenizer. Needs neither torch nor Megatron.

A user may have written down the SHA-256 of a folder's files in SHA256SUMS (`sha256sum * > SHA256SUMS`), as the
statement which files these are. A start reads every listed file and refuses another one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import TOKENIZER_FILES, ModelFolder
from megatron_rl.checkpoint.weight_files import StoredTensor, read_weight_files
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import (
    REWARD_FAMILIES,
    Family,
    ImageForm,
    family_of,
    head_cap,
    image_form,
    rope_of,
    rope_type,
    ropes_of,
    rotary_share,
    routing_of,
    sliding_window,
    tower_of,
)

SAMPLED_TENSORS, BLOCK = 256, 4096
"""Tensors of which bytes are compared, and how many bytes of each."""
WEIGHTS = "weights"
"""The name of the digest of the weights in an identity."""
FILES = "weight files"
"""The name of the digests of whole files of weights, where the folder lists them; compared where both sides have it."""
SHOWN = 12
"""Hexadecimal digits of a digest, of 64."""
LIST = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
READ = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "vocab.*")
"""Patterns of files that a run reads. Each must be in the list, or a file next to it could take its place."""
EPS, THETA = 1e-6, 1e4
"""transformers' values where config.json has none and the family has no defaults of its own."""


def computed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an accepted config.json that change a model's outputs but not its tensors' sizes.

    Missing keys have transformers' defaults; both spellings of the rotary embedding give the same result.
    """
    family = family_of(settings["architectures"])
    settings = family.given(settings)
    rope = rope_of(settings)
    theta = rope.get("rope_theta", settings.get("rope_theta"))
    spelling = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    facts: dict[str, Any] = {
        "rms_norm_eps": settings.get("rms_norm_eps") or EPS,
        "rope_theta": theta or THETA,
        "rope_type": rope_type(settings),
        "rope_scaling": {name: rope[name] for name in sorted(rope) if name not in spelling},
        "sliding_window": sliding_window(family, settings),
    }
    if ropes := ropes_of(family.attention, settings):
        facts |= {"rope_theta": None, "rope_type": None, "rope_scaling": ropes}
    facts |= _attention_choices(family, settings)
    if (routing := routing_of(family, settings)) is not None:
        facts |= {"num_experts_per_tok": routing.experts_per_token, "norm_topk_prob": routing.normalised}
        facts |= {"dense_layers": list(routing.dense_layers)} if routing.dense_layers else {}
        if routing.scoring is not None:
            facts |= {"groups": [routing.num_groups, routing.groups_per_token], "routed_scaling_factor": routing.scale}
    return facts


def _attention_choices(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of attention and head that only some families have."""
    keys, chosen = family.attention, dict[str, Any]()
    if keys.partial_rotary is not None:
        chosen["partial_rotary_factor"] = rotary_share(keys, settings)
    if keys.local:
        shape = keys.described(
            settings, settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        )
        chosen |= {
            "attention_scale": shape.scale,
            "attention_soft_cap": shape.soft_cap,
            "windows": list(shape.windows),
        }
    cap = head_cap(settings)
    return chosen if cap is None else chosen | {"final_logit_softcapping": cap}


def compared(identity: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of `identity` that must equal those of `saved`: digests of files only where both have them."""
    return {name: value for name, value in identity.items() if name != FILES or name in saved}


def folder_identity(folder: ModelFolder) -> dict[str, Any]:
    """All parts of the identity, by name; JSON-ready. Unreadable files are left out: other checks report them.

    Raises UnreadableFileError for config.json.
    """
    facts, path = computed_settings(folder.settings), folder.path
    if not any(name in REWARD_FAMILIES for name in folder.settings["architectures"]):
        facts |= {} if folder.declared_ends is None else {"eos_token_id": folder.declared_ends}
    try:
        tensors, faults = folder.stored
        facts |= {WEIGHTS: weights_digest(tensors)} if tensors and not faults else {}
        listed = {name: digest for name, digest in listed_digests(path).items() if name.endswith(".safetensors")}
        facts |= {FILES: listed} if listed else {}
        for name in TOKENIZER_FILES:
            if (path / name).is_file():
                with (path / name).open("rb") as file:
                    facts[name] = hashlib.file_digest(file, "sha256").hexdigest()[:SHOWN]
    except OSError:
        pass  # a file that went while it was read
    return facts


def folder_digest(folder: Path) -> str | None:
    """`weights_digest` of a folder; None if its weights cannot be read. Raises OSError."""
    tensors, faults = read_weight_files(folder)
    return weights_digest(tensors) if tensors and not faults else None


def weights_digest(tensors: Mapping[str, StoredTensor], most: int = SAMPLED_TENSORS) -> str:
    """Digest of all names, types and shapes, and of one block of each of up to `most` tensors.

    The distribution of tensors over files does not matter. Names decide which tensors are sampled and where, so no
    pattern of layers is missed. Raises OSError.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(repr((name, tensors[name].dtype, tensors[name].shape)).encode())
    for place, name in sorted((_place(name), name) for name in tensors)[:most]:
        tensor = tensors[name]
        room = max(0, tensor.stop - tensor.start - BLOCK)
        with tensor.file.open("rb") as file:
            file.seek(tensor.start + place % (room + 1))
            digest.update(file.read(min(BLOCK, tensor.stop - tensor.start)))
    return digest.hexdigest()[:SHOWN]


def tower_facts(path: str) -> tuple[ImageForm, str] | None:
    """Return how the model of a folder reads images, and the `weights_digest` of its vision tower, by which two folders
    with equal towers are recognised; None without a tower that can be read.
    """
    try:
        folder = ModelFolder(path)
        tower, form = tower_of(folder.facts.get("architectures")), image_form(folder.facts)
        if tower is None or form is None:
            return None
        tensors, faults = folder.stored
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(tower.prefix)}
        return (form, weights_digest(own, len(own))) if own and not faults else None
    except (ConfigError, UnreadableFileError, OSError):
        return None


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def listed_digests(folder: Path) -> dict[str, str]:
    """Name -> digest, of the list; empty without a list, and for a line that is none. Raises OSError."""
    lines = (folder / LIST).read_text().splitlines() if (folder / LIST).is_file() else []
    matches = (LINE.fullmatch(line) for line in lines)
    return {match[2].removeprefix("./"): match[1] for match in matches if match}


def unlike_the_list(folder: Path) -> list[str]:
    """Return sentences about files that are not what the list says; none without a list. Reads every listed file."""
    if not (folder / LIST).is_file():
        return []
    try:
        listed = listed_digests(folder)
        read = {file.name for pattern in READ for file in folder.glob(pattern)}
        unlisted = ", ".join(sorted(read - listed.keys()))
        faults = [f"{LIST} does not list {unlisted}"] if unlisted else []
        missing = [name for name in listed if not (folder / name).is_file()]
        faults += [f"{name} of {LIST} is missing" for name in missing]
        there = sorted(listed.keys() - set(missing))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # hashing lets other threads run
            digests = threads.map(lambda name: digest_of(folder / name), there)
            for name, digest in zip(there, digests, strict=True):
                if digest != listed[name]:
                    said = f"{LIST} says {listed[name][:SHOWN]}..."
                    faults.append(f"{name} has the SHA-256 {digest[:SHOWN]}..., and {said}: copy it again")
    except OSError as error:
        return [f"{LIST} cannot be compared: {error}"]
    return faults


def digest_of(file: Path) -> str:
    """SHA-256 of a whole file, read once for all roles that have it. Raises OSError."""
    status = file.stat()
    return _digest(file, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest(file: Path, *_state: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
