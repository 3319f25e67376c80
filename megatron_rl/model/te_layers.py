"""Linear layers of transformer-engine in a model's layers, and what is asked of the installed package.

transformer-engine keeps a norm that it computes with a linear layer under a name of its own; `our_name` gives the name
that it has in every other layer, so that weights, checkpoints and the rollout engine do not see who computes.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.distributed import ProcessGroup

from megatron_rl.config.megatron import LOCAL, TRANSFORMER_ENGINE, OverrideTransformerConfig
from megatron_rl.config.te_cores import core_problem, installed_cores
from megatron_rl.errors import ConfigError
from megatron_rl.model.attention import BiasedRowParallelLinear
from megatron_rl.model.whole_linear import WholeLinear

PACKAGE = "transformer-engine"
COMPARED = SpecifierSet(">=2.11,<2.21")
"""Versions of transformer-engine whose names were compared with those that megatron-core imports, first and last."""

INSTALL = "to install one that fits see requirements/gpu_te.txt"

OUR_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Ends of transformer-engine's names of parameters -> what they are called here."""


def our_name(name: str) -> str:
    """The name of a parameter whoever computes with it: `decoder.layers.3.input_layernorm.weight`."""
    for theirs, ours in OUR_NAMES.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


class Linears(NamedTuple):
    """Classes of linear layers: cut by outputs, by inputs, the same with a bias, and not cut. All are called as
    Megatron's are, return (out, bias), and are made with the same arguments but for `whole`.
    """

    columns: Any
    rows: Any
    biased_rows: Any
    whole: Any

    def cut_by_outputs(self, config: TransformerConfig, num_in: int, num_out: int, tp_group: ProcessGroup) -> Any:
        """Return a linear layer without a bias whose outputs TP ranks divide. Under sequence parallelism it gathers its
        input.
        """
        return self.columns(
            num_in,
            num_out,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=tp_group,
        )

    def cut_by_inputs(self, config: TransformerConfig, num_in: int, num_out: int, tp_group: ProcessGroup) -> Any:
        """Return a linear layer without a bias whose inputs TP ranks divide; its output is summed over them."""
        return self.rows(
            num_in,
            num_out,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=tp_group,
        )


def linears_of(implementation: str) -> Linears:
    """Return the classes that compute linear layers under `transformer_impl`. Where it is transformer-engine's,
    Megatron's import of it must have succeeded (`refuse_unusable`).
    """
    if implementation == LOCAL:
        return Linears(ColumnParallelLinear, RowParallelLinear, BiasedRowParallelLinear, WholeLinear)
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELinear, TERowParallelLinear

    class BiasedTERows(TERowParallelLinear):
        """`BiasedRowParallelLinear` of transformer-engine."""

        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **options | {"bias": True})

    def whole(config: TransformerConfig, num_in: int, num_out: int, tp_group: ProcessGroup) -> Any:
        linear = TELinear(
            num_in,
            num_out,
            parallel_mode="duplicated",
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )
        # It marks every weight as split, so that a gradient's norm would count this one on each rank.
        linear.weight.tensor_model_parallel = False
        return linear

    return Linears(TEColumnParallelLinear, TERowParallelLinear, BiasedTERows, whole)


def put_te_layers(spec: ModuleSpec, implementation: str, *, has_experts: bool) -> None:
    """Let transformer-engine compute the linear layers of attention and of a dense MLP, as `implementation` says.

    Experts stay: the rollout engine wants their weights in one stack. Attention of this project's own, where several
    linears read one norm, builds its layers itself, and its norm is fused with none.
    """
    if implementation == LOCAL:
        return
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    linears, with_norms, layer = linears_of(implementation), implementation == TRANSFORMER_ENGINE, spec.submodules
    column: Any = TELayerNormColumnParallelLinear if with_norms else linears.columns
    attention = layer.self_attention.submodules
    if hasattr(attention, "linear_qkv"):
        has_bias = attention.linear_proj is BiasedRowParallelLinear
        attention.linear_qkv, attention.linear_proj = column, linears.biased_rows if has_bias else linears.rows
        if with_norms:
            layer.input_layernorm = IdentityOp
    if has_experts:
        return
    mlp = layer.mlp.submodules
    mlp.linear_fc1, mlp.linear_fc2 = column, linears.rows
    if with_norms:
        layer.pre_mlp_layernorm = IdentityOp


def refuse_unusable(options: OverrideTransformerConfig) -> None:
    """Raise ConfigError if transformer-engine or apex is asked for and this process cannot compute with the installed
    one.
    """
    if options.transformer_impl != LOCAL and (problem := te_problem()):
        asked = f"transformer_impl={options.transformer_impl}"
        raise ConfigError(f"{asked}: {problem}; {INSTALL}; try: transformer_impl={LOCAL}")
    if options.transformer_impl != LOCAL and options.fp8 is not None:
        refuse_without_eight_bits(options)
    if options.gradient_accumulation_fusion and (problem := apex_problem()):
        raise ConfigError(f"gradient_accumulation_fusion=true: {problem}")


def refuse_without_eight_bits(options: OverrideTransformerConfig) -> None:
    """Raise ConfigError if transformer-engine knows no products in FP8 of this recipe on this process's GPU."""
    from megatron.core.extensions.transformer_engine import FP8GlobalStateManager

    by_recipe = {
        "blockwise": FP8GlobalStateManager.is_fp8_block_scaling_available(),
        "tensorwise": FP8GlobalStateManager.is_fp8_available(),
    }
    is_there, reason = by_recipe[options.fp8_recipe]
    if is_there:
        return
    other = next((f"fp8_recipe={recipe}" for recipe, (works, _) in by_recipe.items() if works), "fp8=null")
    major, minor = torch.cuda.get_device_capability()
    asked = f"fp8={options.fp8}, fp8_recipe={options.fp8_recipe}"
    raise ConfigError(f"{asked} on a GPU of compute capability {major}.{minor}: {reason} try: {other}")


def te_problem() -> str:
    """What is wrong with the installed transformer-engine; empty: nothing. Megatron's own range of versions counts."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    if not megatrons_range().contains(version, prereleases=True):
        return f"megatron-core wants {PACKAGE}{megatrons_range()}, and {version} is installed"
    if problem := core_problem(installed_cores(), torch.version.cuda or ""):
        return problem
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        return (
            f"{PACKAGE} {version} cannot be imported: python -c 'import transformer_engine.pytorch' prints the reason"
        )
    return ""


def megatrons_range() -> SpecifierSet:
    """The versions of transformer-engine that the installed megatron-core names in its extras, or, if any, COMPARED."""
    asked = map(Requirement, metadata.requires("megatron-core") or ())
    return next(one.specifier for one in asked if one.name == PACKAGE) or COMPARED


def apex_problem() -> str:
    """Why the installed `apex` is not NVIDIA's; empty: it is, or there is none.

    The package index has another project of that name, a toolkit for web sites on pyramid.
    """
    try:
        asked = map(Requirement, metadata.requires("apex") or ())
    except metadata.PackageNotFoundError:
        return ""
    if not any(one.name.lower().startswith("pyramid") for one in asked):
        return ""
    return (
        f"apex {metadata.version('apex')} of the package index is a toolkit for web sites and not NVIDIA's: "
        "pip uninstall apex; to install NVIDIA's see requirements/gpu_apex.txt"
    )
