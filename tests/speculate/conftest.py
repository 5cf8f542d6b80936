from typing import Any

import pytest


@pytest.fixture(params=["compiled", "as written"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that a file of tests names as MODULE, where its functions NAMES call each other as they are called."""
    module = request.module.MODULE
    if request.param == "as written":
        for name in request.module.NAMES:
            function = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(function, "py_func", function))
    return module
