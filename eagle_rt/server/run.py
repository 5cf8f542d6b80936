"""The server while it runs."""

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
from collections.abc import Iterator

import uvicorn

from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import model_info
from eagle_rt.server.app import create_app
from eagle_rt.server.launch import STOP_SIGNALS
from eagle_rt.server.process import EngineDiedError, EngineProcess
from eagle_rt.server.service import EngineService

DRAIN_SECONDS = 60


class DrainingServer(uvicorn.Server):
    """Finishes the requests in flight when it is told to stop, and leaves the signals that say so to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(process: EngineProcess, config: EngineConfig, options: argparse.Namespace, listener: socket.socket) -> None:
    """Serve what the engine's process does, as soon as it does, until told to stop.

    Raises:
        FileNotFoundError, ValueError: the model cannot be read. EngineDiedError: the engine cannot start, or has died.
    """
    info = model_info(config)
    service = EngineService(process, config, info)
    await service.start()
    try:
        model_name = options.served_model_name or info.name
        app = create_app(service, model_name, options.api_key, options.reasoning_parser)
        server = DrainingServer(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=DRAIN_SECONDS))
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
        for note in service.notes:
            print(note)
        has_chats = info.tokenizer.chat_template is not None
        port, has_key = listener.getsockname()[1], options.api_key is not None
        print(how_to_talk(options.host, port, model_name, has_chats=has_chats, has_key=has_key), flush=True)
        watching = asyncio.create_task(stop_when_dead(service, server))
        await server.serve(sockets=[listener])
        watching.cancel()
        if service.death is not None:
            raise EngineDiedError(f"the engine has died: {service.death}")
    finally:
        await service.stop()


async def stop_when_dead(service: EngineService, server: uvicorn.Server) -> None:
    await service.has_died.wait()
    await asyncio.sleep(1)  # requests in flight are answered with 503 first
    server.should_exit = True


def how_to_talk(host: str, port: int, model_name: str, *, has_chats: bool, has_key: bool) -> str:
    """has_chats: whether the model has a chat template; has_key: whether clients are asked for a key."""
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    question = "Tom has 3 apples and buys 4 more. How many?"
    if has_chats:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": question}]}
    else:
        route, asked = "completions", {"prompt": question}
    key = " -H 'Authorization: Bearer API_KEY'" if has_key else ""
    body = shlex.quote(json.dumps({"model": model_name, **asked}))
    return (
        f"serving {model_name} at {url} (Ctrl-C stops it). Talk to it with any OpenAI client (base_url {url}/v1), or:\n"
        f"  curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d {body}"
    )
