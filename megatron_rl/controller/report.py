"""The end of a run: export, comparison of the exported model with the trainer, pictures, summary, final table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from megatron_rl.checkpoint.folders import HF_MODEL
from megatron_rl.checkpoint.hf_folder import removing_unfinished
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.storage import storing
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.config.steps import validates
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.controller.run_setup import RunBase
from megatron_rl.errors import ParityError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.phase_clock import TIMELINE_FILE, write_calls
from megatron_rl.observe.summary import before_after_table, write_summary
from megatron_rl.planning.folder_checks import STARTING_POINTS, read_model_folder
from megatron_rl.records import Batch, conversations
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.sampling.image_features import PatchesOf

if TYPE_CHECKING:
    from megatron_rl.controller.run import Run
from megatron_rl.controller.run_images import tensors_of_part

SUMMARY_FILE = "summary.json"
"""The numbers of a whole run, in its folder."""
ADAPTER_FOLDER = "adapter"
"""The exported model in a run's folder, and its adapters."""
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Modules of transformers' models: the norms of latent vectors of queries and of keys."""
EXPORT_LOGIT_BOUND, EXPORT_LOGIT_SHARE = 1e-4, 1e-5
"""Largest allowed difference between outputs of the exported model and the trainer's, in float32: the larger one of
this number and this share of the largest output, which rounding grows with.
"""

SHARP_FALL = 1 / 3
"""A held-out number that fell by this share has a line at the end. With 40 prompts a smaller fall may be chance."""


def finish_run(run: Run) -> dict[str, Any]:
    """Write everything a user takes home from a PPO run; returns the summary. Raises ParityError, StorageError.

    Bytes in the summary are per rank, in rank order, of the last resharding to rollout mode. Without a rule there is no
    accuracy, only a reward.
    """
    logger, validation = run.logger, run.validation
    logger.title("Finishing: export, comparison, curves")
    if validation.parity_rows is None:  # every step had been taken before
        validation.at_the_end(run.config.trainer.num_steps)
    logger.keep_folder()
    results = {
        "rollout_logprob_diff_max": run.algorithm.logprob_diff_max,
        "hf_export_logit_diff_max": export_actor(run) if run.config.trainer.export_hf else None,
        "transition_bytes_received_per_rank": [report.bytes_received for report in logger.transitions],
        "transition_bytes_lower_bound_per_rank": [report.lower_bound_bytes for report in logger.transitions],
        "transition_network_bytes_per_rank": [report.network_bytes for report in logger.transitions],
        "transition_network_bytes_lower_bound_per_rank": [report.network_bound_bytes for report in logger.transitions],
    }
    labels = {"val_accuracy": "held-out accuracy"}
    if run.roles.reward_models:
        labels["val_reward"] = "held-out reward"
    validations = {"val_accuracy": logger.accuracies, "val_reward": logger.val_rewards}
    rate = run.config.actor_rollout_ref.actor.optim.lr
    return finish(run, results, validations, labels, fallen(validations, labels, rate))


def fallen(validations: Mapping[str, Sequence[float]], labels: Mapping[str, str], rate: float) -> list[str]:
    """Return a line for each number of the validations that is lower at the end than at first by `SHARP_FALL`."""
    return [
        f"{label} fell from {values[0]:.3f} to {values[-1]:.3f}: a lower learning rate is the first thing to try, such "
        f"as actor_rollout_ref.actor.optim.lr={rate / 10:g}"
        for name, label in labels.items()
        if (values := validations[name]) and values[0] - values[-1] >= SHARP_FALL * abs(values[0]) > 0
    ]


def finish(
    run: RunBase,
    results: dict[str, Any],
    validations: Mapping[str, Sequence[float]],
    labels: Mapping[str, str],
    lines: Iterable[str] = (),
) -> dict[str, Any]:
    """Write summary and pictures, and print the table of before and after, `lines` and the files; returns the summary.

    A start that trains nothing keeps the summary and the timeline of the steps that were taken.
    results: the numbers of the summary that not every run has. validations: name in the summary -> a number of every
    validation; labels: name -> its label in the table. Raises StorageError where the summary cannot be written.
    """
    folder, logger, has_first = run.logger.folder.path, run.logger, run.config.trainer.val_before_train
    before = {name: values[0] if values and has_first else None for name, values in validations.items()}
    after = {name: values[-1] if values else None for name, values in validations.items()}
    summary = common_numbers(run) | results
    for name in validations:
        summary |= {f"{name}_before": before[name], f"{name}_after": after[name]}
    kept = kept_summary(run.logger.folder)
    if kept is None:
        with storing(SUMMARY_FILE, folder):
            write_summary(folder / SUMMARY_FILE, summary)
    if "jsonl" in run.config.trainer.logger:
        draw(logger)
    draw_steps(logger)
    rows = [
        (label, first, last)
        for name, label in labels.items()
        if (first := before[name]) is not None and (last := after[name]) is not None
    ]
    if rows:
        logger.console.print(before_after_table(rows))
    if not validates(run.config.trainer):
        logger.say(f"no {' or '.join(labels.values())}: trainer.test_freq=0 and trainer.val_before_train=false")
    for line in lines:
        logger.say(line)
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    what = "nothing was trained; files in" if logger.folder.is_finished else "written to"
    logger.say(f"{what} {folder}: {', '.join(files)}")
    return summary if kept is None else kept


