"""A process that holds one shard of a target and does with it what the first process says; `lead` starts it with the number of a
socket."""

import logging
import pickle
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection

import torch

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.select import attention_backend
from eagle_rt.cache.pool import KVPool
from eagle_rt.leave import leave
from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.parallel.group import Command, DropPool, Group, MakePool, Move, OutputLayer, Pass, Unpickler

logger = logging.getLogger(__name__)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    status = 1
    try:
        follow(pipe)
        status = 0
    except (EOFError, ConnectionError):  # the first process has gone before this one was ready
        pass
    except Exception:
        logger.exception("a process of the model's ends")
    leave(status)


@torch.inference_mode()
def follow(pipe: Connection) -> None:
    """Until the first process closes the pipe."""
    shard, file, device, target = pickle.loads(pipe.recv_bytes())
    if device == "cuda":
        torch.cuda.set_device(shard.rank)
    group = Group(shard, device)
    pipe.send_bytes(pickle.dumps(None))
    group.join(file)
    try:
        decoder = load_decoder(**target, make=partial(Decoder, shard=shard, total=group.total))
    except (ValueError, FileNotFoundError) as error:
        pipe.send_bytes(pickle.dumps(str(error)))
        return
    pipe.send_bytes(pickle.dumps(None))
    follower = Follower(group, decoder)
    while True:
        try:
            descriptions, data = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        follower.do(Unpickler(data, group.shared(descriptions)).load())


class Follower:
    """One shard and its part of every cache."""

    def __init__(self, group: Group, decoder: Decoder) -> None:
        self._group, self._decoder = group, decoder
        self._pools: dict[int, KVPool] = {}
        self._attentions: dict[str, AttentionBackend] = {}

    def do(self, command: Command) -> None:
        if isinstance(command, MakePool):
            self._pools[command.number] = self._decoder.make_pool(command.num_slots, num_texts=0)
        elif isinstance(command, DropPool):
            del self._pools[command.number]
        elif isinstance(command, Move):
            self._pools[command.pool].move(command.sources, command.destinations)
        elif isinstance(command, Pass):
            self._decoder.forward(command.batch, self._pools[command.pool], self._attention(command.attention))
        elif isinstance(command, OutputLayer):
            self._group.gathered(self._decoder.lm_head(command.hidden))
        else:
            self._group.gathered(self._decoder.lm_head.weight)

    def _attention(self, name: str) -> AttentionBackend:
        if name not in self._attentions:
            dtype, rows = self._decoder.embedding.dtype, set(self._decoder.rows)
            self._attentions[name] = attention_backend(name, self._group.device, dtype, rows)
        return self._attentions[name]


if __name__ == "__main__":
    main()
