"""Runs over several Ray nodes, which are raylets on this machine: the same training as on one node."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from command_line import REPOSITORY
from listeners import listening, open_to_others
from raylets import Raylets
from short_runs import CLOCKED, MEGATRON, WITHOUT_RAY, reached

from megatron_rl.config.load import load_config
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import TransitionPlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

DEMO = REPOSITORY / "assets/demo"
OF_A_SHELL = {"NCCL_DEBUG": "WARN"}
"""What only the shell that starts the run has, not the nodes'."""
WILDCARDS, CLIENT_PORT = ("::", "0.0.0.0"), 10001
SHORT = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=5040",
    "trainer.export_hf=false",
)


@dataclass(frozen=True)
class Nodes:
    """So many nodes with so many ranks each, and a layout on them.

    num_experts: of a tiny mixture of experts; 0: the demo's model. crosses: whether weights cross from node to node for
    generation. A node has two ranks or more: one alone would get more threads here, and add up in another order.
    """

    name: str
    num_nodes: int
    per_node: int
    tp: int
    pp: int
    rollout_tp: int
    options: tuple[str, ...] = ()
    num_experts: int = 0
    crosses: bool = True

    def overrides(self, folder: Path) -> list[str]:
        """The layout, short validation and the model; the same on one node and on several."""
        rows = pyarrow.parquet.read_table(DEMO / "test.parquet").slice(0, 8)
        pyarrow.parquet.write_table(rows, folder / "test.parquet")
        found = [
            *SHORT,
            f"data.val_files={folder / 'test.parquet'}",
            f"{MEGATRON}.tensor_model_parallel_size={self.tp}",
            f"{MEGATRON}.pipeline_model_parallel_size={self.pp}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={self.rollout_tp}",
            *self.options,
        ]
        if not self.num_experts:
            return found
        model = tiny_moe(folder / "model", num_experts=self.num_experts)
        return [*found, f"actor_rollout_ref.model.path={model}"]

    @property
    def one_node(self) -> list[str]:
        return ["trainer.nnodes=1", f"trainer.n_gpus_per_node={self.num_nodes * self.per_node}"]

    @property
    def nodes(self) -> list[str]:
        return [f"trainer.nnodes={self.num_nodes}", f"trainer.n_gpus_per_node={self.per_node}"]


