"""What goes wrong in a way that nobody has foreseen."""

from fastapi import FastAPI
from fastapi.testclient import TestClient

from eagle_rt.server.errors import add_error_handlers


def test_an_error_that_nobody_has_foreseen_is_answered_in_openais_format() -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    async def fail() -> None:
        raise KeyError("a secret")

    response = TestClient(app, raise_server_exceptions=False).get("/")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed at this request (KeyError); its log says where"
    assert response.json()["error"]["type"] == "server_error"
