"""Metrics for packages that the user installs: a stand-in takes their calls, as the packages are not here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.single_values import constraint_problems
from megatron_rl.config.trainer import LOGGERS
from megatron_rl.observe.services import TRACKERS, Services, absent_services, is_installed

REPOSITORY = Path(__file__).parents[2]


class Run:
    def __init__(self, calls: list) -> None:
        self.calls = calls

    def log(self, metrics, step) -> None:
        if step == 9:
            raise ConnectionError("no network")
        self.calls.append(("log", step, metrics))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def calls(monkeypatch) -> list:
    """A module of wandb's name that writes down what it is told."""
    told: list = []

    def init(**keywords) -> Run:
        told.append(("init", keywords["project"], keywords["name"], keywords["config"]))
        return Run(told)

    def table(columns, data):
        return (columns, data)

    module = SimpleNamespace(init=init, Table=table, __spec__=SimpleNamespace(name="wandb"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


def test_a_run_and_its_metrics_reach_the_service(calls, tmp_path):
    """Under verl's names, with a table of answers. Would not catch a package that has changed its functions."""
    services = Services.start(["console", "wandb"], "project", "name", {"a": 1}, tmp_path)
    assert services.log({"critic/score/mean": 0.5}, 3) == []
    assert services.log_samples([{"input": "1+1=", "score": 1.0}, {"input": "2", "output": "x"}], 3) == []
    assert services.close() == []
    columns, data = calls[2][2]["val/generations"]
    assert calls[:2] == [("init", "project", "name", {"a": 1}), ("log", 3, {"critic/score/mean": 0.5})]
    assert columns == ["input", "score", "output"] and data == [["1+1=", 1.0, None], ["2", None, "x"]]
    assert calls[-1] == ("finish",)


def test_a_service_that_fails_is_dropped_and_said_once(calls, tmp_path):
    """Training goes on. Would not catch one that hangs."""
    services = Services.start(["wandb"], "project", "name", {}, tmp_path)
    assert services.log({}, 9) == ["wandb gets no more of this run: ConnectionError: no network"]
    assert services.log({"x": 1.0}, 10) == [] and services.close() == []
    assert [call[0] for call in calls] == ["init"]


def test_absent_packages_are_named():
    """Would not catch one that is installed and broken."""
    assert absent_services(["console", "jsonl"]) == []
    assert set(absent_services(["console", "mlflow"])) <= {"mlflow"}
    assert not is_installed("no_such_package.part") and is_installed("json.decoder")


def test_the_schema_has_every_service_and_refuses_other_names_with_the_nearest():
    """`tensorbord` is `tensorboard`. Would not catch a service that has a name and no class."""
    config = load_config(REPOSITORY / "configs/demo_cpu.yaml")
    config.trainer.logger = ["jsonl", "tensorbord"]
    (violation,) = constraint_problems(config)
    assert violation.nearest == {"trainer.logger": ["jsonl", "tensorboard"]}
    config.trainer.logger = ["console", "jsonl", "tensorboard", *TRACKERS]
    assert tuple(config.trainer.logger) == LOGGERS
    assert not list(constraint_problems(config))
