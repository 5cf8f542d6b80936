from pathlib import Path

import pytest
from guessable import write_guessable

from eagle_rt.engine import graphs


@pytest.fixture(autouse=True)
def _time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take a thousand times as long in the interpreter."""
    monkeypatch.setattr(graphs, "NUM_TIMED", 1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of which the last token tells most of what comes next: for classes that draft without a head."""
    return write_guessable(tmp_path_factory.mktemp("target"), "llama", loudness=0.05)
