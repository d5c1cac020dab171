"""A new version is one entry in workshop/versions.py and a folder: all tools use it then."""

import json
import shutil
from pathlib import Path

import pytest
from test_compare import SHRINK_PRESET, TypeCommand, copy_repository

from workshop.versions import VERSIONS

ENTRY = """
        Version(
            "v5",
            "a copy of V2",
            "version5_copy",
            parent="v2",
            colour="#CC79A7",
            marker="cross",
            rungs=(("v5", "", "V5's code, unfused"), ("v5", "fuse_qkv", "fused QKV of V5")),
        ),
    )
}

PEERS"""
# In one process, since each imports PyTorch; the comparison starts one for each version.
PROGRAM = """
import json, sys
from pathlib import Path
from analysis_tools import compare_versions, report_generator
from workshop import versions
from workshop.compare import waterfall
from workshop.collection import Collection
from workshop.dashboard import figures
from workshop.dashboard.data import Snapshot
from workshop.gate import parity
from workshop.run.presets import get_preset

module, out = versions.load("v5"), Path(sys.argv[1])
config = module.TinyLlamaConfig(**get_preset("tiny").model())
gate = parity.check(module.TinyLlama, config, precision="fp32", device="cpu",
                    configure_optimizer=module.configure_optimizer)
few = "--num-steps 2 --warmup-steps 1 --repeats 1 --device cpu --config tiny".split()
words = [*few, "--versions", "v1", "v5", "--output-dir", str(out)]
status = compare_versions.main(words)
collection = Collection([out])
collection.refresh()
snapshot = Snapshot(collection)
(group,) = snapshot.groups
rows = {row.version: row for row in snapshot.rows(group)}
reported = report_generator.main(["--results", str(out), "--output-dir", str(out / "report")])
rungs = waterfall.rungs("v5", "fp32", on_gpu=False, compiles=False)
print(json.dumps({"gate": gate.failures, "status": status, "reported": reported,
                  "speed-up": rows["v5"].speedup, "colour": figures._colour(rows["v5"]),
                  "rungs": [rung.title for rung in rungs]}))
"""


@pytest.mark.slow
def test_a_fifth_version_needs_no_other_change(type_command: TypeCommand, tmp_path: Path) -> None:
    changes = {
        "workshop/run/presets.py": SHRINK_PRESET,
        "workshop/versions.py": ("\n    )\n}\n\nPEERS", ENTRY),
    }
    code = copy_repository(tmp_path / "code", changes)
    (code / "version5_copy").mkdir()
    shutil.copy(VERSIONS["v2"].path, code / "version5_copy" / "tiny_llama_v5.py")
    words = ("python", "-c", PROGRAM, tmp_path / "out")
    done = type_command(*words, folder=code, PYTHONPATH=str(code))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["gate"], found["status"], found["reported"]) == ([], 0, 0), done.stderr
    assert found["speed-up"] > 0 and found["colour"] == "#CC79A7"
    assert found["rungs"] == ["V1, plain", "V5's code, unfused", "fused QKV of V5"]
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "v5" in page
