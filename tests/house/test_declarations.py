"""What functions declare is there without torch, and a new function is one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config import declarations
from megatron_rl.config.keys import KEYS

REPOSITORY = Path(__file__).parents[2]
TABLES = (
    "ESTIMATORS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "REWARD_MODEL_LOSSES",
    "DISTILLATION_LOSSES",
    "KL_ESTIMATES",
    "REWARDS",
)

WITHOUT_LIBRARIES = """
import sys
for library in ("torch", "transformers", "megatron", "vllm", "ray"):
    sys.modules[library] = None  # importing it then raises ModuleNotFoundError
from megatron_rl.config import declarations
"""


def run(script: str) -> list[str]:
    """Lines that a script prints in a process in which no large library can be imported."""
    command = [sys.executable, "-c", WITHOUT_LIBRARIES + script]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


def test_every_declaration_is_read_without_torch():
    """Would not catch an import that a function makes when it is called."""
    printed = run(f"for table in {TABLES}:\n    print(len(getattr(declarations, table)))")
    assert len(printed) == len(TABLES) and min(map(int, printed)) >= 3


GROUPS = {
    "ESTIMATORS": "algorithm",
    "POLICY_LOSSES": "actor_rollout_ref.actor",
    "PREFERENCE_LOSSES": "dpo",
    "REWARD_MODEL_LOSSES": "reward_training",
    "DISTILLATION_LOSSES": "distillation.distillation_loss",
}


@pytest.mark.parametrize("table", GROUPS)
def test_declared_keys_exist(table):
    """And every function says its formula. Would not catch a key that it reads and does not declare."""
    for declared in getattr(declarations, table).values():
        assert {f"{GROUPS[table]}.{key}" for key in declared.keys} <= KEYS.keys()
        assert declared.formula


NEW = '''
"""A loss, an estimator and a reward in one file."""
from megatron_rl.config.declarations import estimator, policy_loss

@policy_loss("quarter", aggregation="token-sum", keys=("clip_ratio_low",))
def quarter_loss(tokens, config):
    """-A r / 4. Nobody, arXiv:0000.00000."""

@estimator("own_values", reads=("old_values",))
def estimate_own_values(samples, config):
    """The critic's values."""
'''


def test_a_new_loss_is_one_file(tmp_path):
    """A file in the package is enough for its rules, its roles and its row of a table. Would not catch its formula."""
    (tmp_path / "quarter.py").write_text(NEW)
    printed = run(f"""
import megatron_rl.losses
megatron_rl.losses.__path__.append({str(tmp_path)!r})
from megatron_rl.config.algorithms import policy_agg_mode, uses_critic
from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.schema import ActorConfig, PolicyLossConfig, RunConfig
from megatron_rl.planning import algorithm_rules
print("quarter" in declarations.POLICY_LOSSES, declarations.POLICY_LOSSES["quarter"].papers[0])
print(policy_agg_mode(ActorConfig(policy_loss=PolicyLossConfig("quarter"))))
print("old_values" in declarations.ESTIMATORS["own_values"].traits.reads)
""")
    assert printed == ["True", "0000.00000", "token-sum", "True"]


def test_a_name_is_declared_once(tmp_path):
    """Would not catch a name that is an alias in another table."""
    (tmp_path / "again.py").write_text(NEW.replace("quarter", "vanilla"))
    printed = run(f"""
import megatron_rl.losses
megatron_rl.losses.__path__.append({str(tmp_path)!r})
try:
    list(declarations.POLICY_LOSSES)
except ValueError as error:
    print(error)
""")
    assert " ".join(printed) == "vanilla_loss: vanilla is declared already"


def test_the_tables_of_the_document_are_current():
    """Would not catch a docstring that says something else than its function does."""
    command = [sys.executable, "scripts/algorithm_tables.py", "--check"]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
