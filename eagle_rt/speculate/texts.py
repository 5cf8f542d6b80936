"""What running requests have said, kept on the device, for steps that the host does not look into."""

import torch
from torch import Tensor

from eagle_rt.batch import to_device
from eagle_rt.kernels.dispatch import triton_kernel


class TextTable:
    """tokens: [num_states, T] int32, each text in its request's state row. Past a text's end stands anything."""

    def __init__(self, num_states: int, most_tokens: int, device: str) -> None:
        self.tokens = torch.zeros(num_states, most_tokens, dtype=torch.int32, device=device)

    def begin(self, state_row: int, text: list[int]) -> None:
        """A prompt, or a text that is read again."""
        self.tokens[state_row, : len(text)] = to_device(text, str(self.tokens.device), torch.int32)

    def note(self, state_rows: Tensor, places: Tensor, roots: Tensor, tokens: Tensor) -> None:
        """The last certain tokens [B] of texts in state_rows [B] stand at `places` [B], and tokens [B, D + 1] follow, of which
        those that a step does not gain are written over by the next one."""
        if kernel := triton_kernel("note_tokens", self.tokens):
            kernel(self.tokens, state_rows, places, roots, tokens)
            return
        own = torch.cat((roots[:, None], tokens), dim=1)
        columns = places[:, None] + torch.arange(own.shape[1], device=own.device)
        self.tokens[state_rows[:, None], columns] = own.int()
