"""Which tensors of a model folder are read, from the headers of its files and its config.json.

A tensor that nothing reads is a sign that config.json belongs to another model, unless it is of a known kind:
pass-through tensors, which exports write again; the head of another role; buffers that are recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.weight_files import BYTES, StoredTensor, some_of, stored_names, type_faults
from megatron_rl.errors import Violation
from megatron_rl.model.families import (
    FAMILIES,
    LAYER,
    REWARD_FAMILIES,
    Family,
    Model,
    ModelShape,
    constant_map,
    inside_of,
    param_map,
    shape_of,
    value_param_map,
)
from megatron_rl.model.families.mtp_params import mtp_constants, mtp_map
from megatron_rl.model.families.params import EMBEDDING
from megatron_rl.model.parts.param_spec import EACH

EXPERT = re.compile(r"\.experts\.(\d+)\.")
HEADS = {"lm_head.weight": "lm_head.", "score.weight": "score.", "": "v_head."}
"""Tensor that is read of a head -> prefix of the head's tensors; the last is TRL's value head."""
LM_HEAD = "lm_head.weight"
COMPARED, BLOCK = 16, 4096
"""Number of blocks of two matrices that are compared, and bytes of a block."""


@dataclass(frozen=True)
class ReadTensors:
    """The tensors that a model reads. names: `{expert}` stands for one of `num_experts`. own_head: of its role. codes:
    what takes the place of some of them in a folder in 4 bits.
    """

    names: frozenset[str]
    num_experts: int
    own_head: str
    codes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, family: Family, shape: ModelShape, is_reward_model: bool, is_packed: bool = False) -> ReadTensors:
        """Return the names for a model with a vocabulary head, or for a reward model with a score head. is_packed: what
        may be stored in 4 bits is.
        """
        specs = (value_param_map if is_reward_model else param_map)(family, shape)
        names = {name for spec in specs.values() for name in spec.hf_names}
        names |= {constant.name for constant in constant_map(family, shape).values()}
        codes = [stored_names(spec.hf_names[0]) for spec in specs.values() if spec.transposed and is_packed]
        head = "score.weight" if is_reward_model else LM_HEAD
        return cls(frozenset(names), shape.num_experts, head, frozenset(chain.from_iterable(codes)))

    def has(self, name: str) -> bool:
        """Return whether a tensor of a folder is read."""
        if name in self.names:
            return True
        expert = EXPERT.search(name)
        is_one = expert is not None and int(expert[1]) < self.num_experts and str(int(expert[1])) == expert[1]
        return is_one and EXPERT.sub(".experts.{expert}.", name) in self.names


@dataclass(frozen=True)
class FolderWeights:
    """The tensors of a folder. read: by name. left: kind -> tensors that are rightly not read. others: unexpected
    names. codes: tensors of bytes that are unpacked.
    """

    read: dict[str, StoredTensor]
    left: dict[str, dict[str, StoredTensor]]
    others: list[str]
    codes: dict[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any], family: Family) -> FolderWeights:
        """Sort the tensors of a folder. settings: of a config.json that preflight has accepted."""
        shape = shape_of(settings)
        is_reward_model = any(name in REWARD_FAMILIES for name in settings["architectures"])
        reads = ReadTensors.of(family, shape, is_reward_model, family.unpacks(settings))
        weights = cls({}, {}, [])
        for name, tensor in tensors.items():
            kind = CARRIED if family.carried.has(name, settings) else _kind(name, reads)
            if name in reads.codes and tensor.dtype == BYTES:
                weights.codes[name] = tensor
            elif reads.has(name):
                weights.read[name] = tensor
            elif kind is None:
                weights.others.append(name)
            else:
                weights.left.setdefault(kind, {})[name] = tensor
        return weights


CARRIED, HEAD, BUFFER, COPY = "carried", "of another head", "buffers", "a tied head"


def _kind(name: str, reads: ReadTensors) -> str | None:
    """Return the kind of a tensor that is rightly not read and is not passed through; None for other tensors."""
    if name.endswith(".rotary_emb.inv_freq"):
        return BUFFER
    if name == reads.own_head:
        return COPY
    own = HEADS[reads.own_head]
    return HEAD if any(name.startswith(start) for start in HEADS.values() if start != own) else None


def weights_problems(key: str, path: str, weights: FolderWeights, settings: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield tensors of types that cannot be trained, and tensors that nothing reads. Raises OSError."""
    faults = type_faults(weights.read)
    if faults:
        yield Violation({key: path}, f"must hold weights that can be trained: {faults[0]}")
        return
    if weights.others:
        yield _others_problem(key, path, weights.others, settings)
    name = Model.of(settings).specs[EMBEDDING].hf_names[0]
    copy, embedding = weights.left.get(COPY, {}).get(LM_HEAD), weights.read.get(name)
    if copy is not None and embedding is not None and not _are_equal(copy, embedding):
        rule = f"must be tied (tie_word_embeddings of its config.json), and {LM_HEAD} differs from {name}"
        hint = "set tie_word_embeddings to false there, or take the tensor out"
        yield Violation({key: path}, f"must hold one vocabulary matrix: the head {rule}", hint=hint)


