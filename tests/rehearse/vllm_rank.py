"""One rank's engine on a GPU that is not there: vLLM's own worker, model and second runner, built and run on tensors
without memory, bound to shards of the shapes that our plan gives them.

python vllm_rank.py LIBRARY CONFIG RANK FOLDER [OVERRIDES]: writes `engine.json` there. LIBRARY: of `fake_cuda`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from third_party_patches.torch import fake_cuda, fake_parameters, fake_worlds

STEPS = 3
TRACE = "--trace"
"""Among the overrides: end when the model is traced."""
NOT_DRAWN = 1
"""An end token; tokens whose values nobody knows are 0."""


class HeldCache:
    """In place of the KV cache's memory in vLLM's allocator, which is compiled."""

    is_allocated = True

    def __init__(self, tensors: list[Any], tag: str) -> None:
        sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        self.num_bytes = sum(sizes.values())


def main(library: str, file: str, rank: int, folder: Path, overrides: list[str], only: bool) -> None:
    fake_cuda.load(Path(library))
    import torch
    import torch._inductor.utils
    import torch.nested._internal.nested_tensor  # noqa: F401

    for patch in (fake_cuda, fake_parameters, fake_worlds):
        patch.apply()
    import fake_compiler
    from fake_cuda_vllm import EngineMode, pretend

    from megatron_rl.config.load import read_run
    from megatron_rl.planning.memory import engine_bytes
    from megatron_rl.planning.run_models import RunModels
    from megatron_rl.rehearse.fewer_layers import num_chunks, with_fewer_layers
    from megatron_rl.rehearse.memory_tracker import MemoryTracker
    from megatron_rl.rehearse.rehearsed_save import record_objects
    from megatron_rl.roles.environment import worker_environment
    from third_party_patches import apply_patches
    from third_party_patches.vllm import without_torchvision

    mode = EngineMode(torch.device("cuda", 0), MemoryTracker(fake_cuda.GPU.allocate))
    fake_cuda.GPU.on_wait = mode.wait
    whole = read_run(file, overrides, "ppo").config
    each = -(-fewest_layers(RunModels(whole).actor) // num_chunks(whole, RunModels(whole).actor_role))
    models = RunModels(read_run(file, [*overrides, *with_fewer_layers(whole, each, folder)], "ppo").config)
    pool = models.generating.spec
    os.environ |= worker_environment("cuda", pool.size.num_ranks_per_node)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(pool.world_size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ["VLLM_CACHE_ROOT"] = str(folder / "compiled")
    pretend(mode)
    apply_patches("cuda")
    without_torchvision.apply()
    stand_in()
    traced = fake_compiler.trace_alone(only)
    torch.distributed.init_process_group(rank=rank, world_size=pool.world_size)
    record_objects(mode)
    found: dict[str, Any] = {}
    with mode, suppress(fake_compiler.Enough):
        found = of_engine(models, rank, mode)
    planned = engine_bytes(models.config, models.actor, models.element, models.rollout.tp_size)
    (folder / "engine.json").write_text(
        json.dumps(found | {"planned": planned} | traced.as_json() | mode.report(), default=str)
    )


def fewest_layers(model: Any) -> int:
    """The first layers of a model among which there is one of each kind."""
    return max(model.layers.index(kind) for kind in model.kinds) + 1


def of_engine(models: Any, rank: int, mode: Any) -> dict[str, Any]:
    """Build the engine of a rank, draw a few tokens, and return what was seen. Bytes are beside weights and cache."""
    from megatron_rl.model.families.adapter_params import adapter_specs
    from megatron_rl.rollout.slices import Slice

    gpu, tensors = fake_cuda.GPU, shards(models, rank, models.actor.specs) | constants_of(models.actor)
    adapters = shards(models, rank, adapter_specs(models.actor.specs, models.actor_role.lora))
    weights, profiled = gpu.allocated, measure_profile(mode)
    mode.begin("build")
    engine = built_engine(models, tensors, adapters)
    mode.must_be_gone()
    held = gpu.allocated - weights - engine.kv_cache.num_bytes
    mode.begin("slice")
    gpu.reset_peak()
    drawn, num_steps = engine.advance(Slice(0, STEPS, starts()))
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    constants = models.actor.constants.values()
    given = {tensor.untyped_storage()._cdata for name, tensor in tensors.items()} - {
        tensors[one.name].untyped_storage()._cdata for one in constants
    }
    return {
        "worker": type(worker).__name__,
        "runner": type(worker.model_runner).__module__,
        "backends": sorted({layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}),
        "is_bound": given <= {parameter.untyped_storage()._cdata for parameter in engine.model.parameters()},
        "cache": engine.kv_cache.num_bytes,
        "held": held,
        "profiled": profiled[0] - weights,
        "drawn": {number: len(one.token_ids) for number, one in drawn.items()},
        "num_steps": num_steps,
        "called": dict(mode.called),
        "graphs": {"captured": mode.num_captured, "replayed": mode.num_replayed},
    }


def shards(models: Any, rank: int, specs: Any) -> dict[str, Any]:
    """A rank's shards of parameters for generation, by vLLM's names."""
    import torch

    from megatron_rl.model.families import VOCAB_PADDING, tensors_of
    from megatron_rl.parallel.sharding import shard_of

    place = models.rollout.place(rank, VOCAB_PADDING)
    return {
        name: torch.empty(shard_of(tensor, place).shape, dtype=torch.bfloat16, device="cuda")
        for name, tensor in tensors_of(specs).items()
    }


def constants_of(model: Any) -> dict[str, Any]:
    """What generation reads and no update changes, as `read_constants` returns it."""
    import torch

    return {one.name: torch.empty(one.shape, dtype=torch.float32, device="cuda") for one in model.constants.values()}


def built_engine(models: Any, tensors: dict[str, Any], adapters: dict[str, Any]) -> Any:
    """The engine of `roles/rollout.py`, on tensors that no actor holds."""
    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.device import Device
    from megatron_rl.model.families import placed_settings, rollout_settings, routed_layers
    from megatron_rl.model.families.adapter_params import held_rank
    from megatron_rl.rollout.engine import EngineAdapters, RolloutEngine

    role, family = models.placement.roles["rollout"], models.actor.family
    hf_config, lora = ModelFolder(role.model_path).hf_config, models.actor_role.lora
    in_slots = {name: one[None] for name, one in adapters.items()}
    settings = hf_config.to_dict()
    return RolloutEngine(
        model_path=role.model_path,
        architecture=hf_config.architectures[0],
        eos_token_ids=[NOT_DRAWN],
        config=role.settings,
        max_model_len=models.config.longest_sequence,
        dtype="bfloat16",
        grid=models.rollout,
        tensors=tensors,
        adapters=EngineAdapters(in_slots, held_rank(lora.rank), lora.scale) if adapters else None,
        seed=1,
        hf_overrides=placed_settings(family, rollout_settings(family, settings)),
        text_only=family.inside is not None,
        device=Device("cuda"),
        routed_layers=routed_layers(family, settings) if models.config.returns_experts else None,
        attention=models.actor.attention,
    )


def measure_profile(mode: Any) -> list[int]:
    """The list gets the peak of vLLM's profiling pass, in bytes, while an engine is built."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    gpu, profile_run, found = fake_cuda.GPU, GPUModelRunner.profile_run, []

    def measured(*args: Any, **options: Any) -> None:
        mode.begin("profile")
        gpu.reset_peak()
        profile_run(*args, **options)
        found.append(gpu.peak)
        mode.begin("build")

    GPUModelRunner.profile_run = measured
    return found


