"""The multi-token prediction layer in updates: its gradients, in every layout, and none for the policy.

Why no number can depend on the layout: see `tests/parity`. The layer reads hidden states that all TP ranks of the
last stage have whole, and embeddings that the first stage sends; its loss is a sum over the mini-batch's tokens.

Under CP the guess of a token may be made on another rank than the token is predicted on; ranks add up their losses.

Not exercised: rows that are laid as a trie, which preflight refuses.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layout_keys import EP2, ETP1, SP
from ranks import run_ranks
from rollout_checks import GREEDY, hugging_face_greedy, round_trip, tokens
from safetensors.torch import load_file, save_file
from sweeps import marks_of
from tiny_models import random_batch, run_config
from tiny_mtp import IN_MIMO, NAMES, OF_MIMO, WITH_MTP, save_glm4_with_mtp
from updates import NUM_ROWS, assert_same, relative, run_layout, whole_weights

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.controller.lifecycle import copy_model_files

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

FACTOR, CP2 = 0.5, {"context_parallel_size": 2}
MTP = {"actor_rollout_ref__rollout__speculative": "mtp"}
TRAINED = MTP | {"actor_rollout_ref__actor__mtp_loss_scaling_factor": FACTOR}


def gradients(config) -> dict:
    """One process: the gradients of an update, and its metrics."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    batch = random_batch(NUM_ROWS)
    batch.add(old_log_probs=batch["advantages"].clone())
    metrics = worker.roles["actor"].compute_gradients(batch.read_by(ACTOR_UPDATE))
    by_name = {n: p.main_grad.clone() for n, p in named_parameters(worker.roles["actor"].trainable.models).items()}
    place = worker.groups.grid.place(0, vocab_multiple=64)
    return {"actor_weights": by_name, "place": place, "metrics": metrics}


