"""What a checkpoint says about dialogues and its own replies."""

import json
from pathlib import Path

import pytest
import sentencepiece
from checkpoints import byte_tokenizer

from eagle_rt.models.tokenizer import chat_tokens, load_tokenizer, sampling_defaults

VICUNA = "{{ bos_token }}A chat.{% for m in messages %} {{ m.role.upper() }}: {{ m.content }}{% endfor %} ASSISTANT:"


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


def tokenizer_dir(directory: Path, chat_template: str | None = None) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def asked(directory: Path, chat_template: Path | None = None) -> str:
    """What the model reads of a short dialogue."""
    given = None if chat_template is None else str(chat_template)
    tokenizer = load_tokenizer(directory, trust_remote_code=False, chat_template=given)
    return str(tokenizer.decode(chat_tokens(tokenizer, [{"role": "user", "content": "Hi"}])))


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("own", [None, "{{ messages[0].content }}"])
def test_a_chat_template_of_ones_own(tmp_path: Path, own: str | None, is_json: bool) -> None:
    file = tmp_path / ("own.json" if is_json else "own.jinja")
    file.write_text(json.dumps({"chat_template": VICUNA}) if is_json else VICUNA)
    assert asked(tokenizer_dir(tmp_path / "model", own), file).endswith("A chat. USER: Hi ASSISTANT:")


ALICE, BOB = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ASKED = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite "


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([ALICE], f"<|bos|>{ASKED}answers to the user's questions. USER: Hi ASSISTANT:"),
        (
            [{"role": "system", "content": "Be brief."}, ALICE, BOB, ALICE],
            "<|bos|>Be brief. USER: Hi ASSISTANT: Hello<|end|>USER: Hi ASSISTANT:",
        ),
    ],
)
def test_vicunas_chat_template(tmp_path: Path, messages: list[dict[str, str]], text: str) -> None:
    """As FastChat writes its dialogues, with which it was trained."""
    tokenizer = load_tokenizer(tokenizer_dir(tmp_path), trust_remote_code=False, chat_template="vicuna")
    assert tokenizer.decode(chat_tokens(tokenizer, messages)) == text
    assert tokenizer.decode(chat_tokens(tokenizer, messages, add_generation_prompt=False)) == text.removesuffix("ASSISTANT:")


def test_a_processors_chat_template_serves_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    for name, own, expected in (("without", None, "A chat. USER: Hi ASSISTANT:"), ("with", "{{ messages[0].content }}", "Hi")):
        directory = tokenizer_dir(tmp_path / name, own)
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": VICUNA}))
        assert asked(directory).endswith(expected)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jinja", None, "there is no chat template at .*none.jinja, nor is that the name of one, as are: vicuna"),
        ("own.json", "{}", 'own.json has no "chat_template"'),
        ("own.json", "no json", 'own.json has no "chat_template"'),
        ("own.json", '{"chat_template": [{"name": "default"}]}', 'own.json has no "chat_template"'),
        ("own.jinja", "{% if %}", "--chat-template .*own.jinja cannot be used"),
    ],
)
def test_a_chat_template_that_is_none(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        asked(tokenizer_dir(tmp_path / "model"), file)


def test_a_tokenizer_that_is_sentencepieces_alone(tmp_path: Path) -> None:
    """As Vicuna's."""
    text = tmp_path / "text"
    text.write_text("Tom has 3 apples and buys 4 more.\n" * 20)
    sentencepiece.SentencePieceTrainer.Train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    own = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(tmp_path, trust_remote_code=False)
    twin = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for question in ("Tom buys 4 apples", "Zoë?"):
        assert tokenizer.encode(question) == [twin.bos_id(), *twin.encode(question)]
        assert tokenizer.decode(tokenizer.encode(question), skip_special_tokens=True) == question
    assert tokenizer.eos_token_id == twin.eos_id()
