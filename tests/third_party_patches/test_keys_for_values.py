"""Gemma-4's layers without a projection to values in vLLM, without the patch and with it, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class Heads(torch.nn.Module):
    """In the place of core attention, which wants a cache: keeps what it is given and answers with the queries."""

    def forward(self, *heads: torch.Tensor) -> torch.Tensor:
        self.given = heads
        return heads[0]


def tiny_config():
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        hidden_size=24,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        attention_k_eq_v=True,
        max_position_embeddings=16,
    )


def check_keys_for_values(folder: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.gemma4 import Gemma4Attention

    from third_party_patches.vllm.keys_for_values import PATCH
    from third_party_patches.vllm.unpacked_linear import PATCH as PLAIN

    PLAIN.apply()
    config = tiny_config()
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # Columns of layer 0: 4 heads of 32, three times; of layer 1: 4 of 64 and 2 of 64.
    stacks, x, positions = {0: draw(384, 24), 1: draw(384, 24)}, draw(5, 24), torch.arange(5)
    seen = {}

    def look(kind: str) -> None:
        for number, (size, kv_heads) in enumerate(((32, 4), (64, 2))):
            prefix = f"{kind}.layers.{number}.self_attn"
            layer = Gemma4Attention(config, 24, 4, kv_heads, size, 16, prefix=prefix)
            rows = layer.qkv_proj.weight.shape[0]
            keys = stacks[1][256:384]
            weight = stacks[number] if rows == 384 else torch.cat([stacks[1], keys])
            layer.qkv_proj.weight.data = weight
            layer.qkv_proj.quant_method.process_weights_after_loading(layer.qkv_proj)
            del layer.attn
            layer.attn, layer.o_proj = Heads(), torch.nn.Identity()
            layer.o_proj.forward = lambda out: (out, None)
            layer(positions, x)
            seen[kind, number] = rows, layer.attn.given

    engine = EngineArgs(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=16)
    with set_current_vllm_config(engine.create_engine_config()):
        init_distributed_environment(backend="gloo")
        initialize_model_parallel()
        look("own")
        PATCH.apply()
        PATCH.apply()
        look("patched")
    assert [seen[kind, number][0] for kind in ("own", "patched") for number in (0, 1)] == [384, 512, 384, 384]
    for number in (0, 1):
        for own, patched in zip(seen["own", number][1], seen["patched", number][1], strict=True):
            torch.testing.assert_close(patched, own)
    _, keys, values = seen["patched", 1][1]
    assert not torch.equal(keys, values)


def test_wide_layers_have_no_rows_of_values(tmp_path) -> None:
    """Rows of the fused projection, and heads of queries, keys and values as vLLM makes them of two equal matrices.

    Would not catch core attention: a run through the engine does.
    """
    run_ranks(1, check_keys_for_values, tmp_path)