def no_mtp(model: Model, settings: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return why the multi-token prediction layer of a folder cannot be read; None: it can. names: of its tensors."""
    family, carried = model.family, model.family.carried
    number = 0 if carried.ahead_key is None else settings.get(carried.ahead_key) or 0
    if carried.mtp is None:
        able = ", ".join(sorted(name for name, each in FAMILIES.items() if each.carried.mtp))
        return f"{family.architecture} has none that is read; {able} have"
    if number != 1:
        return f"{carried.ahead_key} of its config.json is {number}, and one layer is read"
    read = [name for spec in mtp_map(family, model.shape).values() for name in spec.hf_names]
    read += [constant.name for constant in mtp_constants(family, model.shape).values()]
    single = {name.replace(EACH, str(expert)) for name in read for expert in range(max(model.shape.num_experts, 1))}
    lacking = sorted(single - set(names))
    return f"its folder is missing {some_of(lacking)}" if lacking else None


def _others_problem(key: str, path: str, others: list[str], settings: Mapping[str, Any]) -> Violation:
    """Return the fault: a wrong number of layers where only whole layers are left over, else unexpected tensors."""
    layers = {int(match[1]) for name in others if (match := LAYER.match(name))}
    count, key_of_count = settings["num_hidden_layers"], "num_hidden_layers"
    if layers and min(layers) >= count and all(LAYER.match(name) for name in others):
        rule = f"must be the number of layers, and its weights have {max(layers) + 1}: {some_of(others)}"
        file = str(Path(path).expanduser() / "config.json")
        return Violation({key_of_count: count}, rule, {key_of_count: max(layers) + 1}, file=file)
    rule = f"must hold no weights that its config.json does not imply, and holds {some_of(others)}"
    inside = inside_of(settings["architectures"])
    hint = "" if inside is None else f"those of its language model begin with {inside.folder_prefix}"
    return Violation({key: path}, rule, hint=hint)


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have equal type and shape, and equal bytes in some blocks."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    room = max(0, one.stop - one.start - BLOCK)
    with one.file.open("rb") as left, other.file.open("rb") as right:
        for place in range(COMPARED):
            offset = room * place // (COMPARED - 1)
            left.seek(one.start + offset)
            right.seek(other.start + offset)
            size = min(BLOCK, one.stop - one.start - offset)
            if left.read(size) != right.read(size):
                return False
    return True


def unpacked_weights(path: str, weights: FolderWeights) -> str | None:
    """Return one line about tensors that are stored in fewer bits than they are trained in; None if there are none."""
    if not weights.codes:
        return None
    return (
        f"of {path} {len(weights.codes) // 2} tensors are in 4 bits (MXFP4): they are unpacked when they are read, and "
        "exports have them in the training dtype, without quantization_config"
    )


def unread_weights(path: str, weights: FolderWeights) -> str | None:
    """Return one line that names tensors which are not read but may have been meant; None if there are none."""
    parts = []
    if carried := weights.left.get(CARRIED):
        size = sum(tensor.stop - tensor.start for tensor in carried.values())
        parts.append(f"{some_of([*carried])}, of {size:,} bytes, which exports of the language model write again")
    if other := weights.left.get(HEAD):
        parts.append(f"{some_of([*other])}, {HEAD}")
    return f"these tensors of {path} are not read: {'; '.join(parts)}" if parts else None
