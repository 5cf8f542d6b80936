"""The threads of compiled functions, which are those of torch; needs numba."""

import threading

import numba
import torch
from numba.core.config import NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]

_of_this_thread = threading.local()


def use_torch_threads() -> None:
    """Compiled functions that this thread calls take as many threads as torch does.

    Both are the process's OpenMP threads, of which numba, as it starts, gives torch all.
    """
    num_threads = torch.get_num_threads()
    if getattr(_of_this_thread, "num_threads", 0) == num_threads:
        return
    numba.set_num_threads(min(num_threads, NUMBA_NUM_THREADS))
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    _of_this_thread.num_threads = num_threads
