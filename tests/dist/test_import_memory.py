"""Importing a model takes a rank's shard and a little more, however large the folder is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from import_memory import Growth, import_config, make_folder, measure_import
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(200)]

NUM_BYTES = 800_000_000
BOUND_BYTES = 200_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    """Removed at once: pytest keeps the folders of several runs."""
    path = tmp_path_factory.mktemp("model")
    make_folder(path, NUM_BYTES, "bfloat16")
    yield str(path)
    shutil.rmtree(path)


def grown(folder: str, tp_size: int, load_first: bool = False) -> list[Growth]:
    return run_ranks(tp_size, measure_import, import_config(folder, tp_size, 1, "bfloat16"), load_first)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_import_takes_a_shard_and_little_more(folder, tp_size) -> None:
    """Peak resident set, mapped file pages too. Would not catch what the optimizer's creation takes afterwards."""
    for growth in grown(folder, tp_size):
        assert growth.shard * tp_size == pytest.approx(NUM_BYTES, rel=0.15)
        assert growth.beyond_shard < BOUND_BYTES


def test_two_copies_would_be_noticed(folder) -> None:
    """Weights read before DDP has a place for them are there twice. Would not catch a smaller waste than the bound."""
    [growth] = grown(folder, 1, load_first=True)
    assert growth.beyond_shard > growth.shard * 0.8 > BOUND_BYTES
