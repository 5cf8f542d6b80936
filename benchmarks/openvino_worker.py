"""OpenVINO GenAI behind a pipe, for `cpu.py --openvino-*`; it needs Python packages of its own, so it runs in its own interpreter.

Started with the exported target and head. Each line of standard input is one turn, `{"mode", "prompts", "max_new_tokens"}`; the
answer is a line with the turn's texts and seconds. Modes: `plain`, `chain:TOKENS` and `tree:BRANCHES:DEPTH:TOKENS`.
"""

import argparse
import json
import sys
import time

import numpy
import openvino
import openvino_genai

# Trees with a half-precision cache give wrong text in 2026.4.1.
PRECISIONS = {"float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}, "default": {}}


def make_pipeline(target: str, head: str | None, properties: dict[str, str]) -> openvino_genai.LLMPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    drafting = {"draft_model": openvino_genai.draft_model(head, "CPU", **properties)} if head else {}
    return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **drafting, **properties)


def generation_config(mode: str, max_new_tokens: int, end_token: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = max_new_tokens, False, False
    config.eos_token_id, config.stop_token_ids = end_token, {end_token}
    kind, *numbers = mode.split(":")
    if kind == "chain":
        config.num_assistant_tokens = int(numbers[0])
    elif kind == "tree":
        config.branching_factor, config.tree_depth, config.num_assistant_tokens = map(int, numbers)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--precision", choices=list(PRECISIONS), default="default")
    parser.add_argument("--end-token", type=int, required=True)
    args = parser.parse_args()
    properties = PRECISIONS[args.precision]
    pipelines = {is_plain: make_pipeline(args.target, None if is_plain else args.head, properties) for is_plain in (True, False)}
    for line in sys.stdin:
        turn = json.loads(line)
        pipeline = pipelines[turn["mode"] == "plain"]
        config = generation_config(turn["mode"], turn["max_new_tokens"], args.end_token)
        texts = []
        start = time.perf_counter()
        for prompt in turn["prompts"]:
            texts.append(list(pipeline.generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config).tokens[0]))
        print(json.dumps({"texts": texts, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
