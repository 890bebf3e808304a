"""Runs of clients that others wrote against the engine, unchanged: openai's SDK, guidellm and `vllm bench serve`.

python -m benchmarks.engine_clients [--only guidellm] [--json results.json]

Each client runs in an environment of its own, kept in the user's cache, against one `millpond-engine serve` on the
small real model. A run is complete when every request of it was answered and every answer has the tokens asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import engine_peer
from benchmarks.engine_process import MODEL_NAME, fetch_model, run_engine
from benchmarks.figures import Figure, report

GUIDELLM = "guidellm==0.8.1"
NUM_REQUESTS = 24
CONCURRENCY = 8
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 32
_RUN_SECONDS = 400

_VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does; the peer's package has another name, which its own command line does not find."""


@dataclass(frozen=True)
class Run:
    """What a client says of its own run."""

    completed: int
    failed: int
    output_tokens: int
    tokens_per_second: float


def main() -> int:
    """Run the clients, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(CLIENTS), action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = fetch_model()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, run_engine(model) as engine:
        tokenizer = Path(folder) / "tokenizer"
        _write_tokenizer(model, tokenizer)
        for name in arguments.only or sorted(CLIENTS):
            run = CLIENTS[name](engine.url, tokenizer, Path(folder))
            figures.extend(make_figures(name, run))
    return report(figures, arguments.json)


def make_figures(name: str, run: Run) -> list[Figure]:
    """Completeness has a goal; the rate is the client's own and has none here."""
    wanted = NUM_REQUESTS * OUTPUT_TOKENS
    return [
        Figure(f"{name}: requests answered", run.completed, "", goal=f"{NUM_REQUESTS}, none failed",
               met=run.completed == NUM_REQUESTS and run.failed == 0),
        Figure(f"{name}: output tokens", run.output_tokens, "", goal=str(wanted), met=run.output_tokens == wanted),
        Figure(f"{name}: output rate", run.tokens_per_second, "tokens/s"),
    ]  # fmt: skip


def run_openai(url: str, tokenizer: Path, folder: Path) -> Run:
    """The SDK of this project's own test environment: chat and completions, streamed and whole."""
    import time

    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answered = tokens = 0
    started = time.monotonic()
    for index in range(NUM_REQUESTS):
        extra = {"ignore_eos": True}
        if index % 2:
            whole = client.completions.create(
                model=MODEL_NAME, prompt=f"Number {index}", max_tokens=OUTPUT_TOKENS, extra_body=extra
            )
            usage = whole.usage
        else:
            usage = None
            for chunk in client.chat.completions.create(
                model=MODEL_NAME, messages=[{"role": "user", "content": f"Number {index}"}], stream=True,
                max_tokens=OUTPUT_TOKENS, stream_options={"include_usage": True}, extra_body=extra,
            ):  # fmt: skip
                usage = chunk.usage or usage
        assert usage is not None
        tokens += usage.completion_tokens
        answered += 1
    return Run(answered, 0, tokens, tokens / (time.monotonic() - started))


def run_guidellm(url: str, tokenizer: Path, folder: Path) -> Run:
    """Its benchmark of synthetic prompts at a fixed concurrency, over chat."""
    program = _make_guidellm()
    report = folder / "guidellm.json"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    _run(
        *(str(program), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL_NAME}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", data),
        *("--output", f"kind=json,path={report}"),
    )
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics, requests = found["metrics"], found["requests"]
    return Run(
        completed=len(requests["successful"]),
        failed=len(requests["errored"]) + len(requests["incomplete"]),
        output_tokens=sum(
            request["output_metrics"]["text_tokens"] or 0 for request in requests["successful"]
        ),
        tokens_per_second=metrics["output_tokens_per_second"]["successful"]["mean"],
    )


def run_vllm_bench(url: str, tokenizer: Path, folder: Path) -> Run:
    """Random prompts at a fixed concurrency, over completions."""
    python = engine_peer.make_environment()
    _run(
        *(str(python), "-c", _VLLM_BENCH, "--backend", "openai", "--base-url", url, "--model", MODEL_NAME),
        *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--num-prompts", str(NUM_REQUESTS)),
        *(
            "--random-input-len",
            str(PROMPT_TOKENS),
            "--random-output-len",
            str(OUTPUT_TOKENS),
            "--ignore-eos",
        ),
        *("--max-concurrency", str(CONCURRENCY), "--disable-tqdm", "--save-result"),
        *("--result-dir", str(folder), "--result-filename", "vllm.json"),
    )
    found = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    return Run(
        found["completed"], found.get("failed", 0), found["total_output_tokens"], found["output_throughput"]
    )


CLIENTS: dict[str, Callable[[str, Path, Path], Run]] = {
    "guidellm": run_guidellm,
    "openai": run_openai,
    "vllm-bench": run_vllm_bench,
}


def _make_guidellm() -> Path:
    """Its program in an environment of its own, made once; it brings PyTorch, which no request of ours needs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "millpond" / "benchmarks" / GUIDELLM.replace("==", "-")
    if not (home / "complete").exists():
        print(f"making {home} (5 GB)", file=sys.stderr)
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python")]
        subprocess.run([*install, GUIDELLM, engine_peer.TORCH], check=True)
        (home / "complete").touch()
    return home / "bin" / "guidellm"


def _write_tokenizer(model: Path, target: Path) -> None:
    """The tokenizer inside the GGUF file as the files that these clients read."""
    import transformers

    transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(target)


def _run(*command: str) -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    subprocess.run(command, check=True, env=environment, timeout=_RUN_SECONDS, stdout=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
