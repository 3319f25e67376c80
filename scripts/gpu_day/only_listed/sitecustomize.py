"""Let a process, and those it starts, find only packages of a list: put this folder first in PYTHONPATH.

GPU_DAY_ABSENT names a JSON file with names of the packages that are installed and not listed, and their modules.
"""

import json
import os
import sys
from importlib.machinery import PathFinder

with open(os.environ["GPU_DAY_ABSENT"]) as listed:
    ABSENT = {kind: frozenset(names) for kind, names in json.load(listed).items()}


class OnlyListed(PathFinder):
    """Finds what Python finds on its path, but for what is absent: that is as if it were not installed."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """Return a module's spec; None where its package is absent, or not found."""
        if fullname.partition(".")[0] in ABSENT["modules"]:
            return None
        return PathFinder.find_spec(fullname, path, target)

    @staticmethod
    def find_distributions(*context):
        """Return the installed packages that are listed."""
        return (one for one in PathFinder.find_distributions(*context) if one.metadata["Name"] not in ABSENT["names"])


sys.meta_path[:] = [OnlyListed if finder is PathFinder else finder for finder in sys.meta_path]
