"""Puts the tests' own modules (tiny models, cases) on the path of this folder's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
