"""Train the built-in target: `python -m eagle_rt.demo.train_target --data DIR --run runs/target --output DIR`."""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from eagle_rt.demo.dataset import HELD_OUT_FRACTION, SEED, batch_at, held_out_split, load_dialogues, pack, texts
from eagle_rt.demo.tokenizer import VOCAB_SIZE, train_tokenizer
from eagle_rt.train.loop import LoopConfig, Metrics, fit, muon_for

ROW_LENGTH = 512


def target_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        tie_word_embeddings=False,
    )


def language_model_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(data_dir: Path, run_dir: Path, output_dir: Path, *, num_steps: int, batch_size: int) -> None:
    torch.manual_seed(SEED)
    splits = held_out_split(load_dialogues(data_dir), HELD_OUT_FRACTION, SEED)
    tokenizer = train_tokenizer(texts(splits[0]))
    training, held_out = (pack(tokenizer, dialogues, ROW_LENGTH, SEED) for dialogues in splits)
    print(f"{training.numel():,} training tokens, {held_out.numel():,} held out")

    model = LlamaForCausalLM(target_config())

    def loss_at(step: int, part: int) -> tuple[Tensor, Metrics]:
        return language_model_loss(model, batch_at(training, step, batch_size, SEED)), {}

    def evaluate() -> Metrics:
        with torch.no_grad():
            losses = [language_model_loss(model, rows).item() for rows in held_out.split(batch_size)]
        return {"held_out_loss": sum(losses) / len(losses)}

    fit(model, muon_for(model, matrix_lr=0.02, other_lr=3e-3), loss_at, LoopConfig(num_steps), run_dir, evaluate)

    tokenizer.save_pretrained(output_dir)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=3, pad_token_id=0)
    model.bfloat16().save_pretrained(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_train.jsonl, roleplay.json, codegen.json")
    parser.add_argument("--run", type=Path, required=True, help="checkpoints and logs; the same folder resumes")
    parser.add_argument("--output", type=Path, required=True, help="where the finished checkpoint goes")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--batch-size", type=int, default=8, help=f"rows of {ROW_LENGTH} tokens a step")
    args = parser.parse_args()
    train(args.data, args.run, args.output, num_steps=args.steps, batch_size=args.batch_size)


if __name__ == "__main__":
    main()
