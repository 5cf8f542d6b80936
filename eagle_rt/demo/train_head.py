"""Train the built-in target's EAGLE-3 head.

`python -m eagle_rt.demo.train_head --target DIR --data DIR --run runs/eagle3 --output DIR`
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from eagle_rt.demo.dataset import PackedText
from eagle_rt.demo.train_target import SEED, packed_splits
from eagle_rt.models.heads import default_feature_layers
from eagle_rt.train.eagle3 import STEP_DECAY, Eagle3Trainee, export_head, most_frequent_tokens
from eagle_rt.train.loop import LoopConfig, Metrics, fit, optimizers_for

DRAFT_VOCAB_SIZE = 2048
NUM_UNROLLED = 5
# Most of what a head learns it learns at its first steps, which are cheap: the full unrolling comes last.
NUM_UNROLLED_EARLY = 2
EARLY_SHARE = 0.6


def head_config(target: LlamaForCausalLM) -> dict[str, object]:
    config = target.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


@torch.no_grad()
def start_from_target(trainee: Eagle3Trainee, target: LlamaForCausalLM) -> None:
    """Begin as the target's output layer on its highest captured state, with a layer in between that adds nothing yet."""
    size = target.config.hidden_size
    trainee.lm_head.weight.copy_(target.lm_head.weight[trainee.draft_tokens])
    trainee.norm.weight.copy_(target.model.norm.weight)
    trainee.fc.weight.zero_()
    trainee.fc.weight[:, -size:].fill_diagonal_(1.0)
    trainee.midlayer.self_attn.o_proj.weight.zero_()
    trainee.midlayer.mlp.down_proj.weight.zero_()


def train(target_dir: Path, data_dir: Path, run_dir: Path, output_dir: Path, *, num_steps: int, batch_size: int) -> None:
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    training, held_out = packed_splits(data_dir, tokenizer)
    target = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval().requires_grad_(False)
    draft_tokens = most_frequent_tokens(training.tokens, training.is_answer, target.config.vocab_size, DRAFT_VOCAB_SIZE)
    trainee = Eagle3Trainee(head_config(target), draft_tokens)
    start_from_target(trainee, target)
    feature_layers = default_feature_layers(target.config.num_hidden_layers)

    def losses_on(rows: PackedText, num_unrolled: int) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            output = target(input_ids=rows.tokens, use_cache=False, output_hidden_states=True)
            features = torch.cat([output.hidden_states[layer] for layer in feature_layers], dim=-1)
            embeddings = target.get_input_embeddings()(rows.tokens)
        next_is_answer = torch.cat((rows.is_answer[:, 1:], rows.is_answer[:, -1:]), dim=1)
        return trainee.unrolled_losses(embeddings, features, output.logits, next_is_answer, num_unrolled)

    def loss_at(step: int) -> tuple[Tensor, Metrics]:
        num_unrolled = NUM_UNROLLED_EARLY if step < EARLY_SHARE * num_steps else NUM_UNROLLED
        losses, acceptance = losses_on(training.batch(step, batch_size, SEED + 1000), num_unrolled)
        total = sum(loss * STEP_DECAY**j for j, loss in enumerate(losses))
        assert isinstance(total, Tensor)
        return total, {f"accept_{j}": rate.item() for j, rate in enumerate(acceptance[:NUM_UNROLLED_EARLY])}

    def evaluate() -> Metrics:
        with torch.no_grad():
            results = [
                losses_on(PackedText(*rows), NUM_UNROLLED)
                for rows in zip(held_out.tokens.split(8), held_out.is_answer.split(8), strict=True)
            ]
        return {
            f"held_out_accept_{j}": sum(acceptance[j].item() for _, acceptance in results) / len(results)
            for j in range(NUM_UNROLLED)
        }

    fit(
        trainee,
        optimizers_for(trainee, matrix_lr=0.02, other_lr=2e-3),
        loss_at,
        LoopConfig(num_steps, clip_norm=2.0),
        run_dir,
        evaluate,
    )
    export_head(trainee, output_dir, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the finished target")
    parser.add_argument("--data", type=Path, required=True, help="the folder that the target was trained on")
    parser.add_argument("--run", type=Path, required=True, help="checkpoints and logs; the same folder resumes")
    parser.add_argument("--output", type=Path, required=True, help="where the finished head goes")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4, help="rows of 512 tokens a step")
    args = parser.parse_args()
    train(args.target, args.data, args.run, args.output, num_steps=args.steps, batch_size=args.batch_size)


if __name__ == "__main__":
    main()
