"""One update of a task's role on every rank of a layout, and the same by a plain loop of transformers and torch."""

from __future__ import annotations

import functools

import torch
from tiny_models import run_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from updates import OPTIMIZER, relative, whole_weights

from megatron_rl.config.task_config import for_task
from megatron_rl.config.tasks import DPO, REWARD, SFT
from megatron_rl.losses.terms import ItemTerms
from megatron_rl.records import Batch, answer_rows, ragged

NUM_ROWS = 11
NAMES = {SFT: "actor", DPO: "actor", REWARD: "critic"}


@functools.cache
def token_batch() -> Batch:
    """Rows of 4 to 30 tokens, in which tokens that do not count lie between those that do, as in a conversation."""
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [(draw(3, 14), draw(1, 16)) for _ in range(NUM_ROWS)]
    masks = []
    for prompt, response in lengths:
        counts = torch.rand(response, generator=generator) < 0.7
        counts[0] = True
        masks.append(torch.cat([torch.zeros(prompt, dtype=torch.bool), counts]))
    tokens = [torch.randint(2, 70, (len(mask),), generator=generator) for mask in masks]
    return Batch(input_ids=ragged(tokens), sampled=ragged(masks))


ANSWER_COLUMNS = ("input_ids", "sampled", "answer_lengths", "given", "labels")


def answer_batch(sizes: tuple[int, ...], score_token: bool) -> Batch:
    """Prompts with so many answers each. score_token: as a reward model reads them, with one token after the last."""
    generator = torch.Generator().manual_seed(5)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows: dict[str, list[torch.Tensor]] = {name: [] for name in ANSWER_COLUMNS}
    for size in sizes:
        prompt = torch.randint(2, 70, (draw(2, 10),), generator=generator)
        answers = [torch.randint(2, 70, (draw(1, 12),), generator=generator) for _ in range(size)]
        tail = [torch.zeros(1, dtype=torch.int64)] if score_token else []
        rows["input_ids"].append(torch.cat([part for answer in answers for part in (prompt, answer, *tail)]))
        responses = torch.tensor([len(answer) + score_token for answer in answers])
        ends = [torch.arange(len(prompt) + length) >= len(prompt) for length in responses.tolist()]
        rows["sampled"].append(torch.cat(ends))
        rows["answer_lengths"].append(responses + len(prompt))
        values = torch.rand(size, generator=generator)
        values[-1] *= not score_token  # a margin to the next answer, of which the last has none
        rows["given"].append(values if score_token else -5 - 5 * values)
        rows["labels"].append(torch.randint(0, 2, (size,), generator=generator).float())
    return Batch(weights=torch.ones(len(sizes)), **{name: ragged(column) for name, column in rows.items()})


def task_config(model_path: str, task: str, tp_size: int, pp_size: int, **overrides):
    """With an optimizer whose step is proportional to the gradient."""
    groups = ("actor_rollout_ref__actor", "critic")
    optimizer = {f"{group}__optim__{key}": value for key, value in OPTIMIZER.items() for group in groups}
    return for_task(run_config(model_path, tp_size, pp_size, **optimizer, **overrides), task)


def one_update(config, batch, *arguments) -> dict:
    """What one rank knows after one update of the task's role, with what it scored before and after."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    task = config.trainer.stage
    worker, name = RankHost(config), NAMES[task]
    worker.build(name)
    role, where = worker.roles[name], worker.coordinates()
    rows = torch.arange(len(batch)).tensor_split(where.dp_size)[where.dp_rank]
    mine = batch[rows] if len(rows) else batch[:1].neutral()
    score = {SFT: "log_likelihoods", DPO: "answer_log_probs", REWARD: "scores"}[task]
    update = role.update_preferences if task == DPO else role.update

    def scored():
        found = getattr(role, score)(mine)
        if found is None or not len(rows):
            return None
        return found["scores"] if task == SFT else found.flat("answer_scores")

    result = {"where": where, "before": scored(), name: update(mine, *arguments), "after": scored()}
    parameters = named_parameters(role.trainable.models)
    result[f"{name}_weights"] = {key: value.detach().clone() for key, value in parameters.items()}
    result["place"] = worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)
    return result


def collected(results: list[dict], field: str) -> torch.Tensor:
    """The scores of the whole batch from the data-parallel collectors, in row order."""
    parts = [(r["where"].dp_rank, r[field]) for r in results if r["where"].dp_collector and r[field] is not None]
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])


def assert_same(results: list[dict], reference: list[dict], name: str, model_path: str) -> None:
    """Scores, metrics, gradient norm and new weights equal those of the reference within 1e-5."""
    for field in ("before", "after"):
        assert relative(collected(results, field), collected(reference, field)) < 1e-5, field
    ours, expected = (next(r[name] for r in run if r["where"].dp_collector) for run in (results, reference))
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert abs(ours[key] - value) <= 1e-5 * abs(value) + 1e-7, (key, ours[key], value)
    weights, expected_weights = (whole_weights(run, name, model_path) for run in (results, reference))
    assert weights.keys() == expected_weights.keys()
    for key, tensor in expected_weights.items():
        assert relative(weights[key], tensor) < 1e-5, key


class PlainLoop:
    """One step of torch's AdamW on a transformers model, row by row and without padding."""

    def __init__(self, model_path: str, value_head: bool = False) -> None:
        kind = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
        self.model = kind.from_pretrained(model_path, dtype=torch.float32, **({"num_labels": 1} if value_head else {}))

    def log_probs(self, tokens: torch.Tensor, response: int) -> torch.Tensor:
        """[response] of the last tokens."""
        logits = self.model(tokens[None]).logits[0, -response - 1 : -1]
        return logits.log_softmax(-1).gather(1, tokens[-response:, None])[:, 0]

    def step(self, loss: torch.Tensor) -> tuple[float, float]:
        """(loss, gradient norm before it is clipped) of one step."""
        loss.backward()
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_grad"])
        torch.optim.AdamW(parameters, lr=OPTIMIZER["lr"], eps=OPTIMIZER["eps"], weight_decay=0.0).step()
        return float(loss.detach()), float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """By their names."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}


def assert_equals_plain(results: list[dict], plain: PlainLoop, told: tuple[float, float], name: str, path: str) -> None:
    """Loss, gradient norm and new weights of one process equal those of the plain loop within 1e-5."""
    metrics = results[0][name]
    for key, value in zip(("loss", "grad_norm"), told, strict=True):
        assert abs(metrics[f"{name}/{key}"] - value) <= 1e-5 * abs(value), (key, metrics[f"{name}/{key}"], value)
    expected = plain.weights()
    for key, tensor in whole_weights(results, name, path).items():
        assert relative(tensor, expected[key]) < 1e-5, key


def answers_of(batch: Batch) -> list[tuple[torch.Tensor, int]]:
    """(tokens, response length) of every answer."""
    rows = answer_rows(batch)
    return list(zip(rows["input_ids"].unbind(), rows.num_sampled.tolist(), strict=True))


def mean_loss(terms: ItemTerms) -> torch.Tensor:
    """Over its items."""
    return terms.loss.mean()
