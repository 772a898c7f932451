"""The benchmarks import each other by name, as they do when run from the command line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
