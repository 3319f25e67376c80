"""Two ranks that build an actor with transformer-engine's layers on a CPU, and write down what they have.

python te_rank.py WHEEL VERSION: imports the unpacked wheel and what ranks need once. For each line of its input, a list
[MODEL, IMPLEMENTATION, FOLDER, RANK of adapters or 0], it forks two ranks and prints their codes. Ranks print to
FOLDER/rankN.txt.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from pretended_te import pretend


def main(root: str, version: str) -> None:
    """Serve until the input ends."""
    pretend(Path(root), version)
    import tiny_models  # noqa: F401
    import transformer_engine.pytorch  # noqa: F401

    import megatron_rl.checkpoint.sharded_files
    import megatron_rl.model.te_layers
    import megatron_rl.roles.host
    import megatron_rl.roles.training  # noqa: F401

    for line in sys.stdin:
        pids = [os.fork() or be_rank(rank, version, *json.loads(line)) for rank in range(2)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


def be_rank(rank: int, version: str, model: str, implementation: str, folder: str, lora_rank: int) -> NoReturn:
    """In a forked process: build, and end."""
    log = os.open(Path(folder, f"rank{rank}.txt"), os.O_WRONLY | os.O_CREAT)
    for target in (1, 2):
        os.dup2(log, target)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_STORE": f"{folder}/store"}
    code = 1
    try:
        build(version, model, implementation, folder, lora_rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def build(version: str, model: str, implementation: str, folder: str, lora_rank: int) -> None:
    """Build the actor and write what this rank has to the folder."""
    import torch
    from tiny_models import run_config

    from megatron_rl.checkpoint.sharded_files import CheckpointWriter
    from megatron_rl.model.te_layers import megatrons_range
    from megatron_rl.roles import model_source
    from megatron_rl.roles.flat_parameters import flat_parameters
    from megatron_rl.roles.host import RankHost

    class TrainingHost(RankHost):
        """Patches what trains alone: vLLM would take the stub of triton for the real one."""

        def join_world(self, environment, timeout, generates) -> None:
            super().join_world(environment, timeout, generates=False)

    if not megatrons_range().contains(version):  # built all the same, to see whether the names would hold
        model_source.refuse_unusable = lambda options: None
    keys = {"sequence_parallel": True, "override_transformer_config__transformer_impl": implementation}
    keys = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in keys.items()}
    keys["actor_rollout_ref__model__lora__rank"] = lora_rank
    worker = TrainingHost(run_config(model, 2, 1, **keys))
    worker.build("actor")
    actor, out, rank = worker.roles["actor"], Path(folder), worker.groups.rank
    [chunk] = actor.trainable.models
    parameters = model_source.named_parameters([chunk])
    modules = {name: type(module).__mro__ for name, module in chunk.named_modules()}
    found = {
        "names": {name: list(parameter.shape) for name, parameter in chunk.named_parameters()},
        "by_te": sorted(name for name, kinds in modules.items() if any(is_te(kind) for kind in kinds)),
        "sequence_parallel": sorted(name for name, p in parameters.items() if getattr(p, "sequence_parallel", False)),
        "split": sorted(name for name, p in parameters.items() if getattr(p, "tensor_model_parallel", False)),
    }
    if lora_rank:
        (out / f"rank{rank}.json").write_text(json.dumps(found | {"adapters": cuts_of_adapters(chunk)}))
        return
    if megatrons_range().contains(version):
        found["eight_bits"] = refusals_of_eight_bits()
    (out / f"rank{rank}.json").write_text(json.dumps(found))
    flat = flat_parameters(actor.base, worker.groups, actor.source.place, None, node=0)
    slots = {
        slot.name: flat.buffers[slot.buffer][slot.offset : slot.offset + slot.shard.numel].clone()
        for slot in flat.member.held
    }
    torch.save(slots, out / f"slots{rank}.pt")
    actor.export_hf(out / "exported")
    if rank == 0:
        (out / "saved").mkdir()
    writer = CheckpointWriter(worker.device.torch_device)
    actor.checkpoint.save(out / "saved", writer, beside_training=False)
    assert writer.finish(wait=True)


def cuts_of_adapters(chunk: Any) -> dict[str, tuple[bool, bool, bool, bool]]:
    """Linear -> whether it is whole, cut by inputs, split over the sequence, and knows the two TP ranks."""
    from megatron_rl.model.adapters import LinearAdapters

    found = {name.removesuffix(".adapters"): module for name, module in chunk.named_modules()}
    return {
        name: (each.is_whole, each.cuts_inputs, each.sequence_parallel, each.is_whole or each.tp_group.size() == 2)
        for name, each in found.items()
        if isinstance(each, LinearAdapters)
    }


def refusals_of_eight_bits() -> dict[str, dict[str, str]]:
    """Recipe -> compute capability -> why `fp8` is refused there; empty: allowed."""
    import torch
    from transformer_engine.pytorch import quantization

    from megatron_rl.config.megatron import FP8_RECIPES, TE_LINEAR, OverrideTransformerConfig
    from megatron_rl.errors import ConfigError
    from megatron_rl.model.te_layers import refuse_without_eight_bits

    result: dict[str, dict[str, str]] = {recipe: {} for recipe in FP8_RECIPES}
    torch.version.cuda = "13.0"
    quantization.tex.get_cublasLt_version = lambda: 130000
    for capability in ((8, 0), (8, 9), (9, 0)):
        torch.cuda.get_device_capability = lambda device=None, seen=capability: seen
        quantization.get_device_compute_capability = torch.cuda.get_device_capability
        quantization.check_fp8_support.cache_clear()
        quantization.check_fp8_block_scaling_support.cache_clear()
        for recipe, answers in result.items():
            options = OverrideTransformerConfig(transformer_impl=TE_LINEAR, fp8="e4m3", fp8_recipe=recipe)
            try:
                refuse_without_eight_bits(options)
                answers["{}.{}".format(*capability)] = ""
            except ConfigError as error:
                answers["{}.{}".format(*capability)] = str(error)
    return result


def is_te(kind: type) -> bool:
    return kind.__module__.startswith("transformer_engine.")


if __name__ == "__main__":
    main(*sys.argv[1:])
