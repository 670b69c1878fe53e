"""The start of a native model imports no compiler, no hub client and not all of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from ostinato.runtime.early_start.torch_import import import_torch

import_torch()  # as an engine process does
from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config

# The bundled model: random weights would need `torch.Generator`, which needs the rest of torch.
small = ["cache.memory_gib=0.05", "model.max_model_len=64", "graphs.cost_table_budget_s=0"]
llm = LLM(config=load_config(small, values={"graphs.bundle_dir": sys.argv[1]}))
llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, temperature=0.7, seed=1), use_progress=False)
heavy = ("torch._dynamo", "torch._inductor", "torch._decomp", "torch._refs", "sympy", "huggingface_hub", "transformers")
print(sorted(llm._engine.model.startup_seconds), [name for name in heavy if name in sys.modules])
"""


def test_neither_start_of_a_llama_imports_a_compiler(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    starts = [
        subprocess.run(
            [sys.executable, "-c", CODE, str(tmp_path)],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout
        for _ in range(2)
    ]
    assert "'compile'" in starts[0]
    assert "'load programs'" in starts[1]
    assert all(start.strip().endswith("[]") for start in starts)
