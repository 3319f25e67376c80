"""The layout and batch table of a run: the configured sizes as numbers per rank. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.config.algorithms import estimator_traits, trains_on_rule
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import PoolSize, pool_sizes, roles_of, rollout_pool
from megatron_rl.config.schema import DataConfig, RunConfig, as_list
from megatron_rl.config.tasks import SFT
from megatron_rl.planning.activations import Recompute

UNDEFINED = "-"


def batch_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return rows (name, value, meaning) of the layout and the batch of any task."""
    return _ppo_rows(config) if config.generates else _task_rows(config)


def _ppo_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return rows (name, value, meaning) of a PPO run; where it only validates, without those of training.

    A value that a broken layout leaves undefined is "-". Shares that are not even are given as smallest to largest.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    pp, vpp = actor.megatron.pipeline_model_parallel_size, megatron_chunks(actor.megatron)
    layout, dp = _layout_rows(config, actor.pool, actor.megatron)
    replicas = _exact(_world_size(used_pools(config), rollout_pool(config)), rollout.replica_size)

    batch = config.batch_sizes
    prompts, n, samples = batch.num_prompts, batch.samples_per_prompt, batch.num_samples
    mini_prompts, mini_batch = batch.mini_batch_prompts(actor), batch.mini_batch_samples(actor)
    generation = [
        ("rollout TP", str(rollout.tensor_model_parallel_size), "ranks that generate together"),
        ("rollout replicas", str(replicas or UNDEFINED), "ranks / rollout TP: copies of the model in generation"),
    ]
    if rollout.attention_dp_size > 1:
        shared = ("rollout DP", str(rollout.attention_dp_size), "TP groups of a replica, which share its experts")
        of_both = ("rollout replicas", str(replicas or UNDEFINED), "ranks / (rollout TP x DP): copies of the experts")
        generation = [generation[0], shared, of_both]
    if config.trainer.val_only:
        return [*layout, *generation, ("responses per prompt", str(rollout.val_kwargs.n), "rollout.val_kwargs.n")]
    return [
        *layout,
        *generation,
        ("prompts per step", str(prompts), "data.train_batch_size"),
        ("samples per step", str(samples), f"x {n} samples per prompt (rollout.n)"),
        ("prompts per replica", _per_replica(samples, replicas, n), "each replica generates for its own share"),
        ("samples per replica", _share(samples, replicas), f"prompts per replica x {n}"),
        ("mini-batches per epoch", *_mini_batches(prompts, mini_prompts)),
        ("epochs per step", str(actor.ppo_epochs), "passes over the samples"),
        ("samples per mini-batch", str(mini_batch), f"{mini_prompts} prompts x {n}"),
        ("samples per DP rank", _share(mini_batch, dp), "samples per mini-batch / DP"),
        ("micro-batches per rank", *_micro_batches(config, mini_batch, dp, multiple=pp if vpp > 1 else 1)),
        *_recomputed(config),
    ]


def _task_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return rows (name, value, meaning) of a task that does not generate; undefined values are "-"."""
    role = next(iter(roles_of(config)))
    layout, dp = _layout_rows(config, role.pool, role.megatron)
    batch, update = config.data.train_batch_size, role.update
    assert update is not None  # a task trains its first role
    limit = (
        f"at most {update.num_rows} examples" if update.max_tokens is None else f"at most {update.max_tokens} tokens"
    )
    multiple = role.megatron.pipeline_model_parallel_size if megatron_chunks(role.megatron) > 1 else 1
    passes = UNDEFINED if update.max_tokens else _passes(batch, dp, update.num_rows, multiple)
    return [
        ("stage", config.trainer.stage, f"trains {role.key}"),
        *layout,
        ("examples per step", str(batch), "data.train_batch_size: one optimizer step"),
        (
            "examples per DP rank",
            _share(batch, dp),
            "data.train_batch_size / DP" if config.trainer.stage == SFT else "responses to one prompt stay together",
        ),
        ("micro-batches per rank", passes, f"passes of {limit}"),
        *_recomputed(config),
    ]


def _layout_rows(config: RunConfig, pool: str, megatron: MegatronConfig) -> tuple[list[tuple[str, str, str]], int]:
    """Return the rows of a pool's training layout, and its DP size; 0 where the layout does not fit the ranks."""
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp, vpp = megatron.context_parallel_size, megatron_chunks(megatron)
    sizes = used_pools(config)
    dp = _exact(_world_size(sizes, pool), tp * cp * pp)
    chunks = f", of {vpp} model chunks each (VPP)" if vpp > 1 else ""
    rows = [
        ("ranks", str(sum(size.world_size for size in sizes.values())), f"{_shape(sizes)}, {config.trainer.device}"),
        ("TP", str(tp), "ranks that share every layer"),
        ("PP", str(pp), f"pipeline stages{chunks}"),
    ]
    if cp > 1 and megatron.dynamic_context_parallel:
        meaning = "ranks that share a sequence, as few as its tokens need; DP is that of the longest"
        rows.append(("CP", f"up to {cp}", meaning))
    elif cp > 1:
        rows.append(("CP", str(cp), "ranks that share every sequence"))
    meaning = "ranks / (TP x PP): copies of the model in training"
    if cp > 1:
        meaning = "ranks / (TP x CP x PP): shares of a batch; there are CP times as many copies of the model"
    return [*rows, ("DP", str(dp or UNDEFINED), meaning)], dp


def megatron_chunks(megatron: MegatronConfig) -> int:
    """Return the model chunks of a pipeline stage."""
    return megatron.virtual_pipeline_model_parallel_size or 1


