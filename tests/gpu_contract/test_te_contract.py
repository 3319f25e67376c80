"""transformer-engine's layers in place of Megatron's, with its own Python: names, shapes, weights in and out.

Its compiled parts are pretended (`pretended_te.py`), so nothing is computed. The wheels are pure Python; `make install`
unpacks both versions beside the virtual environment's own packages.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_gemma4 import save_gemma4_with_keys_for_values
from tiny_gpt_oss import save_gpt_oss
from tiny_models import run_config, save_deepseek_v3, save_qwen2, save_qwen3_moe_with_dense_layers
from tiny_qwen3_5 import save_qwen3_5

from megatron_rl.checkpoint.saved_tensors import SavedTensors
from megatron_rl.cluster.ranks import LOOPBACK
from megatron_rl.config.megatron import TE_LINEAR, TRANSFORMER_ENGINE
from megatron_rl.records import RoleState
from megatron_rl.roles.environment import worker_environment

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

REPOSITORY = Path(__file__).parents[2]
NEWEST, USED = "2.20.2", "2.11.0"
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Built(NamedTuple):
    """What two ranks built. ranks: their files; folder: with what they exported and saved."""

    ranks: list[dict[str, Any]]
    folder: Path
    model: Path

    def slots(self, rank: int) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"slots{rank}.pt")


def wheel(version: str) -> Path:
    return Path(sys.prefix, "contract", f"transformer_engine-{version}")


def with_drawn_norms(model: str) -> str:
    """Draw the weights of a saved model's norms, which are all 1: two that are equal could be exchanged unseen."""
    file, generator = Path(model, "model.safetensors"), torch.Generator().manual_seed(3)
    tensors = load_file(file)
    drawn = {name: torch.rand(t.shape, generator=generator) for name, t in tensors.items() if "norm.weight" in name}
    save_file(tensors | drawn, file, metadata={"format": "pt"})
    return model


class Builder:
    """A process with a version of transformer-engine, of which two ranks are forked for each model (`te_rank.py`)."""

    def __init__(self, root: Path, version: str) -> None:
        variables = os.environ | worker_environment("cpu", ranks_per_node=2)
        variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0", "NODE_RANK": "0"}
        variables |= {"NODE_ADDRESS": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
        variables["PYTHONPATH"] = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests/dist")))
        command = [sys.executable, str(Path(__file__).with_name("te_rank.py")), str(root), version]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=variables, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def build(self, model: str, implementation: str, folder: Path, lora: int = 0) -> Built:
        """Raises AssertionError with what a rank printed."""
        self.process.stdin.write(json.dumps([model, implementation, str(folder), lora]) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        assert codes == [0, 0], (folder / "rank0.txt").read_text()[-3000:]
        return Built([json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)], folder, Path(model))

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def builders() -> Iterator[Callable[..., Builder]]:
    """One for each version, and one for each other folder that a test names."""
    with ExitStack() as opened:

        @functools.cache
        def builder(version: str, root: Path | None = None) -> Builder:
            made = Builder(root or wheel(version), version)
            opened.callback(made.close)
            return made

        yield builder


def check_weights(built: Built) -> None:
    """The folder comes out as it went in; buffers have vLLM's names, by hand for the first layer."""
    original, exported = (
        load_file(folder / "model.safetensors") for folder in (built.model, built.folder / "exported")
    )
    assert original.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in original.items())
    layer = "model.layers.0"
    norms = [original[f"{layer}.{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm")]
    for rank in range(2):
        slots = built.slots(rank)
        qkv = torch.cat([original[f"{layer}.self_attn.{part}_proj.weight"].chunk(2)[rank] for part in "qkv"])
        gate_up = torch.cat([original[f"{layer}.mlp.{part}_proj.weight"].chunk(2)[rank] for part in ("gate", "up")])
        assert torch.equal(slots[f"{layer}.self_attn.qkv_proj.weight"], qkv.flatten())
        assert torch.equal(slots[f"{layer}.mlp.gate_up_proj.weight"], gate_up.flatten())
        assert torch.equal(slots[f"{layer}.input_layernorm.weight"], norms[0])
        assert torch.equal(slots[f"{layer}.post_attention_layernorm.weight"], norms[1])


def check_names(built: Built, implementation: str, with_experts: tuple[int, ...]) -> None:
    """transformer-engine computes linears of attention and dense MLPs, and norms are where `implementation` says."""
    for found in built.ranks:
        names, fused = found["names"], implementation == TRANSFORMER_ENGINE
        dense = [layer for layer in range(4) if layer not in with_experts]
        linears = [(layer, f"self_attention.{name}") for layer in range(4) for name in ("linear_qkv", "linear_proj")]
        linears += [(layer, f"mlp.{name}") for layer in dense for name in ("linear_fc1", "linear_fc2")]
        assert found["by_te"] == sorted(f"decoder.layers.{layer}.{name}" for layer, name in linears)
        for theirs, ours in FUSED_NORMS.items():
            for layer in range(4):
                is_theirs = fused and (layer in dense or ours == "input_layernorm.weight")
                prefix = f"decoder.layers.{layer}."
                assert names.get(prefix + theirs) == ([128] if is_theirs else None)
                assert names.get(prefix + ours) == (None if is_theirs else [128])
                # Its gradient is summed over the ranks that share a sequence, whoever has it.
                assert prefix + ours in found["sequence_parallel"]
        split = {f"decoder.layers.{layer}.{name}.weight" for layer, name in linears}
        assert split <= set(found["split"])