def tiny_moe(folder: Path, **sizes: int) -> Path:
    """A Qwen3-MoE with the demo's tokenizer."""
    from tiny_models import save_qwen3_moe

    demo = json.loads((DEMO / "model/config.json").read_text())
    tokens = {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    save_qwen3_moe(folder, **tokens, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / "model" / name, folder / name)
    return folder


DEMOS_OWN = Nodes("TP2xPP2-to-TP2-on-2x2", 2, 2, 2, 2, 2, ("trainer.export_hf=true",))
EXPERTS = (f"{MEGATRON}.expert_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=true")
SHARED = ("actor_rollout_ref.rollout.expert_parallel_size=4", "actor_rollout_ref.rollout.data_parallel_size=4")
OTHERS = [
    # Generation's groups span the nodes; the shards that it merges lie on one.
    Nodes("TP4-to-TP2-on-2x2", 2, 2, 4, 1, 2, crosses=False),
    Nodes("TP2xDP2xEP2-to-TP1-on-2x2", 2, 2, 2, 1, 1, EXPERTS, num_experts=6),
    # A replica spans the nodes: tokens go to experts of the other one in every layer.
    Nodes("TP2xDP2xEP2-to-DP4xEP4-on-2x2", 2, 2, 2, 1, 1, (*EXPERTS, *SHARED), num_experts=8, crosses=False),
]


def printed(run) -> list[dict]:
    """Every metric of every step but for clocks, as printed."""
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [{name: repr(value) for name, value in line.items() if not name.startswith(CLOCKED)} for line in lines]


def assert_only_nodes_are_let_in(of_nodes: set[tuple[str, str, int]], of_driver: set[tuple[str, str, int]]) -> None:
    """What listens is what docs/scale/launching.md says, by names of processes, with "python" for the driver and for
    Ray's client server.
    """
    everywhere = {name for name, address, _ in of_nodes if address in WILDCARDS}
    assert everywhere == {"gcs_server", "raylet", "ray::NodeAgent"}
    others = {(name, port) for name, _, port in open_to_others(of_nodes) if name not in everywhere}
    assert {name.split()[0] for name, _ in others} <= {"ray::RuntimeEnvAgent", "python", "rank"}
    assert {port for name, port in others if name == "python"} <= {CLIENT_PORT}
    assert len(open_to_others(of_driver)) <= 2, "Ray's, and that for signs of life"


def run_on_nodes(layout: Nodes, overrides: list[str], command_line):
    """The run over several nodes, and its summary, by which its bytes are the planned ones."""
    with Raylets(*[layout.per_node] * layout.num_nodes) as cluster:
        spread = command_line(*overrides, *layout.nodes, variables=cluster.variables | OF_A_SHELL)
        places: list[list[int]] = []
        ranks: list[psutil.Process] = []

        def all_ranks_run() -> bool:
            found = [cluster.ranks(node) for node in range(layout.num_nodes)]
            places[:] = map(sorted, found)
            ranks[:] = [process for node in found for process in node.values()]
            return len(ranks) == layout.num_nodes * layout.per_node

        spread.wait_for(all_ranks_run)
        assert all(OF_A_SHELL.items() <= process.environ().items() for process in ranks)
        spread.wait_for(reached(spread, 1))
        members = [member for node in range(layout.num_nodes) for member in cluster.family(node)]
        assert_only_nodes_are_let_in(listening(members), listening([psutil.Process(spread.process.pid)]))
        assert spread.wait() == 0, spread.text()
        assert cluster.left_over() == {}
    assert "every rank gets NCCL_DEBUG=WARN" in spread.text()
    numbers = list(range(layout.num_nodes * layout.per_node))
    assert sorted(places) == [numbers[i : i + layout.per_node] for i in range(0, len(numbers), layout.per_node)]
    assert len(printed(spread)) == 2
    summary = json.loads((spread.run / "summary.json").read_text())
    received, came = summary["transition_bytes_received_per_rank"], summary["transition_network_bytes_per_rank"]
    assert received == summary["transition_bytes_lower_bound_per_rank"]
    assert came == summary["transition_network_bytes_lower_bound_per_rank"]
    models = RunModels(load_config("configs/demo_cpu.yaml", [*overrides, *layout.nodes]))
    planned = TransitionPlan.of(models)
    group = models.grid.exchange_group(0)
    assert [came[rank] for rank in group] == list(planned.network)
    assert any(came) == layout.crosses
    assert [received[rank] - came[rank] for rank in group] == list(planned.link)
    return spread, summary


def test_the_demo_trains_on_two_nodes(command_line, tmp_path) -> None:
    """The bytes are those that the planner tells for the network; vLLM's log-probs are the trainer's, and
    transformers' logits of what is exported, too.

    Would not catch what only a real network does: the nodes are raylets on this machine.
    """
    _, summary = run_on_nodes(DEMOS_OWN, DEMOS_OWN.overrides(tmp_path), command_line)
    assert summary["layout"] == {"world_size": 4, "tp": 2, "pp": 2, "cp": 1, "dp": 1, "rollout_tp": 2}
    assert summary["steps"] == 2
    assert 0 < summary["rollout_logprob_diff_max"] < 5e-5
    assert summary["hf_export_logit_diff_max"] < 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, id=one.name, marks=() if one.num_experts == 6 else pytest.mark.weekly) for one in OTHERS],
)
def test_nodes_train_as_one_does(layout, command_line, tmp_path) -> None:
    """All printed digits of two steps, for tensor ranks, data-parallel ranks and experts that lie on different nodes;
    the one has no Ray. Would not catch what only a real network does.
    """
    overrides = layout.overrides(tmp_path)
    spread, summary = run_on_nodes(layout, overrides, command_line)
    assert 0 < summary["rollout_logprob_diff_max"] < 5e-5
    alone = command_line(*overrides, *layout.one_node, WITHOUT_RAY)
    assert alone.wait() == 0, alone.text()
    assert printed(spread) == printed(alone)
    on_one_node = json.loads((alone.run / "summary.json").read_text())["transition_network_bytes_per_rank"]
    assert not any(on_one_node)