def starts() -> tuple[Any, ...]:
    """Two requests of uneven length, with every filter of tokens."""
    from megatron_rl.records import Sampling
    from megatron_rl.rollout.slices import Start

    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=50, max_tokens=STEPS, salt=0)
    prompts = (range(2, 52), range(2, 11))
    return tuple(Start(number, tuple(prompt), number, STEPS, sampling) for number, prompt in enumerate(prompts))


def stand_in() -> None:
    """What is compiled in vLLM's GPU wheel, or waits for other ranks."""
    from contextlib import nullcontext

    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.worker import gpu_worker

    from megatron_rl.rollout import cuda_worker, kv_cache

    cuda_worker.pool = lambda tag: nullcontext()
    kv_cache.adopt = HeldCache
    gpu_worker.kernel_warmup = lambda *args, **options: None
    gpu_worker.Worker._maybe_activate_jit_monitor = lambda self: None  # of kernels that Triton compiles
    MessageQueue.create_from_process_group = lambda *args, **options: None


if __name__ == "__main__":
    _, library, config, rank, folder, *overrides = sys.argv
    status = 1
    try:
        only = TRACE in overrides
        main(library, config, int(rank), Path(folder), [each for each in overrides if each != TRACE], only)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # torch would look for the GPU's memory once more