def check_refusals(built: Built) -> None:
    """GPUs before 8.9 have no products in 8 bits, 8.9 none of blocks, in transformer-engine's own words."""
    blockwise, tensorwise = (built.ranks[0]["eight_bits"][recipe] for recipe in ("blockwise", "tensorwise"))
    assert blockwise["9.0"] == tensorwise["9.0"] == tensorwise["8.9"] == ""
    asked = "fp8=e4m3, fp8_recipe={} on a GPU of compute capability {}: "
    assert blockwise["8.9"].startswith(asked.format("blockwise", "8.9") + "FP8 block scaled GEMM requires")
    assert blockwise["8.9"].endswith("try: fp8_recipe=tensorwise")
    for recipe, answers in (("blockwise", blockwise), ("tensorwise", tensorwise)):
        assert answers["8.0"].startswith(asked.format(recipe, "8.0"))
        assert answers["8.0"].endswith("try: fp8=null")


def load_and_export(config: Any, saved: Path, target: Path) -> None:
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor = worker.roles["actor"]
    with torch.no_grad():
        for buffer in actor.trainable.param_buffers:
            buffer.param_data.zero_()
    actor.checkpoint.load(saved, RoleState(num_updates=0, adam_step=0))
    actor.export_hf(target)


def test_transformer_engine_has_the_same_weights(builders, tmp_path: Path) -> None:
    """Two ranks with sequence parallelism, 2.11: in, where vLLM reads, out; a checkpoint goes on in Megatron's layers
    on one rank. Would not catch what its kernels compute.
    """
    model = with_drawn_norms(save_qwen2(tmp_path / "model"))
    built = builders(USED).build(model, TRANSFORMER_ENGINE, tmp_path)
    check_names(built, TRANSFORMER_ENGINE, with_experts=())
    check_weights(built)
    check_refusals(built)
    names = SavedTensors(tmp_path / "saved").names
    assert not any(theirs in name for name in names for theirs in ("_extra_state", "layer_norm_weight"))
    run_ranks(1, load_and_export, run_config(model, 1, 1), tmp_path / "saved", tmp_path / "again")
    original, again = load_file(f"{model}/model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in original.items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", [TE_LINEAR, TRANSFORMER_ENGINE])
@pytest.mark.parametrize("version", [USED, NEWEST])
def test_both_versions_have_megatrons_names(builders, version: str, implementation: str, tmp_path: Path) -> None:
    """Layers with and without experts. Megatron refuses the newer version; its names would hold."""
    model = with_drawn_norms(save_qwen3_moe_with_dense_layers(tmp_path / "model"))
    built = builders(version).build(model, implementation, tmp_path)
    check_names(built, implementation, with_experts=(3,))
    check_weights(built)


LATENT = ("linear_down", "linear_q_up", "linear_kv_up", "linear_proj")
DELTA, USUAL = ("linear_qkvz", "linear_proj"), ("linear_qkv", "linear_proj")
OWN_LINEARS = {
    "latent attention": (save_deepseek_v3, lambda layer: LATENT),
    "biases of the output": (save_gpt_oss, lambda layer: USUAL),
    "gated delta, norms of 1 + w": (save_qwen3_5, lambda layer: USUAL if layer % 2 else DELTA),
    "keys that are values": (save_gemma4_with_keys_for_values, lambda layer: USUAL),
}
"""Name -> model, and the linears of a layer's attention that transformer-engine computes."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", [TE_LINEAR, TRANSFORMER_ENGINE])
@pytest.mark.parametrize("version", [USED, NEWEST])
@pytest.mark.parametrize("name", OWN_LINEARS)
def test_linears_of_every_attention(builders, name: str, version: str, implementation: str, tmp_path: Path) -> None:
    """Names of the linears, marks of whole weights, and the folder that comes out as it went in. Would not catch what
    its kernels compute.
    """
    save, linears = OWN_LINEARS[name]
    built = builders(version).build(save(tmp_path / "model"), implementation, tmp_path)
    original, exported = (load_file(path / "model.safetensors") for path in (built.model, tmp_path / "exported"))
    assert original.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in original.items())
    num_layers = json.loads((built.model / "config.json").read_text())["num_hidden_layers"]
    for found in built.ranks:
        expected = {f"decoder.layers.{n}.self_attention.{one}" for n in range(num_layers) for one in linears(n)}
        assert {one for one in found["by_te"] if ".self_attention.linear" in one} == expected
        whole = {f"{one}.weight" for one in expected if one.endswith("linear_down")}
        assert whole <= set(found["sequence_parallel"]) and not whole & set(found["split"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", [USED, NEWEST])
def test_adapters_of_its_linears(builders, version: str, tmp_path: Path) -> None:
    """How each adapter is cut: (whole, by inputs, sequence split, two ranks), by hand."""
    model = save_deepseek_v3(tmp_path / "model")
    built = builders(version).build(model, TE_LINEAR, tmp_path, lora=4)
    cuts = {"linear_down": [True, False, True, True], "linear_proj": [False, True, True, True]}
    for found in built.ranks:
        own = {key.rpartition(".")[2]: cut for key, cut in found["adapters"].items() if ".self_attention." in key}
        assert own == {one: cuts.get(one, [False, False, True, True]) for one in LATENT}


@pytest.mark.exhaustive
def test_a_renamed_parameter_is_found(builders, tmp_path: Path) -> None:
    """A copy of the wheel in which the norm's weight has another name; its own renamings of that weight follow."""
    copy = shutil.copytree(wheel(USED), tmp_path / "wheel")
    for file in copy.rglob("transformer_engine/pytorch/module/*.py"):
        file.write_text(file.read_text().replace("layer_norm_weight", "norm_scale"))
    with pytest.raises(AssertionError, match=r"decoder\.layers\.\d\.self_attention\.linear_qkv\.norm_scale"):
        builders(USED, copy).build(save_qwen2(tmp_path / "model"), TRANSFORMER_ENGINE, tmp_path)
