"""An engine's import of torch leaves some modules out until they are needed.

After their import, torch has the same kernels for the dispatch key "Meta" as after a plain
`import torch`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.runtime.early_start.torch_import import _POSTPONED
from ostinato.runtime.process.engine_main import _LIBRARIES

ROOT = Path(__file__).parents[3]
OF_META = {"torch._decomp", "torch._prims", "torch._refs"}
CODE = """
import json, sys
from ostinato.runtime.early_start.torch_import import _POSTPONED, begin_reading, import_rest, import_torch

begin_reading()
import_torch()
import torch

before = [name for name in sys.modules if name.startswith("torch") and hasattr(sys.modules[name], "__file__")]
product = (torch.ones(3, 5) @ torch.ones(5, 2)).tolist()
exec(sys.argv[1])
kernels = torch._C._dispatch_get_registrations_for_dispatch_key("Meta")
print(json.dumps({
    "before": before,
    "product": product,
    "after": [name for name in sys.modules if name.startswith("torch")],
    "kernels": [name for name in kernels if name.startswith("aten::")],
    "finders": [type(each).__name__ for each in sys.meta_path],
    "files": {
        name: sys.modules[name].__file__ for name in _POSTPONED if eval(name) is sys.modules[name]
    },
}))
"""


@pytest.mark.parametrize(
    "need",
    [
        "import_rest(); import_rest()",
        "torch.masked.MaskedTensor",
        "import torch.distributions.normal; from torch.export import Dim",
        "import torch.fx.experimental.symbolic_shapes",
    ],
)
def test_the_rest_of_torch_comes_when_it_is_needed(need: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, need],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    found = json.loads(done.stdout)
    assert found["product"] == [[5.0, 5.0]] * 3
    assert not OF_META.union(_POSTPONED).intersection(found["before"])
    assert OF_META.issubset(found["after"])
    assert "_Finder" not in found["finders"]
    assert found["files"] == {name: sys.modules[name].__file__ for name in _POSTPONED}
    # The same kernels as after `import torch`, which this process did.
    plain = torch._C._dispatch_get_registrations_for_dispatch_key("Meta")
    assert {name for name in plain if name.startswith("aten::")} == set(found["kernels"])


def test_no_import_of_the_engine_waits_for_the_library_of_torch() -> None:
    """While a thread reads this library, an import of another library would wait."""
    code = f"""
import sys
from importlib import import_module
import ostinato.runtime.process.engine_main

def libraries():
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {{file for file in files if file and file.endswith(".so")}}

for name in {_LIBRARIES!r}:
    import_module(name)
before = libraries()
import ostinato.runtime.process.engine_loop
print(sorted(libraries() - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
