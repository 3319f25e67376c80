"""The options of tests/conftest.py, by a folder of tests that has it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
NAMES = ("test_a", "test_b", "test_c", "test_d")


@pytest.fixture
def sweep(tmp_path):
    """Two tests in each of four files, that all pass; what pytest prints of them."""
    shutil.copy(CONFTEST, tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("def test_2(): pass\ndef test_1(): pass\n")

    def sweep(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "--rootdir", ".", *options]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    return sweep


def order(printed: str) -> list[str]:
    return [line.split(" ")[0] for line in printed.splitlines() if "PASSED" in line]


def test_tests_that_would_begin_too_late_are_left_out_and_counted(sweep):
    """With no time at all, and with enough. Would not catch a clock that starts late, as in a worker of its own."""
    printed = sweep("--begin-within", "0")
    assert "8 skipped" in printed and "would begin later than 0 minutes after the first" in printed
    assert "8 passed" in sweep("--begin-within", "5")


def test_files_change_their_order_and_their_tests_do_not(sweep):
    """Of several texts, each twice the same. Would not catch an order that some file is last in for most texts."""
    plain = [f"{name}.py::test_{number}" for name in NAMES for number in (2, 1)]
    assert order(sweep()) == plain
    found = {text: order(sweep("--file-order", text)) for text in ("a", "b")}
    assert found["a"] != found["b"] and order(sweep("--file-order", "a")) == found["a"]
    for tests in found.values():
        assert sorted(tests) == sorted(plain)
        assert all(tests[i].replace("test_2", "test_1") == tests[i + 1] for i in range(0, len(tests), 2))
