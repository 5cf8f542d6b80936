"""A target that several processes hold, as the first of them sees it."""

import itertools
import os
import pickle
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.decoder import Decoder, TargetOutput, load_decoder
from eagle_rt.models.linear import Linear
from eagle_rt.models.shard import Shard
from eagle_rt.parallel.group import Command, DropPool, Group, MakePool, Move, OutputLayer, OutputWeight, Pass, packed

# How long the others may take to leave when they are no longer needed.
LEAVING_SECONDS = 10.0
PACKAGE_PARENT = Path(__file__).parents[2]


class Followers:
    """The other processes of a group, which this one starts and tells what to do."""

    def __init__(self, size: int, device: str, target: dict[str, Any]) -> None:
        """target: what all of them give `load_decoder`.

        Raises:
            ValueError: the group cannot be made, or one of the others has ended.
        """
        if dist.is_initialized():
            raise ValueError("--tensor-parallel-size: this process is in a torch.distributed group already; use another process")
        self.group = Group(Shard(0, size), device)
        self._num_threads = torch.get_num_threads()
        if device == "cpu":  # which they share
            torch.set_num_threads(max(1, self._num_threads // size))
        self._directory = TemporaryDirectory(prefix="eagle_rt-")
        file = str(Path(self._directory.name, "group"))
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                self._start()
                self._pipes[-1].send_bytes(pickle.dumps((Shard(rank, size), file, device, target)))
            self.hear()  # they are there
            self.group.join(file)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        own, others = socket.socketpair()
        # -P: modules that lie beside where this was called are not to be taken for Python's own.
        command = [sys.executable, "-P", "-m", "eagle_rt.parallel.follower", str(others.fileno())]
        paths = os.pathsep.join([str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        # A session of its own: Ctrl-C is for the first process.
        self._processes.append(subprocess.Popen(command, pass_fds=[others.fileno()], env=environment, start_new_session=True))
        others.close()
        self._pipes.append(Connection(own.detach()))

    def hear(self) -> None:
        """Wait until all have done what they do now.

        Raises:
            ValueError: what kept one of them from it.
        """
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                problem = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                problem = "it has ended; what it wrote before says why"
            if problem:
                raise ValueError(f"process {rank} of --tensor-parallel-size {self.group.shard.size}: {problem}")

    def tell(self, command: Command) -> None:
        """Have all of them do it; what they sum with this process it has to do too."""
        data, tensors = packed(command)
        self._send(data)
        self.group.share(tensors)

    def _send(self, data: bytes) -> None:
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.send_bytes(data)
            except OSError:
                raise RuntimeError(f"process {rank} of the model's has ended; what it wrote before says why") from None

    def close(self) -> None:
        """They end when nobody can tell them anything more."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(LEAVING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(self._num_threads)
        self._directory.cleanup()


class SharedPool(KVPool):
    """The own part of a cache whose other parts the followers hold."""

    is_part = True

    def __init__(self, followers: Followers, number: int, own: KVPool) -> None:
        self.number, self._followers = number, followers
        self.rows, self.storages, self.layers = own.rows, own.storages, own.layers

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        self._followers.tell(Move(self.number, sources, destinations))
        super().move(sources, destinations)


class SharedOutputLayer(Linear):
    """The output layer of a target, of which everyone holds some outputs."""

    def __init__(self, followers: Followers, own: Linear) -> None:
        self._followers, self._own = followers, own
        self.bias, self.product = None, None

    @property
    def weight(self) -> Tensor:
        self._followers.tell(OutputWeight())
        return torch.cat(self._followers.group.gathered(self._own.weight))

    def __call__(self, x: Tensor) -> Tensor:
        self._followers.tell(OutputLayer(x))
        return torch.cat(self._followers.group.gathered(self._own(x)), dim=1)


class LeadingDecoder(Decoder):
    """A `Decoder` whose passes all processes make together."""

    def __init__(self, followers: Followers, *args: Any, **options: Any) -> None:
        super().__init__(*args, shard=followers.group.shard, total=followers.group.total, **options)
        self._followers, self._numbers = followers, itertools.count()
        self.lm_head = SharedOutputLayer(followers, self.lm_head)

    def make_pool(self, num_slots: int, num_texts: int) -> SharedPool:
        number = next(self._numbers)
        self._followers.tell(MakePool(number, num_slots))
        pool = SharedPool(self._followers, number, super().make_pool(num_slots, num_texts))
        weakref.finalize(pool, drop, self._followers, number).atexit = False
        return pool

    def forward(self, batch: Batch, pool: KVPool, backend: AttentionBackend, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        assert isinstance(pool, SharedPool), "or the others would have nowhere to write"
        self._followers.tell(Pass(batch, pool.number, backend.name))
        return super().forward(batch, pool, backend, feature_layers)

    def close(self) -> None:
        self._followers.close()


def drop(followers: Followers, number: int) -> None:
    with suppress(RuntimeError):  # they may have left before
        followers.tell(DropPool(number))


def load_shared_decoder(size: int, *, device: str, **target: Any) -> LeadingDecoder:
    """As `load_decoder`, by so many processes.

    Raises:
        FileNotFoundError, ValueError: as there, and if the model cannot be cut into so many parts.
    """
    Shard(0, size).check(target["spec"])
    followers = Followers(size, device, target | {"device": device})
    try:
        decoder = load_decoder(**target, device=device, make=partial(LeadingDecoder, followers))
        followers.hear()  # they have loaded theirs
    except BaseException:
        followers.close()
        raise
    assert isinstance(decoder, LeadingDecoder)
    return decoder
