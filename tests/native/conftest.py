"""For this folder: its own modules (tiny models, cases) on the path, and one thread for the oracles."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _oracles_on_one_thread() -> None:
    """The oracles multiply tiny matrices: waking a second thread for each costs more than the product."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
