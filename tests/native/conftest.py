"""For this folder: its own modules (tiny models, cases) on the path, one thread for the oracles, the device.

TINYLOOP_DEVICE=cuda runs the engine's tests on the GPU; those marked `cpu` are then left out, as those marked
`gpu` are where there is none.
"""

import os
import sys
from pathlib import Path

import pytest
from tinyloop.native import devices

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _oracles_on_one_thread() -> None:
    """The oracles multiply tiny matrices: waking a second thread for each costs more than the product."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = not devices()
    elsewhere = os.environ.get("TINYLOOP_DEVICE", "cpu") != "cpu"
    for item in items:
        if absent and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no usable GPU"))
        if elsewhere and item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="TINYLOOP_DEVICE names a GPU, and this is about the CPU"))
