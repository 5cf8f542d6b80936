"""One server for all tests of its routes."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from servers import Server


@pytest.fixture(scope="package")
def server(target_dir: Path, head_dir: Path) -> Iterator[Server]:
    tree = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    flags = ["--model-path", str(target_dir), "--served-model-name", "tiny", "--max-total-tokens", "4096", "--device", "cpu"]
    server = Server(*flags, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head_dir), *tree)
    yield server.wait_until_up()
    assert server.stop() == 0
    assert "Traceback" not in server.text()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
