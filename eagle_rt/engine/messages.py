"""What an engine loop is told and what it tells: plain values, so that they cross threads and processes alike."""

from dataclasses import dataclass

import orjson

from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import RequestStats, TokenEvent
from eagle_rt.logprobs import TokenLogprob
from eagle_rt.speculate.acceptance import Calibration
from eagle_rt.trace import StepTrace


@dataclass(frozen=True)
class Submit:
    request_id: str
    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class Abort:
    """is_complete: nobody gave the request up, its text has come to a stop string."""

    request_id: str
    is_complete: bool = False


@dataclass(frozen=True)
class Shutdown:
    """Finish nothing more: the loop ends after the step that it is in."""


@dataclass(frozen=True)
class Started:
    """The engine is ready; `notes` say what was decided for the user, `context_length` is the one served."""

    notes: list[str]
    context_length: int


@dataclass(frozen=True)
class Failed:
    """The engine cannot start or cannot go on; `is_user_error`: the reason is enough, without a stack trace."""

    reason: str
    is_user_error: bool


@dataclass(frozen=True)
class Rejected:
    """A request that cannot be served, and why."""

    request_id: str
    reason: str


Command = Submit | Abort | Shutdown
Report = Started | Failed | Rejected | TokenEvent | EngineMetrics
KINDS = {kind.__name__: kind for kind in (Submit, Abort, Shutdown, Started, Failed, Rejected, TokenEvent, EngineMetrics)}


def encode(message: Command | Report) -> bytes:
    return orjson.dumps([type(message).__name__, message])


def decode(data: bytes) -> Command | Report:
    name, fields = orjson.loads(data)
    if name == "Submit":
        fields["sampling"] = SamplingParams(**fields["sampling"])
    if name == "EngineMetrics" and fields["calibration"]:
        fields["calibration"] = Calibration(**fields["calibration"])
    if name == "TokenEvent":
        fields["stats"] = RequestStats(**fields["stats"])
        for kind in ("logprobs", "prompt_logprobs"):
            if fields[kind]:
                fields[kind] = [TokenLogprob(own["value"], [(*best,) for best in own["top"]]) for own in fields[kind]]
        if fields["trace"]:
            fields["trace"] = StepTrace(**fields["trace"])
    return KINDS[name](**fields)
