import pytest

from eagle_rt.engine import graphs


@pytest.fixture(autouse=True)
def _time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take a thousand times as long in the interpreter."""
    monkeypatch.setattr(graphs, "NUM_TIMED", 1)