def used_pools(config: RunConfig) -> dict[str, PoolSize]:
    """Return pool with a role -> its size, the actor's pool first; undefined pools are left out."""
    sizes = pool_sizes(config)
    return {name: sizes[name] for name in dict.fromkeys(role.pool for role in roles_of(config)) if name in sizes}


def _world_size(sizes: Mapping[str, PoolSize], pool: str) -> int:
    """Return the ranks of a pool; 0 where it is undefined."""
    return sizes[pool].world_size if pool in sizes else 0


def _shape(sizes: Mapping[str, PoolSize]) -> str:
    shapes = {name: f"{size.num_nodes} node(s) x {size.num_ranks_per_node}" for name, size in sizes.items()}
    return next(iter(shapes.values())) if len(shapes) == 1 else ", ".join(f"{n}: {s}" for n, s in shapes.items())


def repeat_notes(data: DataConfig, sizes: Sequence[int]) -> list[str]:
    """Return a sentence for every set of training prompts that is smaller than its share of one batch.

    sizes: prompts of each of data.train_files. Without weights all files are one set; with weights each is its own.
    """
    batch, weights = data.gen_batch_size, data.train_file_weights
    sets = [("data.train_files", sum(sizes), float(batch))]
    if weights is not None:
        shares = [batch * weight / sum(weights) for weight in weights]
        sets = list(zip(as_list(data.train_files), sizes, shares, strict=True))
    return [
        f"note: {name} has {size} prompts, and a batch takes {taken:.4g} of it: each occurs {taken / size:.3g} times "
        "in every batch, on average; take a smaller batch or more prompts if that is not meant"
        for name, size, taken in sets
        if taken > size > 0
    ]


def group_notes(config: RunConfig) -> list[str]:
    """Return a sentence for each that compares the samples of a prompt where there is only one: estimator, reward
    function.
    """
    algorithm, samples = config.algorithm, config.actor_rollout_ref.rollout.n
    notes = []
    if samples == 1 and config.custom_reward_function.per_group and trains_on_rule(config):
        key = "custom_reward_function.per_group"
        notes = [f"note: {key}=true compares the samples of a prompt, and actor_rollout_ref.rollout.n=1: it gets one"]
    teaching = config.distillation
    has_no_rewards = teaching.enabled and not teaching.distillation_loss.use_task_rewards
    if samples > 1 or has_no_rewards or "groups" not in estimator_traits(config).reads:
        return notes
    return [
        *notes,
        f"note: algorithm.adv_estimator={algorithm.adv_estimator} compares the samples of a prompt, and "
        f"actor_rollout_ref.rollout.n={samples}: a group of one has no baseline, so a response's advantage comes from "
        "its score alone; take actor_rollout_ref.rollout.n=2 or more if that is not meant",
    ]


def _recomputed(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each trained role that recomputes activations."""
    for role in roles_of(config):
        again = Recompute.of(role.megatron) if role.is_trained else Recompute()
        if again.method is not None:
            meaning = f"activations of all layers are made again, {again.num_layers} at a time"
            if again.method == "block":
                meaning = f"activations of the first {again.num_layers} of each chunk's layers are made again"
            yield f"{role.name} recomputes", f"{again.method} {again.num_layers}", meaning
        elif again.parts:
            yield (
                f"{role.name} recomputes",
                " ".join(again.parts),
                "parts of all layers whose activations are made again",
            )


def _exact(total: int, parts: int) -> int:
    """Return `total / parts` where that is a positive whole number, else 0."""
    return 0 if parts < 1 or total % parts else total // parts


def _share(total: int, parts: int) -> str:
    """Return how many of `total` each of `parts` gets; sizes differ by at most one."""
    if parts < 1:
        return UNDEFINED
    smallest, rest = divmod(total, parts)
    return f"{smallest} to {smallest + 1}" if rest else str(smallest)


def _mini_batches(prompts: int, mini_batch: int) -> tuple[str, str]:
    """Return the number of mini-batches, and the size of the last one."""
    if mini_batch < 1:
        return UNDEFINED, "optimizer steps"
    rest = prompts % mini_batch
    return str(-(-prompts // mini_batch)), f"optimizer steps, the last of {rest} prompts" if rest else "optimizer steps"


def _per_replica(num_samples: int, replicas: int, n: int) -> str:
    """Return the prompts of one replica. Samples are what is split, so two replicas may share a prompt."""
    return UNDEFINED if replicas < 1 or n < 1 else f"{num_samples / replicas / n:.4g}"


def _micro_batches(config: RunConfig, num_samples: int, dp: int, multiple: int) -> tuple[str, str]:
    """Return the number of the actor's passes, and what limits one."""
    actor = config.actor_rollout_ref.actor
    rounded = ", a multiple of PP" if multiple > 1 else ""
    if not actor.use_dynamic_bsz:
        limit = actor.ppo_micro_batch_size_per_gpu
        return _passes(num_samples, dp, limit, multiple), f"passes of at most {limit} samples{rounded}"
    limit = actor.ppo_max_token_len_per_gpu * max(actor.megatron.context_parallel_size, 1)
    # Every pass but the last has room for less than one more sequence of any length.
    passes = _passes(num_samples, dp, limit // max(config.longest_sequence, 1), multiple)
    meaning = f"passes of at most {limit} tokens{rounded}; fewer for shorter samples"
    return (passes if passes == UNDEFINED else f"up to {passes}"), meaning


def _passes(num_samples: int, dp: int, micro_batch: int, multiple: int) -> str:
    """Return the passes of the rank with most samples, rounded up to a multiple."""
    if min(dp, micro_batch, multiple) < 1:
        return UNDEFINED
    largest_share = -(-num_samples // dp)
    passes = -(-largest_share // micro_batch)
    return str(-(-passes // multiple) * multiple)
