import pytest

from eagle_rt.engine.messages import Abort, Command, Failed, Rejected, Report, Shutdown, Started, Submit, decode, encode
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import RequestStats, TokenEvent
from eagle_rt.logprobs import TokenLogprob
from eagle_rt.trace import StepTrace

MESSAGES = [
    Submit("a", [1, 2], SamplingParams(temperature=0.5, stop=("x",), stop_token_ids=(3,), seed=2**62, logit_bias=((5, -1.5),))),
    Submit("a", [1, 2], SamplingParams(json_schema='{"type": "object"}')),
    Abort("a"),
    Shutdown(),
    Started(["note"], 100),
    Failed("why", True),
    Rejected("a", "why"),
    TokenEvent("a", [1], RequestStats(accepted_histogram=[1, 2]), {"type": "stop", "matched": 3}),
    TokenEvent("a", [1], RequestStats(), logprobs=[TokenLogprob(-0.5, [(1, -0.5), (7, -2.0)])]),
    TokenEvent("a", [7, 8], RequestStats(), trace=StepTrace(4, [1, 7], [-1, 0], [0.0, -0.5], [1.0, 0.6], [0, 1], [7, 8])),
    EngineMetrics(num_steps=3, seconds={"draft": 0.5}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: Command | Report) -> None:
    assert decode(encode(message)) == message