def kept_summary(folder: RunFolder) -> dict[str, Any] | None:
    """Return the summary that stays, as it is of all the steps of a finished run; None where one is to be written."""
    if not folder.keeps(SUMMARY_FILE):
        return None
    try:
        summary = json.loads((folder.path / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get("steps") == folder.start.step else None


def draw(logger: RunLogger) -> None:
    """Draw the curves of the whole run; warns where the picture cannot be written, and the run still ends well."""
    from megatron_rl.observe.curves import plot_curves  # matplotlib, like transformers' models, is not for the start

    try:
        plot_curves(logger.folder.path / METRICS_FILE, logger.folder.path / "curves.png")
    except OSError as error:
        logger.warn(f"curves.png could not be written: {error}")


def draw_steps(logger: RunLogger) -> None:
    """Write the timeline of the last steps, one row for each pool, as a picture and as numbers. Warns like `draw`.

    Without a step in this start, the timeline of the last start that had some stays.
    """
    if logger.folder.keeps(TIMELINE_FILE):
        return
    from megatron_rl.observe.pictures import plot_timeline

    calls, folder = logger.clock.recent, logger.folder.path
    try:
        write_calls(calls, folder / TIMELINE_FILE)
        plot_timeline(calls, folder / "timeline.png")
    except OSError as error:
        logger.warn(f"the timeline could not be written: {error}")


def common_numbers(run: RunBase) -> dict[str, Any]:
    """The part of the summary that every run has."""
    config, placement = run.config, run.pools.placement
    pool = placement.pools[placement.leader.pool]
    tp_size, pp_size = pool.layout.tensor_model_parallel_size, pool.layout.pipeline_model_parallel_size
    cp_size = pool.layout.context_parallel_size
    layout = {
        "world_size": placement.world_size,
        "tp": tp_size,
        "pp": pp_size,
        "cp": cp_size,
        "dp": pool.world_size // (tp_size * pp_size * cp_size),
    }
    if ROLLOUT in placement.roles:
        rollout = config.actor_rollout_ref.rollout
        layout["rollout_tp"] = rollout.tensor_model_parallel_size
        layout |= {"rollout_ep": rollout.expert_parallel_size} if rollout.expert_parallel_size > 1 else {}
        layout |= {"rollout_dp": rollout.attention_dp_size} if rollout.attention_dp_size > 1 else {}
    emulated = [
        role.name for pool in placement.pools.values() for role in pool.megatron_roles if role.megatron.fp8_emulate
    ]
    return {
        "steps": config.trainer.num_steps,
        "wall_s": round(time.monotonic() - run.repairs.started, 1),
        "layout": layout,
        "pools": {name: [role.name for role in one.roles] for name, one in placement.pools.items()},
        "seed": config.trainer.seed,
        "skipped_updates": run.logger.updates.totals,
        **({"repairs": [asdict(repair) for repair in run.repairs.all]} if run.repairs.all else {}),
    } | ({"fp8_emulated": emulated} if emulated else {})


def export_actor(run: Run) -> float:
    """Export the actor and compare it on held-out responses of the last validation. Raises as `export_and_compare`."""
    if run.validation.parity_rows is None:
        raise ValueError("nothing was validated: there are no rows to compare the export on")
    images = run.validation.data.images
    return export_policy(run, run.roles.actor, run.validation.parity_rows, None if images is None else images.patches)


def export_policy(
    run: RunBase, policy: Actor | SupervisedPolicy, rows: Batch, patches_of: PatchesOf | None = None
) -> float:
    """Export a policy; largest logit difference to the trainer on these rows. Raises as `export_and_compare`.

    patches_of: gives the patches of their images.
    """

    def logits() -> torch.Tensor:
        parts: Any = policy.sampled_logits(rows).get()  # no records, so one of each data-parallel rank
        return torch.cat(parts)

    def write(target: Path) -> None:
        policy.export_hf(target).get()

    export_adapter(run, policy)
    return export_and_compare(run, "logits", write, logits, lambda target: hf_sampled_logits(target, rows, patches_of))


def export_adapter(run: RunBase, role: Any) -> None:
    """Write the leader's adapters, if it trains some, to the run's folder, in PEFT's format. Raises StorageError."""
    if not run.pools.placement.leader.lora.rank:
        return
    folder = run.logger.folder.path
    target = folder / ADAPTER_FOLDER
    with run.logger.clock.phase("export"), removing_unfinished(target), storing(ADAPTER_FOLDER, folder):
        role.export_adapter(target.resolve()).get()


def export_and_compare(
    run: RunBase,
    what: str,
    write: Callable[[Path], None],
    trainer_output: Callable[[], torch.Tensor],
    exported_output: Callable[[Path], torch.Tensor],
) -> float:
    """Export the trained model; largest difference between its outputs and the trainer's, 0 where there are none.

    what: the outputs, in words. write: writes the model to a folder. exported_output: computes from that folder what
    trainer_output gives, float32. Raises ParityError when a float32 model without `fp8` differs by more than
    `export_bound`, or when preflight would refuse the folder, StorageError when the model cannot be written, and then
    nothing of it is left.
    """
    folder = run.logger.folder.path
    target = folder / HF_MODEL
    with run.logger.clock.phase("export"):
        with removing_unfinished(target), storing(HF_MODEL, folder):
            write(target.resolve())
        refuse_unreadable(target)
        expected = trainer_output()
    differences = (exported_output(target) - expected).abs()
    largest = float(differences.max()) if differences.numel() else 0.0
    bound = export_bound(expected)
    megatron = run.pools.placement.leader.megatron
    is_exact = megatron.dtype == "float32" and megatron.override_transformer_config.fp8 is None
    if is_exact and not largest <= bound:
        raise ParityError(
            f"{what} of the exported model in {target} differ from the trainer's by {largest:.3g}; "
            f"the bound is {bound:.2g}"
        )
    return largest


def refuse_unreadable(target: Path) -> None:
    """Raise ParityError for an exported folder that the next run could not start from."""
    _, problems = read_model_folder("model.path", ModelFolder(target), STARTING_POINTS)
    if problems:
        told = "; ".join(map(str, problems))
        raise ParityError(f"no run can start from the exported model in {target}: {told}")


def export_bound(outputs: torch.Tensor) -> float:
    """Largest difference that an export may have to these outputs of the trainer, float32 of any shape."""
    largest = float(outputs.abs().max()) if outputs.numel() else 0.0
    return max(EXPORT_LOGIT_BOUND, EXPORT_LOGIT_SHARE * largest)


def hf_model(folder: Path | str) -> Any:
    """Load a Hugging Face folder with transformers, in float32, as the class that its config.json names, or as that of
    its model_type where transformers has no class of the name.

    A model whose attention logits are capped needs transformers' eager attention: the others leave the cap out. Norms
    are the engine's.
    """
    settings = ModelFolder(folder).hf_config
    model_class = getattr(transformers, settings.architectures[0], transformers.AutoModelForCausalLM)
    capped = getattr(settings.get_text_config(), "attn_logit_softcapping", None) is not None
    options = {"attn_implementation": "eager"} if capped else {}
    return with_engine_norms(
        model_class.from_pretrained(folder, config=settings, dtype=torch.float32, **options).eval()
    )


def with_engine_norms(model: Any) -> Any:
    """Return a model of transformers with the epsilon of vLLM, which the trainer has, in the norms of latent vectors.

    Both take `rms_norm_eps` of config.json there, and transformers always 1e-6.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LATENT_NORMS:
            module.variance_epsilon = model.config.get_text_config().rms_norm_eps
    return model


@torch.no_grad()
def hf_sampled_logits(folder: Path, batch: Batch, patches_of: PatchesOf | None = None) -> torch.Tensor:
    """Float32 logits [sampled tokens, vocab_size] of a Hugging Face folder, row after row.

    patches_of: gives the patches of images, by which the folder's own tower is compared, too.
    """
    model = hf_model(folder)
    sizes = conversations(batch)[1].tolist()
    parts = zip(batch.flat("input_ids").split(sizes), batch.flat("sampled").split(sizes), strict=True)
    logits, first = [], 0
    for ids, sampled in parts:
        shown = {} if patches_of is None else tensors_of_part(batch, first, patches_of, ids)
        first += len(ids)
        logits.append(model(ids[None], **shown).logits[0, :-1][sampled[1:]])
    return torch.cat(logits)
