"""Rollouts of rows with images: the engine reads the features of a tower, and returns what transformers computes.

In all folders the head wants a placeholder everywhere, more than any other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from picture_rows import (
    ImageRow,
    features_of,
    image_row,
    loaded,
    logits_of,
    patch_values,
    random_picture,
    request,
    some_rows,
    text,
    want_placeholders,
)
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM
from sweeps import marks_of
from tiny_models import run_config
from vision_folders import (
    IMAGE,
    VIDEO,
    save_qwen3_5_moe_vl_folder,
    save_qwen3_5_vl_folder,
    save_qwen3_vl_folder,
    save_qwen3_vl_moe_folder,
    save_qwen25_vl_folder,
)

from megatron_rl.rollout.slices import Drawn, Slice, Start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

IMAGES = {"data__image_key": "images"}
ROLLOUT = "actor_rollout_ref__rollout__"
IN_PARTS: dict[str, object] = {f"{ROLLOUT}max_num_batched_tokens": 8, f"{ROLLOUT}max_num_seqs": 8}
"""Prompts are read in parts, which end inside images."""
WAYS = {"whole": {}, "parts": IN_PARTS, "shared parts": IN_PARTS | {f"{ROLLOUT}prefix_match_unit": 4}}
"""The last: beginnings that are equal are shared, up to 3 tokens, which layers with states cannot do."""
ATTENDING = (save_qwen25_vl_folder, save_qwen3_vl_folder, save_qwen3_vl_moe_folder)
LINEAR = (save_qwen3_5_vl_folder, save_qwen3_5_moe_vl_folder)
CASES = [(save, tp_size, way) for save in ATTENDING for tp_size in (1, 2) for way in ("whole", "shared parts")]
CASES += [(save, tp_size, way) for save in LINEAR for tp_size in (1, 2) for way in ("whole", "parts")]
OFTEN = [(save_qwen3_vl_folder, 2, "shared parts")]
FURTHER = [case for case in CASES if case[1:] != (1, "shared parts")]


def twins(model: torch.nn.Module) -> list[ImageRow]:
    """Two rows with equal tokens and different images, which stand at their beginning, and the first one again."""
    generator = torch.Generator().manual_seed(4)
    one, other = (random_picture((1, 4, 4), patch_values(model), generator) for _ in range(2))
    words = text(17, generator)
    rows = [image_row([picture, *words]) for picture in (one, other, one)]
    assert rows[0].token_ids == rows[1].token_ids
    return rows


def continued(start: Start, drawn: Drawn, length: int) -> Start:
    """The request with the first `length` tokens of its response at the end of its prompt."""
    return replace(start, token_ids=(*start.token_ids, *drawn.token_ids[:length]), max_tokens=start.max_tokens - length)


def rollouts(config, rows: Sequence[ImageRow], pairs: Sequence[ImageRow], features: dict[str, torch.Tensor]) -> dict:
    """What one rank's engine draws, by what is tried."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    rollout = worker.roles["rollout"]
    engine = rollout.generator
    assert not [name for name, _ in engine.model.named_parameters() if "visual" in name]

    def draw(starts: Sequence[Start], **order) -> list[Drawn]:
        drawn, _ = engine.advance(Slice(0, None, tuple(starts), **order))
        return [drawn[start.request] for start in starts]

    rollout.enter()
    greedy = [request(number, row, features, GREEDY) for number, row in enumerate(rows)]
    known = {"greedy": draw(greedy)}
    known["again"] = draw(greedy, keeps_prefixes=True)
    known["samples"] = draw([request(number, rows[1], features, RANDOM) for number in range(4)])
    behind = [continued(start, new, 3) for start, new in zip(greedy, known["greedy"], strict=True)]
    known["continued"] = draw(behind, keeps_prefixes=True)
    engine.advance(Slice(0, 4, tuple(greedy)))  # some images are read by then, and some in part
    known["after a drop"] = draw(behind, drops=engine.requests.unfinished)
    known["twins"] = draw([request(number, row, features, GREEDY) for number, row in enumerate(pairs)])
    known["held"] = len(engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.encoder_cache)
    rollout.exit()
    rollout.enter()
    known["after"] = draw(greedy)
    return known


def log_probs_of(model: torch.nn.Module, row: ImageRow, new: Drawn, before: Sequence[int] = ()) -> torch.Tensor:
    """float32 [T, V] of transformers, without the placeholders, which it wants most."""
    logits = logits_of(model, row, [*before, *new.token_ids])[len(before) :]
    wanted = logits[:, [IMAGE, VIDEO]].max(-1).values
    logits[:, [IMAGE, VIDEO]] = -torch.inf
    assert (wanted - logits.max(-1).values).min() > 50
    return logits.log_softmax(-1)


