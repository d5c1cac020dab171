"""A recipe of docs/development.md, followed in a copy of the repository: a version that all tools
then use."""

import json
import re
import shutil
from pathlib import Path

import pytest
from test_compare import NEVER_DISTURBED, ROOT, SHRINK_PRESET, replace

ENTRY = """
        Version(
            "v5",
            "a copy of V2",
            "version5_copy",
            parent="v2",
            changes=frozenset(),
            colour="#CC79A7",
            marker="cross",
            rungs=(("v5", "", "V5's code, unfused"), ("v5", "fuse_qkv", "fused QKV of V5")),
        ),
    )
}

# fmt: off
PEERS"""
# In one process, since each imports PyTorch; the comparison starts one for each version.
PROGRAM = """
import json, sys
from pathlib import Path
from analysis_tools import compare_versions, report_generator
from workshop import versions
from workshop.compare import waterfall
from workshop.collection import Collection
from workshop.gate import parity
from workshop.run.presets import get_preset
from workshop.show import charts, ladders

module, out = versions.load("v5"), Path(sys.argv[1])
config = module.TinyLlamaConfig(**get_preset("tiny").model())
gate = parity.check(module.TinyLlama, config, precision="fp32", device="cpu",
                    configure_optimizer=module.configure_optimizer)
few = "--num-steps 2 --warmup-steps 1 --repeats 1 --device cpu --config tiny".split()
words = [*few, "--versions", "v1", "v5", "--output-dir", str(out)]
status = compare_versions.main(words)
collection = Collection([out])
collection.refresh()
(group,) = ladders.ladders(collection.runs)
rows = {row.version: row for row in group.rows}
reported = report_generator.main(["--results", str(out), "--output-dir", str(out / "report")])
rungs = waterfall.rungs("v5", "fp32", on_gpu=False, compiles=False)
print(json.dumps({"gate": gate.failures, "status": status, "reported": reported,
                  "speed-up": rows["v5"].speedup.value,
                  "colour": charts.throughput([rows["v5"]]).colours[0],
                  "rungs": [rung.title for rung in rungs]}))
"""


def copy_checkout(folder: Path) -> Path:
    """The repository with its links, without results of this machine."""

    def unneeded(place: str, names: list[str]) -> set[str]:
        here = Path(place).relative_to(ROOT)
        own = set(names) - {"reference"} if here == Path("results") else set()
        return own | {name for name in names if name.startswith(".") or name == "__pycache__"}

    shutil.copytree(ROOT, folder, symlinks=True, ignore=unneeded)
    replace(folder / "workshop/results.py", *NEVER_DISTURBED)
    return folder


@pytest.mark.slow
def test_a_fifth_version_needs_no_other_change(type_command, tmp_path) -> None:
    code, page = copy_checkout(tmp_path / "code"), (ROOT / "docs" / "development.md").read_text()
    recipe = page.partition("### A version\n")[2].partition("\n##")[0].replace("NAME", "copy")
    replace(code / "workshop/run/presets.py", *SHRINK_PRESET)
    commands = re.findall(r"`((?:mkdir|mv) [^`]+)`", recipe)
    done = type_command("bash", "-c", " && ".join(commands), folder=code)
    assert (len(commands), done.returncode) == (2, 0), done.stderr
    replace(code / "workshop/versions.py", "\n    )\n}\n\n# fmt: off\nPEERS", ENTRY)
    readme = code / "version5_copy" / "README.md"
    between = r"(<!-- \w+: begin, written by make docs -->\n).*?(?=<!-- \w+: end -->)"
    readme.write_text(re.sub(between, r"\1", readme.read_text(), flags=re.DOTALL))
    for words in ("analysis_tools/update_docs.py", "-m pytest -q tests/test_versions.py -k v5"):
        done = type_command("python", *words.split(), folder=code, PYTHONPATH=str(code))
        assert done.returncode == 0, done.stdout + done.stderr
    assert "It has no exercises." in readme.read_text()
    listed = re.findall(r"^\| \[(\w+)\]", (code / "exercises/README.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 20
    words = ("python", "-c", PROGRAM, tmp_path / "out")
    done = type_command(*words, folder=code, PYTHONPATH=str(code))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["gate"], found["status"], found["reported"]) == ([], 0, 0), done.stderr
    assert found["speed-up"] > 0 and found["colour"] == "#CC79A7"
    assert found["rungs"] == ["V1, plain", "V5's code, unfused", "fused QKV of V5"]
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "v5" in page
