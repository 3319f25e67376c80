"""Part 2, ten minutes: memory that leaves and comes back, under a captured graph too, 50 rounds.

python scripts/gpu_day/part2_cumem.py [--device cpu --small | --rehearse] [--out outputs/gpu_day]
"""

import sys

from day import of_gpu_check, part

LIMIT_S = 200

if __name__ == "__main__":
    sys.exit(part("part2_cumem", of_gpu_check("mapped_graphs", "rounds", "streams"), LIMIT_S, __doc__, uses_cumem=True))
