"""Small real models, and the Ray session of all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / room) for room in ("adapters", "cluster", "workers", "native")]
# Data sets of these tests are files; nothing asks the network, nor waits for it.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

from ray_session import session  # noqa: E402, F401
