"""What both sides of the comparison compute. Needs nothing but Python."""

from __future__ import annotations

# Bands of the banded square root, and strategies of one's own.
BANDS = (2, 4, 8, 16, 32, 64, 256)
OWN = ((4.0, 3.0), (3.0, 2.0, 2.0, 0.5), (1.0,) * 5)
STEPS = (100, 1_000, 4_680)
# At least so many steps apart, at most so often; `None` is as often as fits.
PARTICIPATIONS = ((1, 1), (1, 20), (1, None), (5, 20), (5, None), (40, None), (234, None))

# Steps of a tree, steps, and steps from one participation to the next: where the bound is exact.
TREES = ((64, 256, 64), (100, 500, 100), (16, 256, 64), (256, 256, 64), (256, 256, 1), (1, 50, 5))
# Steps of a tree and steps, for one participation.
TREES_ONCE = ((7, 12), (100, 350), (234, 1_170), (1_000, 1_000))

DELTA = 1e-5
# Noise multiplier, steps, bands, and the probability q in the step of an example's own group.
AMPLIFIED = (
    (0.7, 1_000, 2, 0.02),
    (1.0, 4_680, 8, 0.07),
    (2.0, 6_000, 16, 0.05),
    (1.6, 1_250, 32, 0.128),
    (5.0, 101, 4, 1.0),
)
# Noise multiplier, bands, steps, and steps of a pass: batches in a fixed order, not sampled.
NOT_AMPLIFIED = ((4.0, 64, 500, 100), (8.0, 16, 1_170, 234), (3.0, 8, 60, 5))