def differs(model: torch.nn.Module, row: ImageRow, new: Drawn, before: Sequence[int] = ()) -> float:
    """Largest difference of log-probs to transformers."""
    wanted = log_probs_of(model, row, new, before).gather(1, torch.tensor(new.token_ids)[:, None])[:, 0]
    return float((wanted - torch.tensor(new.log_probs)).abs().max())


@pytest.mark.parametrize(
    ("save", "tp_size", "way"), [pytest.param(*case, marks=marks_of(case, OFTEN, FURTHER)) for case in CASES]
)
def test_the_engine_reads_features(save, tp_size, way, tmp_path) -> None:
    """Log-probs within 5e-5 of transformers, tokens equal, no placeholder sampled: of rows with 0 to 3 images together,
    again with their keys and values cached, n samples, requests that go on behind drawn tokens, and rows that differ in
    their images alone. Would not catch features that the tower of the trainer makes otherwise.
    """
    path = want_placeholders(save(tmp_path / "model"))
    model = loaded(path)
    rows, pairs = some_rows(model), twins(model)
    features = features_of(model, [picture for row in (*rows, *pairs) for picture in row.pictures])
    config = run_config(path, tp_size, 1, **{f"{ROLLOUT}tensor_model_parallel_size": tp_size, **WAYS[way], **IMAGES})
    ranks = run_ranks(tp_size, rollouts, config, rows, pairs, features)
    known = ranks[0]
    assert all(rank == known for rank in ranks)
    drawn = [new.token_ids for new in known["greedy"]]
    for tried, of in (("greedy", rows), ("again", rows), ("after", rows), ("twins", pairs), ("samples", [rows[1]] * 4)):
        assert max(differs(model, row, new) for row, new in zip(of, known[tried], strict=True)) < 5e-5, tried
    for tried in ("again", "after"):
        assert [new.token_ids for new in known[tried]] == drawn
    for tried in ("continued", "after a drop"):
        for row, new, first in zip(rows, known[tried], drawn, strict=True):
            assert new.token_ids == first[3:]
            assert differs(model, row, new, first[:3]) < 5e-5, tried
    for row, new in zip((*rows, *pairs), (*known["greedy"], *known["twins"]), strict=True):
        assert log_probs_of(model, row, new).argmax(-1).tolist() == list(new.token_ids)
    one, other, again = known["twins"]
    assert one.log_probs[0] != other.log_probs[0] and one.token_ids == again.token_ids
    assert known["held"] > 0


def drafted(config, rows: Sequence[ImageRow], features: dict[str, torch.Tensor]) -> tuple[list, list, list]:
    """(responses, those to requests with earlier responses, everything that was drafted for these)."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    rollout = worker.roles["rollout"]
    engine = rollout.generator
    drafter = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    propose, drafts = drafter.propose, []

    def noted(*args, **kwargs):
        made = propose(*args, **kwargs)
        drafts.extend(token for draft in made for token in draft)
        return made

    drafter.propose = noted
    rollout.enter()
    plain = [request(number, row, features, GREEDY) for number, row in enumerate(rows)]
    first, _ = engine.advance(Slice(0, None, tuple(plain)))
    drafts.clear()
    named = []
    for start in plain:
        tokens = first[start.request].token_ids
        earlier = np.array([*start.token_ids[-4:], *tokens[:5], IMAGE, IMAGE, *tokens[5:]], dtype=np.int32)
        named.append(replace(start, earlier=(earlier.tobytes(),)))
    second, _ = engine.advance(Slice(0, None, tuple(named)))
    return *([done[start.request] for start in plain] for done in (first, second)), drafts


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ngram", "earlier"])
def test_no_placeholder_is_drafted(way, tmp_path) -> None:
    """Prompts and earlier responses have placeholders where drafts are taken from, and the head wants them. Responses
    are those of transformers. Would not catch a draft of a token that is no placeholder and can never be right.
    """
    path = want_placeholders(save_qwen3_vl_folder(tmp_path / "model"))
    model = loaded(path)
    rows = some_rows(model)[1:]
    features = features_of(model, [picture for row in rows for picture in row.pictures])
    config = run_config(path, 1, 1, **{f"{ROLLOUT}speculative": way, f"{ROLLOUT}prompt_lookup_min": 1, **IMAGES})
    ((first, second, drafts),) = run_ranks(1, drafted, config, rows, features)
    assert drafts and not {IMAGE, VIDEO}.intersection(drafts)
    for row, plain, new in zip(rows, first, second, strict=True):
        assert plain.token_ids == new.token_ids
        assert max(differs(model, row, plain), differs(model, row, new)) < 5e-5
