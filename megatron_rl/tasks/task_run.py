"""A run of a task, put together: data, role, lifecycle and logger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.roles import REFERENCE, Placement
from megatron_rl.config.steps import with_steps
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import REWARD
from megatron_rl.controller.lifecycle import Lifecycle, StopPolicy
from megatron_rl.controller.repairs import Repairs
from megatron_rl.controller.response_ends import end_token_notes
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.run_images import image_features, prompt_images
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.controller.run_setup import RunBase, RunPools, take_folder
from megatron_rl.data.prompt_images import PromptImages
from megatron_rl.observe.phase_watch import watching
from megatron_rl.planning.memory import planned_memory
from megatron_rl.records import Batch
from megatron_rl.roles.reward_training import TrainableRewardModel
from megatron_rl.roles.scoring_roles import Reference
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.sampling.image_features import ImageFeatures, PatchesOf
from megatron_rl.tasks.stored_reference import StoredReference
from megatron_rl.tasks.task_data import ReadFiles, TaskData, read_files
from megatron_rl.tasks.validation_loss import ValidationLoss

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class TaskRun(RunBase):
    """The parts of a task's run. stored: the reference's log-probs, of dpo. images: features of those that examples
    show, and what gives their patches; None: examples are text.
    """

    config: TaskConfig
    data: TaskData
    held_out: ValidationLoss
    stored: StoredReference
    images: ImageFeatures | None
    patches_of: PatchesOf | None

    def with_images(self, batch: Batch) -> Batch:
        """Return a batch with the columns of the images that its rows show."""
        if self.images is None or "images" not in batch:
            return batch
        self.images.need(batch.objects("images"))
        batch.add(self.images.columns(batch))
        return batch.without("images")

    def role(self, kind: type[Kind]) -> Kind:
        """The handle of the role that is trained."""
        return self.pools.handle(self.pools.placement.leader.name, kind)

    @property
    def reference(self) -> Reference | None:
        """The handle of the frozen policy; None unless every batch is scored with it."""
        return self.pools.handle(REFERENCE, Reference) if REFERENCE in self.pools.placement.roles else None

    def describe(self, num_tokens: int) -> dict[str, float]:
        """Seconds and memory of the step that ends, which read `num_tokens` tokens."""
        return self.logger.time_metrics(num_tokens) | self.logger.memory_metrics(self.pools.hosts)


@contextmanager
def open_task(repairs: Repairs, local: bool = False) -> Iterator[TaskRun]:
    """Open a task's run, ready for its first step.

    Errors of data and checkpoints are raised before any process is started. local: one rank, in this process. repairs:
    what the run keeps when its ranks are started again, and the configuration.
    """
    config = repairs.config
    assert isinstance(config, TaskConfig)
    with ExitStack() as opened:
        placement = Placement.of(config)
        folder = repairs.folders[placement.leader.model_path]
        tokenizer = folder.tokenizer
        with watching("reading of the examples"):
            images, files = repairs.once("examples", partial(read_with_images, config, folder))
            data = TaskData(config, files)
        config = with_steps(config, len(data.train))
        logger = RunLogger(config, RunFolder(config, repairs), tokenizer, planned_memory(config, repairs.folders))
        held_out = ValidationLoss(config, logger, repairs.stop)
        parts = (data, held_out, logger)
        kwargs = config.data.apply_chat_template_kwargs
        ends = end_token_notes(folder, kwargs, is_chat=tokenizer.chat_template is not None)
        take_folder(opened, logger, parts, lines=data.notes, warnings=ends)
        stop_policy = StopPolicy(repairs.stop)
        pools = RunPools.open(opened, placement, logger, stop_policy, local, repairs)
        stored = StoredReference(logger.folder.start.path)
        life = Lifecycle(logger, pools.hosts, parts, stop_policy, stored, repairs, held_out.step_to_keep)
        life.restore()
        with life:
            kind = TrainableRewardModel if config.trainer.stage == REWARD else SupervisedPolicy
            features = image_features(placement, images, pools.handle(placement.leader.name, kind))
            patches_of = None if images is None else images.patches
            yield TaskRun(config, pools, life, logger, repairs, data, held_out, stored, features, patches_of)


def read_with_images(
    config: TaskConfig, folder: ModelFolder
) -> tuple[PromptImages | None, tuple[ReadFiles, ReadFiles]]:
    """What reads images of examples, None where these are text, and `read_files`. Raises ConfigError."""
    images = prompt_images(config, folder)
    return images, read_files(config, folder, images)
