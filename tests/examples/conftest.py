"""The demo's scripts import each other by name, as they do when run from the command line."""

import sys
from pathlib import Path

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
sys.path.insert(0, str(SHAPES))
