"""What tests share: models with known gradients, statistical tests, programs that are killed."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