def with_the_layer_inside(path: str, target: Path) -> str:
    """The folder's model with one layer more, which is the one inside the MTP layer."""
    shutil.copytree(path, target)
    settings = json.loads((target / "config.json").read_text())
    number = settings["num_hidden_layers"]
    own = NAMES + OF_MIMO
    tensors = load_file(target / "model.safetensors")
    kept = {
        name.replace(IN_MIMO, f"model.layers.{number}."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(tuple(f"{place}{n}" for n in own for place in (f"model.layers.{number}.", IN_MIMO)))
    }
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    longer = {"num_hidden_layers": number + 1}
    if "layer_types" in settings:
        longer["layer_types"] = [*settings["layer_types"], settings["layer_types"][-1]]
    if "mlp_layer_types" in settings:
        longer["mlp_layer_types"] = [*settings["mlp_layer_types"], "sparse"]
    (target / "config.json").write_text(json.dumps(settings | longer))
    return str(target)


def plain_gradients(path: str, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """(mean cross-entropy, gradients of FACTOR times it) of the layer, row by row, on transformers' own layers."""
    from megatron_rl.controller.report import hf_model

    trunk, longer = hf_model(path), hf_model(with_the_layer_inside(path, folder))
    block, model, eps = longer.model.layers[-1], trunk.model, trunk.config.rms_norm_eps
    stored = load_file(Path(path, "model.safetensors"))
    is_mimo = any(name.startswith(IN_MIMO) for name in stored)
    prefix = IN_MIMO if is_mimo else f"model.layers.{len(model.layers)}."
    own = {n: stored[f"{prefix}{n}.weight"].requires_grad_() for n in (OF_MIMO if is_mimo else NAMES)}
    embedding_norm, hidden_norm, projection, last_norm = own.values()
    unnormed = []
    model.norm.register_forward_pre_hook(lambda norm, inputs: unnormed.append(inputs[0]))
    batch = random_batch(NUM_ROWS)
    total, count = torch.zeros(()), 0
    for ids, sampled in zip(batch["input_ids"].unbind(), batch["sampled"].unbind(), strict=True):
        with torch.no_grad():
            hidden = model(ids[None]).last_hidden_state[:, :-1]
            hidden = unnormed.pop()[:, :-1] if is_mimo else hidden
            vectors = model.embed_tokens(ids[None, 1:])
        vectors[:, 0] = 0
        both = ((vectors, embedding_norm), (hidden, hidden_norm))
        pair = [F.rms_norm(x, x.shape[-1:], weight, eps) for x, weight in both]
        x = F.linear(torch.cat(pair[::-1] if is_mimo else pair, -1), projection)
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf")).triu(1)
        x = block(x, position_embeddings=model.rotary_emb(x, places), position_ids=places, attention_mask=mask)
        x = x[0] if isinstance(x, tuple) else x
        x = F.rms_norm(x, x.shape[-1:], last_norm, eps)
        log_probs = (x @ trunk.lm_head.weight.detach().t())[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, ids[2:, None])[:, 0]
        total = total - (chosen * sampled[2:]).sum()
        count += int(sampled.sum())
    loss = total / count
    (FACTOR * loss).backward()
    of_layer = {f"{prefix}{name}.weight": tensor.grad for name, tensor in own.items()}
    for name, parameter in block.named_parameters():
        stack, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, (gate, up) in enumerate(grad.chunk(2) for grad in parameter.grad):
                of_layer |= {
                    f"{prefix}{stack}.{expert}.gate_proj.weight": gate,
                    f"{prefix}{stack}.{expert}.up_proj.weight": up,
                }
        elif kind == "down_proj" and parameter.dim() == 3:
            of_layer |= {f"{prefix}{stack}.{expert}.down_proj.weight": g for expert, g in enumerate(parameter.grad)}
        else:
            of_layer[prefix + name] = parameter.grad
    return float(loss), of_layer


@pytest.mark.parametrize("family", [pytest.param(each, marks=marks_of(each, ["GLM-4.5"])) for each in WITH_MTP])
def test_gradients_equal_a_plain_loop_and_leave_the_policy_alone(tmp_path, family) -> None:
    """One process, packed rows: the layer's gradients are those of a loop over transformers' layers; the policy's are,
    bit for bit, those without it. Would not catch errors of splitting: layouts do.
    """
    path = WITH_MTP[family](tmp_path / "model")
    results = run_ranks(1, gradients, run_config(path, 1, 1, **TRAINED))
    ours, metrics = whole_weights(results, "actor", path), results[0]["metrics"]
    loss, expected = plain_gradients(path, tmp_path / "longer")
    assert metrics["actor/mtp_loss"] == pytest.approx(loss, rel=1e-5)
    own = {name: tensor for name, tensor in ours.items() if name in expected}
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative(own[name], tensor) < 1e-4 if tensor.any() else not own[name].any(), name
    [alone] = run_ranks(1, gradients, run_config(path, 1, 1))
    for name, tensor in alone["actor_weights"].items():
        assert torch.equal(results[0]["actor_weights"][name], tensor), name


PADDED = {"actor_rollout_ref__model__use_remove_padding": False}
ACTOR = "actor_rollout_ref__actor"
BY_TOKENS = {f"{ACTOR}__use_dynamic_bsz": True, f"{ACTOR}__ppo_max_token_len_per_gpu": 14}
LAYOUTS = {
    "TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1, {}),
    "PP2, VPP2": ((2, 1, 2), {"virtual_pipeline_model_parallel_size": 2}, {}),
    "DP2, EP2, padded": ((2, 1, 1), EP2, PADDED),
    "TP2, SP": ((2, 2, 1), SP, {}),
    "CP2, padded": ((2, 1, 1), CP2, PADDED),
    "up to CP2, PP2": ((4, 1, 2), CP2 | {"dynamic_context_parallel": True}, BY_TOKENS),
    "CP2, PP2, gathered": ((4, 1, 2), CP2 | {"override_transformer_config__cp_comm_type": "all_gather"}, {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout"), [*(("GLM-4.5", each) for each in LAYOUTS), ("MiMo", "TP2, SP"), ("MiMo", "PP2, VPP2")]
)
def test_layouts_equal_one_process(tmp_path, family, layout) -> None:
    """Scores, gradient norms and an update, the layer's weights among them. Would not catch an error in one process."""
    path = WITH_MTP[family](tmp_path)
    ranks, sizes, keys = LAYOUTS[layout]
    reference = run_layout(path, 1, 1, 1, keys=TRAINED)
    assert_same(run_layout(path, *ranks, keys=TRAINED | keys, **sizes), reference, path)


def updated(config, folder: Path, steps: int, saved: Path | None = None) -> dict:
    """Updates, or what a checkpoint holds; greedy answers through the engine, an export, and a checkpoint of it."""
    from megatron_rl.records import RoleState
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, losses = worker.roles["actor"], []
    if saved is not None:
        worker.load_checkpoint(saved, {"actor": RoleState(**json.loads((saved / "states.json").read_text()))})
    rows = torch.arange(NUM_ROWS).tensor_split(worker.groups.grid.dp_size)[worker.groups.dp_rank]
    mine = random_batch(NUM_ROWS)[rows]
    mine.add(old_log_probs=mine["advantages"].clone())
    for _ in range(steps):
        losses.append(actor.update(mine.read_by(ACTOR_UPDATE)).get("actor/mtp_loss"))
    greedy, _ = round_trip(worker, GREEDY)
    actor.export_hf(folder / "exported")
    (folder / "saved" / "actor").mkdir(parents=True, exist_ok=True)
    states = worker.begin_save(folder / "saved")
    worker.finish_save(wait=True)
    (folder / "saved" / "states.json").write_text(json.dumps(asdict(states["actor"])))
    return {"greedy": tokens(greedy), "losses": losses}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


WHERE = {"one process": (1, 1, 1, {}), "TP2, PP2": (4, 2, 2, SP | EP2 | ETP1)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", WHERE)
def test_a_layer_that_learns_goes_everywhere(tmp_path, where) -> None:
    """Its loss falls; exports of ranks, and of a checkpoint without ranks, have the trained layer; a resumed one goes
    on from it, in one process; greedy answers are transformers' on the export. Would not catch a stale layer in
    generation: `test_mtp_drafts.py` counts what it guesses.
    """
    path = save_glm4_with_mtp(tmp_path / "model")
    ranks, tp_size, pp_size, sizes = WHERE[where]
    keys = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in sizes.items()}
    rate = {"actor_rollout_ref__actor__optim__lr": 0.003}
    first = run_ranks(ranks, updated, run_config(path, tp_size, pp_size, **TRAINED, **keys, **rate), tmp_path / "a", 6)
    losses = [loss for rank in first for loss in rank["losses"] if loss is not None]
    assert losses[-1] < 0.9 * losses[0]
    exported, began = stored(tmp_path / "a" / "exported"), stored(Path(path))
    assert exported.keys() == began.keys()
    prefix = "model.layers.4."
    moved = {name for name in began if name.startswith(prefix) and not torch.equal(exported[name], began[name])}
    still = {name for name in began if name.startswith(prefix)} - moved
    assert {name for name in still if not name.endswith("e_score_correction_bias")} == set()
    copy_model_files({"actor": path}, tmp_path / "a" / "saved")
    export_saved(tmp_path / "a" / "saved", "actor", tmp_path / "b")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in stored(tmp_path / "b").items())
    assert first[0]["greedy"] == hugging_face_greedy(str(tmp_path / "a" / "exported"))
    [resumed] = run_ranks(
        1, updated, run_config(path, 1, 1, **TRAINED, **rate), tmp_path / "c", 0, tmp_path / "a/saved"
    )
    again = stored(tmp_path / "c" / "exported")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in again.items())
    assert resumed["greedy"] == first[0]["greedy"]


@pytest.mark.exhaustive
def test_a_frozen_layer_comes_out_as_it_was(tmp_path) -> None:
    """On two stages, with drafts: updates move the policy, and an export has the folder's own layer, in its types."""
    path = save_glm4_with_mtp(tmp_path / "model")
    file = Path(path, "model.safetensors")
    kept = {name: t.bfloat16() if name.startswith("model.layers.4.") else t for name, t in load_file(file).items()}
    save_file(kept, file, metadata={"format": "pt"})
    config = run_config(path, 1, 2, **MTP, actor_rollout_ref__actor__optim__lr=0.003)
    ranks = run_ranks(2, updated, config, tmp_path / "a", 2)
    exported = stored(tmp_path / "a" / "exported")
    assert exported.keys() == kept.keys()
    for name, tensor in kept.items():
        same = exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor)
        assert same == (name.startswith("model.layers.4.") or name.endswith("e_score_correction_bias")), name
    assert ranks[0]["greedy"] == hugging_face_greedy(str(tmp_path / "a" / "exported"))
