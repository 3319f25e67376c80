"""Check that a checkpoint can be resumed, by its names, sizes and manifests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.checkpoint.adapter_folder import adapter_identity, reference_identity
from megatron_rl.checkpoint.identity import folder_identity
from megatron_rl.checkpoint.manifest import model_identity
from megatron_rl.checkpoint.model_folder import ModelFolders, model_folders
from megatron_rl.checkpoint.resume import OPTIMIZER, TOWER, select
from megatron_rl.config.megatron import ADAM
from megatron_rl.config.problems import violations_of
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import RESUME_MODES
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.planning.folder_checks import STARTING_POINTS, read_model_folder


def configured_models(config: RunConfig, folders: ModelFolders | None = None) -> dict[str, dict[str, Any]]:
    """Trained role -> identity of its model, for `checkpoint.resume.select`. Models that cannot be read are left out.

    The identity contains the dtype of training: a float32 checkpoint has no masters from which bfloat16 could continue.
    """
    folders = model_folders(config) if folders is None else folders
    models, compared = {}, {role.kind.initial_of for role in roles_of(config)}
    for role in roles_of(config):
        if not role.is_trained:
            continue
        folder = folders[role.model_path]
        if read_model_folder(role.name, folder, STARTING_POINTS, config_only=True)[0] is None:
            continue  # the model folder's own rules report it
        settings, dtype = folder.settings, {"dtype": role.megatron.dtype}
        optimizer = role.settings.optim.optimizer
        dtype |= {OPTIMIZER: optimizer} if optimizer != ADAM else {}
        dtype |= {TOWER: "trained"} if role.trains_tower and config.data.image_key is not None else {}
        try:
            dtype |= adapter_identity(settings, role.lora)
            dtype |= reference_identity(role.lora) if role.name in compared else {}
        except (ConfigError, OSError):
            continue  # so do the adapters' rules
        models[role.name] = model_identity(settings) | folder_identity(folder) | dtype
    return models


def resume_problems(config: RunConfig, folders: ModelFolders) -> Iterable[Violation]:
    """Reasons why the run cannot resume. The run itself checks the contents, which it reads anyway."""
    trainer = config.trainer
    lacks_path = trainer.resume_mode == "resume_path" and trainer.resume_from_path is None
    if lacks_path or trainer.resume_mode not in RESUME_MODES:
        return  # the rules of single values report it
    try:
        select(trainer, configured_models(config, folders), checksums=False)
    except ConfigError as error:
        yield from violations_of(error)
