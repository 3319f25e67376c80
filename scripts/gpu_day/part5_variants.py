"""Part 5, ten minutes: the same sft with fused weight gradients, recompute, and Adam on the host: tokens a second.

python scripts/gpu_day/part5_variants.py [--device cpu --small | --rehearse] [--out outputs/gpu_day]
"""

import sys

from day import STEPS, part

LIMIT_S = 600

if __name__ == "__main__":
    sys.exit(part("part5_variants", {"sft_variants": STEPS / "sft_variants.py"}, LIMIT_S, __doc__))
