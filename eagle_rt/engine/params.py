"""What a request may ask for: how its reply is chosen, when it ends, what is drafted for it; checked by pydantic. No torch here."""

import json
from dataclasses import fields
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes

AtLeastOne = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
NotNegative = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
# Whether it is in a model's vocabulary is for the engine to say.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def several(value: Any) -> Any:
    """One text may stand for a list of one, and null for none."""
    return [value] if isinstance(value, str) else [] if value is None else value


def pairs(biases: Any) -> Any:
    """Of (token id, bias). JSON can only write an object's names as texts.

    Raises:
        ValueError: one of them is no number.
    """
    if isinstance(biases, dict):
        return list({int(token): bias for token, bias in biases.items()}.items())
    return [] if biases is None else biases


def as_text(schema: Any) -> Any:
    """JSON may be given as text or as what that says."""
    return json.dumps(schema) if isinstance(schema, dict | bool) else schema


# Longer ones take seconds to compile, or do not end.
GrammarText = Annotated[str, Field(max_length=2**16)]
GrammarJson = Annotated[GrammarText, BeforeValidator(as_text)]
GRAMMAR_KINDS = ("json_schema", "regex", "structural_tag")


class Grammar(NamedTuple):
    """What a reply must match. kind: of GRAMMAR_KINDS."""

    kind: str
    text: str


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SpeculativeParams:
    """What one request wants of speculation: none, or trees smaller than the engine's. None: the engine's own number. trace: tell
    what each step drafted and what became of it.

    Raises:
        ValueError: a value has the wrong type, or a number is below 1 (2 for the draft tokens, which count the root).
    """

    enabled: StrictBool = True
    num_steps: AtLeastOne | None = None
    eagle_topk: AtLeastOne | None = None
    num_draft_tokens: Annotated[int, Field(ge=2, strict=True)] | None = None
    trace: StrictBool = False

    def within(self, tree: TreeShape) -> TreeShape | None:
        """The largest tree to draft where the engine's is `tree`; None for none.

        Raises:
            ValueError: more is asked for than the engine drafts, or more draft tokens than the tree can supply.
        """
        if not self.enabled or tree == NO_SPECULATION:
            return None
        tree = tree.of_a_request
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


# Numbers are not made of texts or truth values, and none is infinite.
@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False, extra="forbid"))
class SamplingParams:
    """How a reply is chosen and when it ends.

    temperature 0 is greedy. top_k -1 (or 0), top_p 1 and min_p 0 are off. seed None: the engine draws one. max_new_tokens None:
    until the context is full; 0: the prompt is only read. stop: strings that end the text and are not part of it. stop_token_ids:
    end it besides the model's own end tokens, which `ignore_eos` switches off. n: replies per prompt; reply i uses seed + i.
    speculative: none, or less than the engine would draft; the text is the same. frequency_penalty and presence_penalty are taken
    off the logits of tokens that the reply has said, for each time and once; repetition_penalty divides logits above 0 of tokens
    that prompt or reply have said and multiplies those below; logit_bias is added to those of (token id, bias). logprobs: tell
    how likely the model held each token to be, and the so many likeliest ones; prompt_logprobs: those of the prompt. json_schema,
    regex, structural_tag (xgrammar's, text and JSON in turns): the whole reply matches it, unless it ends for another reason than
    its own.

    Raises:
        ValueError: a value has the wrong type, is out of range, or does not go with another.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_new_tokens: NotNegative | None = 128
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=16), BeforeValidator(several)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(strict=False), BeforeValidator(several)] = ()
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=128)] = 1
    speculative: SpeculativeParams = SpeculativeParams()
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    logit_bias: Annotated[
        tuple[Annotated[tuple[TokenId, Bias], Field(strict=False)], ...], Field(strict=False), BeforeValidator(pairs)
    ] = ()
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    json_schema: GrammarJson | None = None
    regex: GrammarText | None = None
    structural_tag: GrammarJson | None = None

    @model_validator(mode="after")
    def has_one_grammar_and_its_end(self) -> "SamplingParams":
        given = [kind for kind in GRAMMAR_KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given, but a reply can only be made to match one of them")
        if self.grammar and self.ignore_eos:
            raise ValueError(f"ignore_eos is true, but a reply that matches a {self.grammar.kind} ends with it")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What the reply must match, if anything."""
        given = (Grammar(kind, text) for kind in GRAMMAR_KINDS if (text := getattr(self, kind)) is not None)
        return next(given, None)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on what the text says, or on a bias."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1 or self.logit_bias)


def sampling_params(given: dict[str, Any] | SamplingParams | None, defaults: dict[str, Any]) -> SamplingParams:
    """Settings from a user's dictionary, over the model's own defaults.

    Raises:
        ValueError: an unknown name, or a value of the wrong type or out of range; the message begins with the name.
    """
    if isinstance(given, SamplingParams):
        return given
    try:
        return SamplingParams(**{**defaults, **(given or {})})
    except ValidationError as error:
        raise ValueError(message_of(error)) from None


def message_of(error: ValidationError) -> str:
    """Of the first thing that is wrong, by its name."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return reason
    *above, name = map(str, first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        known = SpeculativeParams if above else SamplingParams
        return f"{'.'.join([*above, name])} is not a parameter; known are {', '.join(field.name for field in fields(known))}"
    return f"{'.'.join([*above, name])} is {first['input']!r:.200}: {reason}"
