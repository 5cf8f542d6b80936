"""A request and its sampling settings. No torch here."""

from dataclasses import dataclass, field
from typing import Any

from eagle_rt.cache.prefix import CachedPage
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes


@dataclass(frozen=True)
class SpeculativeParams:
    """What one request wants of speculation: none, or trees smaller than the engine's. None: the engine's own number.

    Raises:
        ValueError: a number is below 1 (2 for the draft tokens, which count the root).
    """

    enabled: bool = True
    num_steps: int | None = None
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(f"speculative.enabled is {self.enabled!r}, but must be true or false")
        for name, least in (("num_steps", 1), ("eagle_topk", 1), ("num_draft_tokens", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"speculative.{name} is {value!r}, but must be an integer of at least {least}")

    def within(self, tree: TreeShape) -> TreeShape | None:
        """The largest tree to draft where the engine's is `tree`; None for none.

        Raises:
            ValueError: more is asked for than the engine drafts, or more draft tokens than the tree can supply.
        """
        if not self.enabled or tree == NO_SPECULATION:
            return None
        limits = {"num_steps": tree.num_steps, "eagle_topk": tree.top_k, "num_draft_tokens": tree.num_draft_tokens}
        wanted = {name: getattr(self, name) or limit for name, limit in limits.items()}
        for name, limit in limits.items():
            if wanted[name] > limit:
                raise ValueError(f"speculative.{name} is {wanted[name]}, but this server drafts at most {limit}")
        supply = num_tree_nodes(wanted["num_steps"], wanted["eagle_topk"])
        if self.num_draft_tokens is not None and self.num_draft_tokens > supply:
            raise ValueError(
                f"speculative.num_draft_tokens is {self.num_draft_tokens}, but {wanted['num_steps']} steps of top-k "
                f"{wanted['eagle_topk']} supply at most {supply}, the root included"
            )
        return TreeShape(wanted["num_steps"], wanted["eagle_topk"], min(wanted["num_draft_tokens"], supply))


@dataclass(frozen=True)
class SamplingParams:
    """How a reply is chosen and when it ends.

    temperature 0 is greedy. top_k -1 (or 0), top_p 1 and min_p 0 are off. seed None: the engine draws one. max_new_tokens None:
    until the context is full. stop: strings that end the text and are not part of it. stop_token_ids: end it besides the
    model's own end tokens, which `ignore_eos` switches off. n: replies per prompt; reply i uses seed + i. speculative: none, or
    less than the engine would draft; the text is the same. frequency_penalty and presence_penalty are taken off the logits of
    tokens that the reply has said, for each time and once; repetition_penalty divides logits above 0 of tokens that prompt or
    reply have said and multiplies those below; logit_bias is added to those of (token id, bias).

    Raises:
        ValueError: a value is out of range; the message begins with the field's name.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    speculative: SpeculativeParams = SpeculativeParams()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        self._check("temperature", 0 <= self.temperature <= 100, "between 0 and 100")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "-1 (off) or at least 1")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        self._check("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 1, "at least 1")
        self._check("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 strings, none of them empty")
        self._check("n", 1 <= self.n <= 128, "between 1 and 128")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2")
        self._check("repetition_penalty", 0 < self.repetition_penalty <= 2, "above 0 and at most 2")
        biases = dict(self.logit_bias)
        self._check("logit_bias", all(-100 <= bias <= 100 for bias in biases.values()), "between -100 and 100 for every token")
        self._check("logit_bias", len(biases) == len(self.logit_bias), "of every token once")

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on what the text says, or on a bias."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1 or self.logit_bias)

    def _check(self, name: str, is_valid: bool, expectation: str) -> None:
        if not is_valid:
            raise ValueError(f"{name} is {getattr(self, name)!r}, but must be {expectation}")


def check_prompt_length(num_tokens: int, context_length: int) -> None:
    """Raises ValueError if a prompt is empty or leaves no room for a reply."""
    if num_tokens == 0:
        raise ValueError("the prompt is empty")
    if num_tokens >= context_length:
        raise ValueError(
            f"the prompt has {num_tokens} tokens, but the context length is {context_length} and a reply needs at least one of them"
        )


def sampling_params(given: "dict[str, Any] | SamplingParams | None", defaults: dict[str, Any]) -> SamplingParams:
    """Settings from a user's dictionary, over the model's own defaults.

    Raises:
        ValueError: an unknown name, or a value of the wrong type or out of range.
    """
    if isinstance(given, SamplingParams):
        return given
    given = dict(given or {})
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    for name in ("stop", "stop_token_ids"):
        given[name] = tuple(given.get(name) or ())
    given["logit_bias"] = logit_bias(given.get("logit_bias") or {})
    if isinstance(given.get("speculative"), dict):
        given["speculative"] = speculative_params(given["speculative"])
    unknown = sorted(set(given) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise ValueError(f"{unknown[0]} is not a sampling parameter; known are {known}")
    try:
        return SamplingParams(**{**defaults, **given})
    except TypeError as error:
        raise ValueError(f"a sampling parameter has the wrong type: {error}") from None


def logit_bias(given: dict[Any, Any]) -> tuple[tuple[int, float], ...]:
    """From token ids, which JSON can only write as strings, and biases.

    Raises:
        ValueError: it is something else.
    """
    try:
        return tuple((int(token), float(bias)) for token, bias in given.items())
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"logit_bias is {given!r}, but must map token ids to numbers") from None


def speculative_params(given: dict[str, Any]) -> SpeculativeParams:
    """Raises ValueError for an unknown name, or a value out of range."""
    unknown = sorted(set(given) - set(SpeculativeParams.__dataclass_fields__))
    if unknown:
        known = ", ".join(SpeculativeParams.__dataclass_fields__)
        raise ValueError(f"speculative.{unknown[0]} is not a parameter; known are {known}")
    return SpeculativeParams(**given)


@dataclass
class RequestStats:
    """What speculation did for one request; `accepted_histogram[a]` counts the steps that kept `a` drafts; is_simulated: what was
    kept is made up."""

    num_steps: int = 0
    num_drafted: int = 0
    num_broken_drafts: int = 0
    num_prompt_tokens_cached: int = 0
    num_preemptions: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    is_simulated: bool = False

    def count_step(self, num_accepted: int, num_drafted: int, is_broken: bool) -> None:
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_broken_drafts += is_broken
        self.accepted_histogram += [0] * (num_accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[num_accepted] += 1


class Request:
    """One reply in the making: the only long-lived mutable object, and only the scheduler writes it.

    The cache holds rows for the first num_cached of its tokens; of its `pages`, the first ones may belong to the prefix cache
    (`shared`). Of the rows, the draft head's cache has the first num_head_rows, of which the prefix cache has been told of the
    first num_shared_head_rows; num_matched of the target's were there when it was let in.
    `bounds` is the largest tree to draft for it. `state_row` is its place among the running requests, None while it waits.
    """

    def __init__(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, seed: int, bounds: TreeShape | None = None
    ) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.sampling = sampling
        self.seed = seed
        self.arrival = 0
        self.pages: list[int] = []
        self.shared: list[CachedPage] = []
        self.bounds = bounds
        self.num_cached = 0
        self.num_matched = 0
        self.num_head_rows = 0
        self.num_shared_head_rows = 0
        self.prefill_end = 0
        self.state_row: int | None = None
        self.finish_reason: dict[str, Any] | None = None
        self.stats = RequestStats()

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_cached < self.prefill_end


@dataclass(frozen=True)
class TokenEvent:
    """Tokens that a request gained in one step, its counts so far, and with the last ones why it ended.

    finish_reason: {"type": "stop", "matched": token id}, {"type": "length", "length": n} or {"type": "abort"}.
    """

    request_id: str
    tokens: list[int]
    stats: RequestStats
    finish_reason: dict[str, Any] | None = None
