"""What a checkpoint says about its own replies."""

import pytest

from eagle_rt.models.tokenizer import sampling_defaults


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": None, "top_k": 20, "bos_token_id": 1}, {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": True, "repetition_penalty": 1.05, "min_p": 0.1}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ],
    ids=str,
)
def test_settings_that_requests_leave_open(generation: dict, expected: dict) -> None:
    assert sampling_defaults(generation) == expected
