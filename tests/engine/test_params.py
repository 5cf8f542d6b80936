"""What a request may ask for: nothing of the wrong type or out of range gets as far as the engine."""

import math
import re
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from eagle_rt.engine.engine import nth_params
from eagle_rt.engine.params import Grammar, SamplingParams, SpeculativeParams, sampling_params


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1, "temperature is -1: Input should be greater than or equal to 0"),
        ("temperature", "1", "temperature is '1': Input should be a valid number"),
        ("temperature", True, "valid number"),
        ("temperature", None, "valid number"),
        ("temperature", math.nan, "finite number"),
        ("temperature", 101, "less than or equal to 100"),
        ("top_k", 3.5, "top_k is 3.5: Input should be a valid integer"),
        ("top_k", -2, "greater than or equal to -1"),
        ("top_p", 0, "greater than 0"),
        ("seed", 1.5, "valid integer"),
        ("seed", 2**63, "less than 9223372036854775808"),
        ("n", 129, "less than or equal to 128"),
        ("max_new_tokens", -1, "greater than or equal to 0"),
        ("prompt_logprobs", 21, "less than or equal to 20"),
        ("max_new_tokens", 2.5, "valid integer"),
        ("stop", ["a", ""], "stop.1 is '': String should have at least 1 character"),
        ("stop", 7, "stop is 7"),
        ("stop", ["a"] * 17, "at most 16 items"),
        ("stop_token_ids", ["a"], "stop_token_ids.0 is 'a'"),
        ("stop_token_ids", [2**40], "less than 2147483648"),
        ("ignore_eos", "no", "valid boolean"),
        ("speculative", 5, "speculative is 5"),
        ("speculative", {"depth": 2}, "speculative.depth is not a parameter; known are enabled, num_steps, eagle_topk"),
        ("speculative", {"num_steps": 0}, "speculative.num_steps is 0: Input should be greater than or equal to 1"),
        ("speculative", {"num_draft_tokens": 1}, "greater than or equal to 2"),
        ("speculative", {"enabled": 1}, "speculative.enabled is 1: Input should be a valid boolean"),
        ("speculative", {"trace": "yes"}, "speculative.trace is 'yes': Input should be a valid boolean"),
        ("logit_bias", {"x": 1}, "logit_bias is"),
        ("logit_bias", {"5": "a"}, "valid number"),
        ("logit_bias", {"5": 200}, "less than or equal to 100"),
        ("logit_bias", [1], "logit_bias.0 is 1"),
        ("json_schema", 5, "json_schema is 5: Input should be a valid string"),
        ("regex", ["a"], "regex is ['a']"),
        ("regex", "a" * 2**17, "String should have at most 65536 characters"),
        ("temprature", 1, "temprature is not a parameter; known are temperature, top_p"),
    ],
)
def test_what_cannot_be_served_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        sampling_params({name: value}, {})
    assert str(refusal.value).startswith(name)
    with pytest.raises(ValidationError, match=name):
        SamplingParams(**{name: value})


def test_values_become_what_they_are_held_as() -> None:
    given = {"temperature": 1, "stop": "x", "stop_token_ids": [3], "logit_bias": {"5": 1}, "speculative": {"num_steps": 2}}
    params = sampling_params(given, {"top_p": 0.5, "temperature": 0.7})
    assert params == SamplingParams(
        temperature=1.0,
        top_p=0.5,
        stop=("x",),
        stop_token_ids=(3,),
        logit_bias=((5, 1.0),),
        speculative=SpeculativeParams(num_steps=2),
    )
    assert isinstance(params.temperature, float)
    assert sampling_params({"stop": None, "logit_bias": None, "stop_token_ids": None}, {}) == SamplingParams()
    assert sampling_params(params, {"temperature": 0.1}) is params
    assert SamplingParams(**orjson.loads(orjson.dumps(params))) == params


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(ValueError, match=r"^json_schema and regex are given, but"):
        sampling_params({"json_schema": {}, "regex": "a"}, {})
    with pytest.raises(ValueError, match=r"^ignore_eos is true, but a reply that matches a regex ends with it"):
        sampling_params({"regex": "", "ignore_eos": True}, {})
    with pytest.raises(ValueError, match=r"^regex is 'a{190,200}: String"):
        sampling_params({"regex": "a" * 2**17}, {})


def test_grammars() -> None:
    assert SamplingParams().grammar is None
    assert SamplingParams(regex="").grammar == Grammar("regex", "")
    for schema, text in (({"type": "object"}, '{"type": "object"}'), (True, "true"), ("{}", "{}")):
        params = sampling_params({"json_schema": schema}, {})
        assert params.grammar == Grammar("json_schema", text)
        assert SamplingParams(**orjson.loads(orjson.dumps(params))) == params


def test_replies_to_one_prompt_have_seeds_of_their_own() -> None:
    params = SamplingParams(seed=2**63 - 2, n=3)
    assert [nth_params(params, index).seed for index in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert nth_params(SamplingParams(n=2), 1).seed is None


@pytest.mark.parametrize(
    "given",
    [{"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"repetition_penalty": 1.1}, {"logit_bias": {"3": 1}}],
    ids=str,
)
def test_each_penalty_is_one(given: dict[str, Any]) -> None:
    assert sampling_params(given, {}).has_penalties
    assert not sampling_params({}, {}).has_penalties
