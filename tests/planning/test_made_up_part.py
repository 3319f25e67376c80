"""A kind of layer that no family has, whole in this file: it is planned, mapped, built and measured as it states.

The kind has no layout of its own: its matrix is whole on every rank. Not exercised: generation, as vLLM has no such
model, and training over several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from import_memory import import_config
from placing import request, write_model
from ranks import run_ranks

from megatron_rl.model.families import FAMILIES
from megatron_rl.model.families.attention_keys import AttentionKeys
from megatron_rl.model.families.family import Family
from megatron_rl.model.parts import AttentionPart, Cut, LayerBlock, ModelShape, ParamSpec
from megatron_rl.model.parts.param_spec import whole
from megatron_rl.planning.layout_search.search_result import find_placements
from megatron_rl.planning.run_models import RunModels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NAME = "RunningMeanForCausalLM"
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 4, "vocab_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 1e4}  # fmt: skip


@dataclass(frozen=True)
class RunningMean(AttentionPart):
    """One matrix of the mean of all tokens up to each token; generation would cache the sum.

    A layer counts the input of each part among its residuals; here the mean is kept in its place, so nothing is added.
    """

    hidden: int
    block_sizes = {"cpu": 16, "cuda": 16}
    query_columns = 0

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        return {f"{mega}self_attention.mix.weight": whole(f"{hf}mix.weight", (self.hidden, self.hidden))}

    @property
    def token_elements(self) -> int:
        return self.hidden**2

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        return 0.0

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        return 3 * block.tokens * self.hidden

    def columns(self, cut: Cut) -> float:
        return self.hidden

    def engine_elements(self, tp_size: int) -> int:
        return 2 * self.hidden

    def cached_elements(self, tp_size: int) -> int:
        return self.hidden


class MeanKeys(AttentionKeys):
    """config.json says nothing of it."""

    def part(self, shape: ModelShape, layer: int) -> RunningMean:
        return RunningMean(shape.hidden_size)


FAMILY = Family(NAME, "RunningMeanForSequenceClassification", own_type="llama", attention=MeanKeys())


def kept_by_a_layer(config: Any) -> tuple[dict[str, int], int]:
    """(name -> elements of every parameter, bytes that one layer keeps of 48 tokens), of the built model."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.model.layer_specs import put_part
    from megatron_rl.model.whole_linear import WholeLinear
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import ModelSource, named_parameters

    class Mixer(MegatronModule):
        def __init__(self, config: Any, pg_collection: Any, **unused: Any) -> None:
            super().__init__(config=config)
            self.mix = WholeLinear(config, config.hidden_size, config.hidden_size, pg_collection.tp)

        def forward(self, hidden: torch.Tensor, attention_mask: Any, **unused: Any) -> tuple[torch.Tensor, None]:
            counts = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype)[:, None, None]
            return self.mix(hidden.cumsum(0) / counts)

    @put_part.register
    def put(part: RunningMean, layer: Any, config: Any, hf_config: Any) -> None:
        layer.submodules.self_attention = ModuleSpec(module=Mixer)

    FAMILIES[NAME] = FAMILY
    worker, shared = RankHost(config), config.actor_rollout_ref
    source = ModelSource(ModelFolder(shared.model.path), worker.groups, worker.device, shared.actor.megatron)
    [chunk] = source.language_model().chunks
    for parameter in chunk.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    angles = chunk.rotary_pos_emb(24)
    hidden = torch.randn(24, 2, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out, _ = chunk.decoder.layers[1](hidden * 1.0, attention_mask=None, rotary_pos_emb=angles)
        (out * 1.0).sum()
    return {name: parameter.numel() for name, parameter in named_parameters([chunk]).items()}, sum(kept.values())


def test_one_file_adds_a_kind_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters to the element and kept bytes by autograd; `map` finds a placement of it and counts it exactly.

    Would not catch costs that the part states wrongly for a GPU.
    """
    monkeypatch.setitem(FAMILIES, NAME, FAMILY)
    folder = write_model(tmp_path / "model", **SIZES, architectures=[NAME], model_type="llama")
    plain = write_model(tmp_path / "plain", **SIZES, model_type="llama")
    measured, planned = [], []
    for path in (folder, plain):
        config = import_config(str(path), 1, 1, "float32")
        [(built, kept)] = run_ranks(1, kept_by_a_layer, config)
        models = RunModels(config)
        assert built == models.actor_weights.shard_numels(0) and len(models.actor.kinds) == 1
        measured.append(kept)
        planned.append(
            models.training.ledger(models.actor_role).layer.saved_bytes(LayerBlock(48, 48, 48, is_packed=False))
        )
    # Of both layers autograd shows less than a running pass holds, by the same residuals. Tables that all layers share:
    # cosine and sine of 16 pairs at 24 positions; the 24 divisors of the mean.
    shared = 2 * 24 * 16 * 4 - 24 * 4
    assert measured[1] - measured[0] == planned[1] - planned[0] + shared
    best = find_placements(request(tmp_path, 4, model=folder, per_node=4), 1).candidates[0]
    grid = best.placed.choices[0].grid
    assert grid is not None and grid.cp == 1 and best.time.total > 0
    assert RunModels(best.config).actor.num_params == 4 * (128**2 + 3 * 128 * 192 + 2 * 128) + 2 * 96 * 128 + 128
