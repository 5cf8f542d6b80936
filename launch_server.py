"""Serve a model over HTTP: `python launch_server.py --speculative-algorithm EAGLE3`. `--help` lists everything."""

import argparse
import sys

from eagle_rt.config import REASONING_PARSERS, add_flags, config_from_args
from eagle_rt.leave import leave
from eagle_rt.server.launch import serve


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    server.add_argument("--port", type=int, default=30000, help="0 takes any free one")
    server.add_argument("--api-key", help="ask clients for this key")
    server.add_argument("--served-model-name", help="name of the model in the API; default: the model path")
    server.add_argument(
        "--reasoning-parser",
        default="auto",
        choices=REASONING_PARSERS,
        help="tell what a model thinks, between <think> and </think>, from its answer; auto: where its chat template knows these",
    )
    server.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="how much to say")
    add_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        config = config_from_args(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return serve(config, args)


if __name__ == "__main__":
    leave(main())
