"""Open a service on the roles of a configuration, come back to where its journal ends, and serve."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_rl.config.roles import ACTOR, ROLLOUT, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.lifecycle import StopPolicy
from megatron_rl.controller.open_sampler import num_replicas_of
from megatron_rl.controller.repairs import Repairs, with_repairs
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.controller.run_setup import RunPools, raise_failures, take_folder
from megatron_rl.errors import ConfigError, WorkerFailure
from megatron_rl.losses.summed import summed_losses
from megatron_rl.planning.memory import planned_memory
from megatron_rl.planning.served_states import check_served
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.serve.desk import Desk
from megatron_rl.serve.endpoints import Endpoints
from megatron_rl.serve.request_journal import JOURNAL_FILE
from megatron_rl.serve.request_values import ServedModel
from megatron_rl.serve.role_driver import STATES_FOLDER, RoleDriver
from megatron_rl.serve.service import TrainingService


def serve(
    config: RunConfig,
    keys: Mapping[str, str],
    port: int,
    local: bool = False,
    replay: Path | None = None,
    journal_bytes: float = 0,
) -> None:
    """Serve until a signal asks to stop; a journal in `trainer.default_local_dir` is continued.

    keys: `read_keys`. replay: a journal that is repeated instead, samples too; nothing is served. journal_bytes: the
    largest journal that no snapshot replaces; 0: any.
    Raises ConfigError for a configuration or a journal that does not fit, WorkerFailure where a rank fails, or where a
    repeated command has another reply.
    """
    check_served(config)
    with_repairs(config, local, lambda repairs: _serve_once(repairs, keys, port, local, replay, journal_bytes))


def _serve_once(
    repairs: Repairs, keys: Mapping[str, str], port: int, local: bool, replay: Path | None, journal_bytes: float
) -> None:
    config = repairs.config
    with ExitStack() as opened:
        placement, folder = Placement.of(config), repairs.folders[config.actor_rollout_ref.model.path]
        run_folder = RunFolder(config, repairs)
        logger = RunLogger(config, run_folder, folder.tokenizer, planned_memory(config, repairs.folders))
        take_folder(opened, logger, ())
        pools = RunPools.open(opened, placement, logger, StopPolicy(repairs.stop), local, repairs)
        served = served_by(config, folder)
        actor, rollout = pools.handle(ACTOR, Actor), pools.handle(ROLLOUT, Rollout)
        states = run_folder.path / STATES_FOLDER
        num_replicas, decode = num_replicas_of(config, placement), folder.tokenizer.decode
        num_slots = config.actor_rollout_ref.rollout.max_loras
        worker = RoleDriver(actor, rollout, num_replicas, num_slots, served.losses, states.absolute(), decode)
        desk = Desk(served, stop_token_of(folder.tokenizer), config.trainer.seed)
        service = TrainingService(desk, worker, journal_bytes)
        if replay is not None:
            if (replay.parent / STATES_FOLDER).is_dir():  # for the snapshot with which a journal may begin
                shutil.copytree(replay.parent / STATES_FOLDER, states)
            say_repeated(logger.say, service, replay)
            return
        journal = run_folder.path / JOURNAL_FILE
        if journal.exists():
            found = service.repeat(journal, samples_again=False)
            replies = f"{found.num_equal} replies are the same"
            logger.say(f"{found.num_requests} requests of {journal} are repeated, {replies}")
            raise_others(found.others, journal)
        with Endpoints(service, served, keys, port) as endpoints:
            logger.say(f"serving {served.base_model} at {endpoints.url} for {len(set(keys.values()))} keys")
            service.serve(journal, lambda: _is_over(repairs, pools))
        logger.say(f"stopped; the same command continues {journal}")


def _is_over(repairs: Repairs, pools: RunPools) -> bool:
    """Whether a signal asks to stop. Raises WorkerFailure for a rank that was lost while nothing ran."""
    raise_failures(pools.cluster)
    return repairs.stop.is_set


def say_repeated(say: Callable[[str], None], service: TrainingService, journal: Path) -> None:
    """Repeat a journal, samples too, and report the result. Raises ConfigError, WorkerFailure."""
    if not journal.is_file():
        raise ConfigError(f"--replay {journal} is no file; try: the {JOURNAL_FILE} in the folder of a service")
    found = service.repeat(journal, samples_again=True)
    num_replies = found.num_equal + len(found.others)
    replies = f"{found.num_equal} of {num_replies} replies are the same, bit for bit"
    say(f"{journal}: {found.num_requests} requests, {replies}")
    raise_others(found.others, journal)


def raise_others(others: tuple[str, ...], journal: Path) -> None:
    """Raise WorkerFailure where repeated commands have other replies."""
    if others:
        rule = f"{len(others)} commands of {journal} have other replies now, the first is {others[0]}"
        raise WorkerFailure(f"{rule}: model, layout, versions or machine differ from those of the journal")


def served_by(config: RunConfig, folder: Any) -> ServedModel:
    """The model and its limits as a configuration serves them. folder: the model's."""
    lora = config.actor_rollout_ref.model.lora
    targets = " ".join(lora.target_modules) if lora.rank else "all-linear"
    is_all = "all-linear" in targets
    return ServedModel(
        config.actor_rollout_ref.model.path,
        lora.rank,
        config.longest_sequence,
        folder.num_sampled_tokens(config),
        trains_mlp=is_all or any(name in targets for name in ("linear_fc1", "linear_fc2", "_proj_mlp", "up_proj")),
        trains_attention=is_all or any(name in targets for name in ("linear_qkv", "linear_proj", "q_proj")),
        seeds_adapters=lora.adapter_path is None,
        losses=summed_losses(config.actor_rollout_ref.actor),
    )


def stop_token_of(tokenizer: Any) -> Callable[[str], int | None]:
    """What finds the token that is a text, if one is."""

    def token(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return int(ids[0]) if len(ids) == 1 and tokenizer.decode(ids) == text else None

    return token
