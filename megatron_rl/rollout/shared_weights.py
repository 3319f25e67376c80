"""Build vLLM's model on the trainer's tensors.

vLLM creates its parameters on the meta device, where they take no memory. Each is then replaced by the given tensor of
the same name. The engine never has weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_rl.rollout.arguments import LOAD_FORMAT
from megatron_rl.rollout.eight_bit_linears import expect_codes, read_codes_of_experts

HELD_ELSEWHERE = ("e_score_correction_bias", "sinks")
"""Parameters that other objects than modules reference too (routers of experts, attention's kernels). They are swapped
in place.
"""

ROUTER, DECAY = ".gate.weight", ".A_log"
"""Weights that some vLLM models keep in float32. They are read in the trainer's dtype, as in training."""


class EmptyOnMeta(TorchFunctionMode):
    """While active, `torch.empty` allocates nothing. Layers create weights with it, and computed buffers without it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def bind_parameters(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Replace every parameter of `model` by the tensor of its name, sharing memory. Buffers get the values of theirs.

    Raises ValueError naming the parameters that have no tensor, the tensors that have no parameter, or a pair of
    different shape or dtype.
    """
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in tensors}
    for name, buffer in buffers.items():
        buffer.copy_(tensors[name])  # no update changes it
    tensors = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    names = {name for name, _ in model.named_parameters()}
    if names != set(tensors):
        raise ValueError(
            f"rollout parameters without a trainer tensor: {sorted(names - set(tensors))}; "
            f"trainer tensors without a rollout parameter: {sorted(set(tensors) - names)}"
        )
    replacements: dict[int, torch.nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for local_name, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in replacements:
                name = f"{module_name}.{local_name}"
                tensor = tensors[name]
                is_wide = name.endswith((ROUTER, DECAY)) and old.dtype == torch.float32
                same_dtype = old.dtype == tensor.dtype or is_wide
                if old.shape != tensor.shape or not same_dtype:
                    raise ValueError(
                        f"{name}: the rollout engine expects {tuple(old.shape)} {old.dtype}, "
                        f"the trainer holds {tuple(tensor.shape)} {tensor.dtype}"
                    )
                new = torch.nn.Parameter(tensor, requires_grad=False)
                # vLLM hangs its loading hooks on the parameter object.
                new.__dict__.update(old.__dict__)
                if old.dtype != tensor.dtype and name.endswith(ROUTER):
                    read_as_it_is(module)
                if local_name in HELD_ELSEWHERE:
                    torch.utils.swap_tensors(old, new)
                    new = old
                replacements[id(old)] = new
            module._parameters[local_name] = replacements[id(old)]


def must_have_memory(model: torch.nn.Module) -> None:
    """Raise ValueError, with its name, for a tensor of the model that has no memory.

    `bind_parameters` binds parameters; a layer may have made another tensor while memory was left out.
    """
    for name, module in model.named_modules():
        for own, value in (*module.named_buffers(recurse=False), *vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(f"{name}.{own} of the rollout engine's model has no memory: nothing was bound to it")


def read_as_it_is(gate: torch.nn.Module) -> None:
    """Disable a router's kernels for float32 weights, because its weight has another dtype."""
    for kernel in ("allow_fp32_router_gemm", "allow_bf16x3_router_gemm", "allow_rocm_bf16x3_router_gemm"):
        setattr(gate, kernel, False)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""vLLM's names of the vocabulary's two matrices, in the families whose MTP layer it has."""


def with_own_head(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`, with the embedding as the head's tensor where vLLM's model has a head and the trainer has none.

    The trainer has none where config.json ties it to the embedding. vLLM builds one even then for DeepSeek's, GLM's and
    some further models, and for a folder that has a copy of the head.
    """
    modules = [(f"{name}.weight", type(module)) for name, module in model.named_modules()]
    lacking = {name for name, _ in model.named_parameters()} - tensors.keys()
    heads = [name for name, kind in modules if kind is ParallelLMHead and name in lacking]
    if not heads:
        return tensors
    (embedding,) = (name for name, kind in modules if kind is VocabParallelEmbedding)
    return tensors | dict.fromkeys(heads, tensors[embedding])


class MTPModel(NamedTuple):
    """The multi-token prediction layer of a model: vLLM's class of it, vLLM's names -> tensors of its shard, and
    vLLM's name of its head.
    """

    architecture: str
    tensors: dict[str, torch.Tensor]
    head: str

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its own tensors, and embedding and head of the other model's `tensors`.

        vLLM builds both again next to the layer, before it takes the other model's.
        """
        embedding = tensors[EMBEDDING]
        return {**self.tensors, EMBEDDING: embedding, self.head: tensors.get(HEAD, embedding)}


def register_shared_loader(tensors: dict[str, torch.Tensor], mtp: MTPModel | None = None) -> None:
    """Let `load_format=LOAD_FORMAT` build models on `tensors`; call it before building each engine.

    mtp: the multi-token prediction layer, which vLLM builds as a model of its own.
    """
    of_drafts = {} if mtp is None else mtp.whole(tensors)

    class SharedWeightLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing to fetch."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """The weights are there already."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(model_config.dtype), device, EmptyOnMeta():
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            drafts = vllm_config.speculative_config
            is_drafting = bool(of_drafts) and model_config is drafts.draft_model_config
            bound = of_drafts if is_drafting else with_own_head(model, tensors)
            expect_codes(model, bound)
            bind_parameters(model, bound)
            process_weights_after_loading(model, model_config, device)
            read_codes_of_experts(model, model_config.dtype)
            must_have_memory(model)
            ready: torch.nn.Module = model.eval()
            return ready

    register_model_loader(LOAD_FORMAT)(SharedWeightLoader)
