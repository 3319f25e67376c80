"""Part 2, eight minutes: kernels against float64, and Adam's two forms.

python scripts/gpu_day/part2_kernels.py [--device cpu --small] [--out outputs/gpu_day]
"""

import sys

from day import of_gpu_check, part

LIMIT_S = 100

if __name__ == "__main__":
    kernels = of_gpu_check("varlen", "context_blocks", "experts", "head", "adam", "weight_gradient")
    sys.exit(part("part2_kernels", kernels, LIMIT_S, __doc__))
