"""Dialogues as packed rows of tokens."""

import json
from pathlib import Path

import checkpoints
import torch

from eagle_rt.demo.dataset import batch_at, held_out_split, load_dialogues, pack
from eagle_rt.demo.tokenizer import train_tokenizer
from eagle_rt.models.tokenizer import chat_tokens

TOKENIZER = checkpoints.byte_tokenizer()
DIALOGUE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def test_files_become_dialogues_without_calculator_notes(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text(json.dumps({"question": "2+3?", "answer": "2+3 = <<2+3=5>>5"}) + "\n")
    (tmp_path / "roleplay.json").write_text(json.dumps([{"instruction": "Be a cat.", "input": "Now", "response": "Meow"}]))
    (tmp_path / "codegen.json").write_text(json.dumps([{"instruction": "Code", "input": "", "response": ""}]))
    dialogues = load_dialogues(tmp_path)
    assert [[message["content"] for message in dialogue] for dialogue in dialogues] == [
        ["2+3?", "2+3 = 5"],
        ["Be a cat.\nNow", "Meow"],
    ]


def test_rows_hold_the_text_in_order_and_batches_repeat() -> None:
    rows = pack(TOKENIZER, [DIALOGUE] * 20, row_length=7, seed=0)
    whole = chat_tokens(TOKENIZER, DIALOGUE, add_generation_prompt=False)
    assert TOKENIZER.decode(whole) == "<|bos|><|user|>hi<|end|><|assistant|>yes<|end|>"
    assert rows.flatten()[: 2 * len(whole)].tolist() == whole * 2
    again = batch_at(rows, 13, 4, seed=2)
    assert torch.equal(batch_at(rows, 13, 4, seed=2), again)
    epoch = torch.cat([batch_at(rows, step, 1, seed=2) for step in range(len(rows))])
    assert sorted(epoch.tolist()) == sorted(rows.tolist())


def test_nothing_is_in_both_splits() -> None:
    dialogues = [[{"role": "user", "content": str(number)}] for number in range(50)]
    training, held_out = held_out_split(dialogues, 0.1, seed=1)
    assert len(held_out) == 5
    assert sorted(int(d[0]["content"]) for d in training + held_out) == list(range(50))


def test_the_tokenizer_reads_back_what_it_writes() -> None:
    tokenizer = train_tokenizer(["some text with 123 numbers", "more text"] * 5)
    for text in ("some text 2024!", "naïve 日本"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert len(tokenizer.encode("777", add_special_tokens=False)) == 3
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
