"""Keys of `trainer`: where a run happens, how long it is, what it writes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from megatron_rl.config.constraints import OURS, AtMost, Bounds, Count, FilePath, Nearest, NotNegative, OneOf, Or, Size
from megatron_rl.config.tasks import TASKS

GLOBAL_POOL = "global_pool"
"""The pool of `trainer.nnodes` x `trainer.n_gpus_per_node` ranks, which hosts every role by default."""

RESUME_MODES = ("auto", "disable", "resume_path")

RAY, LOCAL = "ray", "local"
"""Values of `trainer.launcher`."""

MOST_RANKS = 100_000
"""Most machines, ranks per machine, and ranks of a pool. More are a typing error, and plans iterate over ranks."""

RANKS = Bounds(1, MOST_RANKS)
"""Sizes of a pool."""

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "clearml", "opentelemetry")

LEAST_HELD_BYTES = 1 << 20
"""Holding half as much takes no longer than sending it through the driver: docs/internals/architecture.md."""

LARGEST_SEED = 2**32 - 1
"""The largest seed of numpy, which vLLM seeds on every rank. Torch takes larger ones."""


@dataclass
class PrometheusConfig:
    port: Annotated[int | None, Ge(0), Le(65535), Nearest(9090)] = None
    """Serve the metrics of the last step to Prometheus on this port of 127.0.0.1, on the driver's machine; 0: a free
    one, which the run prints; null: none."""


@dataclass
class TrainerConfig:
    stage: Annotated[str, OneOf(TASKS), OURS] = "ppo"
    """ppo | sft | reward | dpo: set by the commands that train; `plan` reads it."""
    project_name: str = "megatron_rl"
    """Name of the project: part of the run's folder, and the group of runs in wandb and other trackers."""
    experiment_name: str = "run"
    """Name of this run: part of its folder, and its name in wandb and other trackers."""
    device: Annotated[str, OneOf(("cpu", "cuda"))] = "cuda"
    """cpu | cuda. On cpu one process stands for one GPU."""
    launcher: Annotated[str, OneOf((RAY, LOCAL)), OURS] = RAY
    """ray | local. ray: starts ranks on this machine or on those of a cluster. local: starts them on this machine, in
    fewer seconds, without Ray."""
    nnodes: Annotated[int, RANKS] = 1
    """Machines of global_pool."""
    n_gpus_per_node: Annotated[int, RANKS] = 8
    """Ranks per machine of global_pool: GPUs, or processes when device=cpu."""
    total_training_steps: Size | None = None
    """Steps: one batch of prompts each; null: as many as total_epochs have."""
    total_epochs: Size | None = None
    """Passes over the training prompts, each of as many steps as full batches; the run ends with the first of both
    limits. null: 30, or 1 where nothing is generated, or with total_training_steps no limit."""
    rollout_ahead: Annotated[int, Ge(0), AtMost(1000), OURS] = 0
    """Steps that generation may run ahead of training: no trained token is older. 0: they alternate."""
    critic_warmup: Count = 0
    """Steps before this one train the critic alone."""
    test_freq: Count = 10
    """Validate every so many steps; always after the last one; 0 or -1: only then."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Answer the held-out prompts, write answers and numbers, and end without training, as `eval` does."""
    default_local_dir: FilePath = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """Folder for metrics, summary, curves, the exported model and the checkpoints."""
    save_freq: Annotated[int, Or(-1, "never"), Ge(1)] = -1
    """Write a checkpoint, `global_step_N`, every so many steps and after the last; -1: never."""
    max_ckpt_to_keep: Size | None = None
    """Checkpoints to keep, the newest ones; null: all."""
    save_best: Annotated[bool, OURS] = True
    """sft, reward, dpo: where checkpoints are written, write one after every validation with the lowest loss so far,
    and keep it in addition to the newest ones."""
    resume_mode: Annotated[str, OneOf(RESUME_MODES)] = "auto"
    """auto: from the newest complete checkpoint in default_local_dir, where there is one | disable: from the start |
    resume_path: from resume_from_path."""
    resume_from_path: FilePath | None = None
    """The `global_step_N` folder that resume_mode=resume_path goes on from."""
    stop_grace_s: Annotated[NotNegative, OURS] = 300.0
    """Seconds that a run which saves checkpoints may take to finish or abandon its step and to save after SIGTERM,
    Ctrl-C or SIGHUP; a second signal ends it at once."""
    max_repairs: Annotated[Count, OURS] = 0
    """Lost processes or nodes after which the run starts its ranks anew and goes on, at most one step back; one more
    ends it (exit code 3). 0: the first one does."""
    copy_freq: Annotated[int, Or(-1, "never"), Ge(1), OURS] = 1
    """With max_repairs: copy weights and optimizer state into host memory, of two nodes where there are two, every so
    many steps; -1: never, and repairs go back to the newest checkpoint."""
    repair_wait_s: Annotated[NotNegative, OURS] = 600.0
    """Seconds that a repair waits for nodes in place of lost ones."""
    stall_timeout_s: Annotated[float | None, Gt(0), Nearest(1800.0), OURS] = None
    """Seconds after which a method of a rank that makes no progress (no micro-batch, no step of the engine, no message)
    ends the run (exit code 3). null: ten times the longest phase that the planner expects, at least 1800."""
    hardware_file: Annotated[FilePath | None, OURS] = None
    """A file that `megatron-rl profile` wrote on such machines: plans count with it, and the run says when a phase
    departs from its plan by more than the file's error. null: plans use data sheets, and the run reports nothing."""
    heartbeat_timeout_s: Annotated[float, Ge(10), OURS] = 30.0
    """Seconds after which a rank whose process gives no sign of life ends the run (exit code 3)."""
    cluster_check: Annotated[bool | None, OURS] = None
    """Check nodes before roles are built: versions, GPUs, free memory, clocks, all-reduces. null: where device=cuda and
    a pool has more than one node."""
    min_link_bandwidth_gbs: Annotated[float | None, Gt(0), Nearest(1.0), OURS] = None
    """GB/s that a rank must reach in an all-reduce inside its node when nodes are checked. null: on cuda a tenth of
    what plans count with (hardware_file), on cpu none."""
    min_node_bandwidth_gbs: Annotated[float | None, Gt(0), Nearest(1.0), OURS] = None
    """GB/s that the ranks of a node together must reach in an all-reduce between nodes. null: as
    min_link_bandwidth_gbs."""
    recorded_prompts: Annotated[int, Or(-1, "all"), Ge(0), OURS] = 1
    """Prompts of every step whose samples go to samples/STEP.safetensors in the run's folder, token by token, with what
    the step computed of them: about 60 bytes a token. `view` and `explain` read them. 0: none; -1: all, which
    `train --rollouts-from` needs."""
    rollouts_from: Annotated[FilePath | None, OURS] = None
    """The folder of a run that recorded all samples, to train on them; only validation generates. null: generate."""
    rollout_data_dir: FilePath | None = None
    """Folder for a table of the samples of every step, STEP.jsonl; null: none."""
    log_val_generations: Count = 0
    """Answers of every validation, the same rows each time, that go to val_generations/STEP.jsonl in the run's folder
    and to the loggers that show tables."""
    validation_data_dir: FilePath | None = None
    """Folder for a table of the answers of every validation, STEP.jsonl; null: none."""
    held_bytes: Annotated[int | None, Ge(1), Nearest(LEAST_HELD_BYTES), OURS] = LEAST_HELD_BYTES
    """Bytes of a rank's answer in one column from which on that column stays on the rank's node, in shared memory, if
    ranks alone read it (`columns --json`: held). null: all pass through the driver."""
    balance_batch: bool = True
    """Give data-parallel ranks the same number of samples, chosen so that they have about equal work."""
    max_skipped_updates: Annotated[Count, OURS] = 5
    """Updates of a role in a row that may be skipped because their gradient or loss is not finite; one more ends the
    run (exit code 6). 0: the first one does."""
    logger: Annotated[list[str], OneOf(LOGGERS)] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Where metrics go: console, jsonl, tensorboard, and where their packages are installed wandb, mlflow, trackio,
    swanlab, clearml, and opentelemetry for spans."""
    prometheus: Annotated[PrometheusConfig, OURS] = field(default_factory=PrometheusConfig)
    seed: Annotated[int, Ge(0), Le(LARGEST_SEED)] = 1
    """Seed of sampling, prompt order, mini-batch splits and the fresh value head."""
    export_hf: Annotated[bool, OURS] = True
    """Write the trained actor as a Hugging Face folder at the end."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole run. Raises ValueError before the prompts are counted, from which it follows."""
        if self.total_training_steps is None:
            raise ValueError("trainer.total_training_steps is null: it follows from the number of prompts")
        return self.total_training_steps
