"""A process that compiles grammars, each in a copy of itself: one may take without end, and then the copy ends and nothing else.

`grammars.py` runs this file, with the seconds that one may take as its argument. It is told the tokenizer, as xgrammar writes it,
in its first line; then in every line a kind and a text, and it answers each in a line: {"grammar": as xgrammar writes it} or
{"error": what is wrong with the text}.
"""

import json
import os
import re
import resource
import signal
import sys

# More than it had before it began.
MOST_BYTES = 4 * 2**30


def main() -> None:
    import xgrammar

    most_seconds = float(sys.argv[1])
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    compilers = {
        # In one line: it takes the fewest tokens, and some models never end with white space.
        "json_schema": lambda text: compiler.compile_json_schema(text, any_whitespace=False),
        "regex": compiler.compile_regex,
        "structural_tag": compiler.compile_structural_tag,
    }
    for line in sys.stdin:
        kind, text = json.loads(line)
        if (copy := os.fork()) == 0:
            os.nice(10)  # requests that are being served come first
            limit_memory()
            signal.setitimer(signal.ITIMER_PROF, most_seconds)  # of the processor; its signal ends the copy
            try:
                answer = {"grammar": compilers[kind](text).serialize_json()}
            except Exception as error:  # of many types
                answer = {"error": reason_of(error)}
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(answer), flush=True)
            os._exit(0)
        if os.waitpid(copy, 0)[1]:
            reason = f"compiling it takes more than {most_seconds:g} s, or more than {MOST_BYTES / 2**30:g} GiB: make it simpler"
            print(json.dumps({"error": reason}), flush=True)


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def reason_of(error: Exception) -> str:
    """What xgrammar says, without the time and the place in its source, and what it checked there."""
    return re.sub(r"^\[\S+\] \S+: (Check failed: .*? is false: )?", "", str(error)).strip()


if __name__ == "__main__":
    main()
