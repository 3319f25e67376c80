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

FAST, REPRODUCIBLE = "fast", "reproducible"
"""Values of `trainer.preset`."""

MOST_RANKS = 100_000
"""Most machines, ranks per machine, and ranks of a pool. More are a typing error, and plans iterate over ranks."""

RANKS = Bounds(1, MOST_RANKS)
"""Bounds of the sizes of a pool."""

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "clearml", "opentelemetry")

LEAST_HELD_BYTES = 1 << 20
"""Half as many bytes go through the driver as fast as through shared memory: docs/internals/architecture.md."""

LARGEST_SEED = 2**32 - 1
"""The largest seed of numpy, which vLLM seeds on every rank. Torch takes larger ones."""


@dataclass
class PrometheusConfig:
    port: Annotated[int | None, Ge(0), Le(65535), Nearest(9090)] = None
    """Port of 127.0.0.1 on the driver's machine where Prometheus reads the metrics of the last step; 0: a free port,
    which the run prints; null: no server."""


@dataclass
class TrainerConfig:
    stage: Annotated[str, OneOf(TASKS), OURS] = "ppo"
    """The task: ppo | sft | reward | dpo. The commands that train set it; `plan` reads it."""
    project_name: str = "megatron_rl"
    """Name of the project: part of the run's folder, and the group of runs in wandb and other trackers."""
    experiment_name: str = "run"
    """Name of this run: part of its folder, and its name in wandb and other trackers."""
    device: Annotated[str, OneOf(("cpu", "cuda"))] = "cuda"
    """cpu | cuda. On cpu one process takes the place of one GPU."""
    preset: Annotated[str | None, OneOf((FAST, REPRODUCIBLE)), OURS] = None
    """Defaults of several keys at once, where these are not set: fast: what other engines have on by default |
    reproducible: what computes the same every time | null: none. `megatron-rl plan` lists them with their reasons."""
    allow_unproven: Annotated[bool, OURS] = False
    """Allow features that are refused because no run on such a device has shown them; `megatron-rl features` names
    them."""
    launcher: Annotated[str, OneOf((RAY, LOCAL)), OURS] = RAY
    """How ranks are started. ray: on this machine or on the nodes of a Ray cluster | local: on this machine, without
    Ray, in fewer seconds."""
    nnodes: Annotated[int, RANKS] = 1
    """Nodes (machines) of global_pool, which hosts every role by default."""
    n_gpus_per_node: Annotated[int, RANKS] = 8
    """Ranks per node of global_pool: GPUs, or processes when device=cpu."""
    total_training_steps: Size | None = None
    """Training steps of the whole run, one batch of prompts each; null: those of total_epochs."""
    total_epochs: Size | None = None
    """Passes over the training prompts; an epoch has one step per full batch. The run ends at the first limit that it
    reaches, this or total_training_steps. null: no limit if total_training_steps is set, else 30, or 1 for sft, reward
    and dpo."""
    rollout_ahead: Annotated[int, Ge(0), AtMost(1000), OURS] = 0
    """Asynchronous (off-policy) training: largest staleness, in steps, of a trained token. Generation may be at most
    this many steps ahead. 0: synchronous."""
    critic_warmup: Count = 0
    """Before this step only the critic is trained."""
    test_freq: Count = 10
    """Validate every N steps, and after the last one; 0 or -1: only after the last one, and never if val_before_train
    is false."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate only: generate responses to the held-out prompts, write them and the metrics, and end, as `eval`
    does."""
    default_local_dir: FilePath = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: metrics, summary, curves, checkpoints and the exported model."""
    save_freq: Annotated[int, Or(-1, "never"), Ge(1)] = -1
    """Write a checkpoint, `global_step_N`, every N steps and after the last; -1: never."""
    max_ckpt_to_keep: Size | None = None
    """Number of checkpoints to keep, the newest ones; null: all."""
    save_best: Annotated[bool, OURS] = True
    """sft, reward, dpo: where checkpoints are written, write one after every validation with the lowest loss so far,
    and keep it in addition to the newest ones."""
    resume_mode: Annotated[str, OneOf(RESUME_MODES)] = "auto"
    """auto: resume from the newest complete checkpoint in default_local_dir, if there is one | disable: begin at step 0
    | resume_path: resume from resume_from_path."""
    resume_from_path: FilePath | None = None
    """The `global_step_N` folder from which resume_mode=resume_path resumes."""
    stop_grace_s: Annotated[NotNegative, OURS] = 300.0
    """Seconds that a run which saves checkpoints may take to finish or abandon its step and to save after SIGTERM,
    Ctrl-C or SIGHUP; a second signal ends it now."""
    max_repairs: Annotated[Count, OURS] = 0
    """Number of times that the run restarts its ranks after a lost process or node and continues, at most one step
    back; one more loss ends it (exit code 3). 0: the first loss ends it."""
    copy_freq: Annotated[int, Or(-1, "never"), Ge(1), OURS] = 1
    """With max_repairs: copy weights and optimizer state into host memory (of two nodes, if there are two) every N
    steps; -1: never, and repairs go back to the newest checkpoint."""
    repair_wait_s: Annotated[NotNegative, OURS] = 600.0
    """Seconds that a repair waits for nodes that replace lost ones."""
    stall_timeout_s: Annotated[float | None, Gt(0), Nearest(1800.0), OURS] = None
    """Seconds without progress of a rank (no micro-batch, no engine step, no message) after which the run ends (exit
    code 3). null: ten times the longest phase that the planner expects, at least 1800."""
    hardware_file: Annotated[FilePath | None, OURS] = None
    """Hardware file that `megatron-rl profile` wrote on such machines. Plans use its measurements, and the run warns
    when a phase differs from its plan by more than the file's error. null: plans use data sheets, and the run does not
    warn."""
    heartbeat_timeout_s: Annotated[float, Ge(10), OURS] = 30.0
    """Seconds without a heartbeat of a rank's process after which the run ends (exit code 3)."""
    cluster_check: Annotated[bool | None, OURS] = None
    """Check nodes before roles are built: versions, GPUs, free memory, clocks, all-reduces. null: only if device=cuda
    and a pool has more than one node."""
    min_link_bandwidth_gbs: Annotated[float | None, Gt(0), Nearest(1.0), OURS] = None
    """cluster_check: GB/s that a rank must reach in an all-reduce inside its node. null: on cuda a tenth of what plans
    assume (hardware_file), on cpu no limit."""
    min_node_bandwidth_gbs: Annotated[float | None, Gt(0), Nearest(1.0), OURS] = None
    """cluster_check: GB/s that the ranks of a node together must reach in an all-reduce between nodes. null: as
    min_link_bandwidth_gbs."""
    recorded_prompts: Annotated[int, Or(-1, "all"), Ge(0), OURS] = 1
    """Number of prompts per step whose samples are recorded token by token, with log-probs, advantages and so on, in
    samples/STEP.safetensors of the run's folder: about 60 bytes a token. `view` and `explain` read them. 0: none; -1:
    all, which `train --rollouts-from` needs."""
    rollouts_from: Annotated[FilePath | None, OURS] = None
    """Folder of a run that recorded all samples (recorded_prompts=-1): train on them, and generate only for validation.
    null: generate."""
    rollout_data_dir: FilePath | None = None
    """Folder for a table of the samples of every step, STEP.jsonl; null: none."""
    log_val_generations: Count = 0
    """Number of responses of every validation, of the same rows each time, that are written to
    val_generations/STEP.jsonl in the run's folder and to loggers that show tables."""
    validation_data_dir: FilePath | None = None
    """Folder for a table of the responses of every validation, STEP.jsonl; null: none."""
    held_bytes: Annotated[int | None, Ge(1), Nearest(LEAST_HELD_BYTES), OURS] = LEAST_HELD_BYTES
    """Remote columns: a column that only ranks read (`columns --json`: held) and that has at least this many bytes per
    rank stays in shared memory on the node that made it; only references pass through the driver. null: all columns
    pass through the driver."""
    balance_batch: bool = True
    """Distribute samples so that data-parallel ranks have the same number of them and about equal work."""
    max_skipped_updates: Annotated[Count, OURS] = 5
    """Number of updates of a role in a row that may be skipped because their gradient or loss is not finite; one more
    ends the run (exit code 6). 0: the first one ends it."""
    logger: Annotated[list[str], OneOf(LOGGERS)] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Where metrics go: console, jsonl, tensorboard; and, if their packages are installed, wandb, mlflow, trackio,
    swanlab, clearml, and opentelemetry for traces."""
    prometheus: Annotated[PrometheusConfig, OURS] = field(default_factory=PrometheusConfig)
    seed: Annotated[int, Ge(0), Le(LARGEST_SEED)] = 1
    """Seed of sampling, prompt order, mini-batch splits and the new value head."""
    export_hf: Annotated[bool, OURS] = True
    """Write the trained actor as a Hugging Face folder at the end."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole run. Raises ValueError before the prompts are counted."""
        if self.total_training_steps is None:
            raise ValueError("trainer.total_training_steps is null: it follows from the number of prompts")
        return self.total_training_steps
