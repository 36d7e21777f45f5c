"""Wheels in clean environments: core alone, core with the template, and what a user reads when something is wrong.

Messages of every kind are tested with made-up distributions in tests/hooks; here each comes from a really installed
copy of the template.
"""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.slow

INIT = "deepinfer_acme/__init__.py"
PLUGIN = "deepinfer_acme/plugin.py"
WAY_OUT = (
    "Repair or uninstall deepinfer-acme, or choose another backend, e.g. DEEPINFER_ACCELERATOR=cpu; nothing falls back "
    "by itself"
)


def conclusion(environment, **variables) -> str:
    """What `deepinfer doctor` says of why no engine can start."""
    result = environment.deepinfer("doctor", **variables)
    assert result.returncode == 1, result.stdout + result.stderr
    return re.sub(r"\n  ", "\n", result.stdout.partition("An engine cannot start here:\n  ")[2]).rstrip()


def served_by(environment, *arguments, **variables) -> dict[str, dict]:
    """{op: row of `deepinfer ops --json`}."""
    result = environment.deepinfer("ops", "--json", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    return {row["op"]: row for row in json.loads(result.stdout)["ops"]}


def tokens(environment, checkpoint, **variables) -> list[list[int]]:
    """Tokens of two greedy answers."""
    flags = ["--model", checkpoint, "--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--max-model-len", "64"]
    result = environment.deepinfer("generate", *flags, "--json", "Once upon a time", "abc", **variables)
    assert result.returncode == 0, result.stderr
    return [json.loads(line)["token_ids"] for line in result.stdout.splitlines()]


def test_core_alone_runs(environment, builds, checkpoints):
    alone = environment(builds["deepinfer-core"].wheel)
    ops = served_by(alone)
    assert {row["provider"] for row in ops.values()} == {"reference"}
    assert [len(answer) for answer in tokens(alone, checkpoints("micro"))] == [6, 6]
    script = alone.run("deepinfer", "doctor")
    assert "Ready: an engine would run on cpu (no accelerator: no other backend is installed)." in script.stdout
    assert str(alone.site) in alone.run(alone.python, "-c", "import deepinfer; print(deepinfer.__file__)").stdout


def test_the_template_is_chosen_by_the_variable(installed, checkpoints):
    ops = served_by(installed, DEEPINFER_ACCELERATOR="acme")
    assert ops["attention.cached"]["provider"] == "acme"
    assert ops["cache.load_entries"]["layout"] == "acme_planar_v1"
    assert (ops["attention.chunk"]["kind"], ops["gemm.linear"]["kind"]) == ("decomposed", "reference")
    assert {row["distribution"] for row in ops.values()} == {"deepinfer-core", "deepinfer-acme"}
    answers = tokens(installed, checkpoints("micro"), DEEPINFER_ACCELERATOR="acme")
    assert [len(answer) for answer in answers] == [6, 6]
    # the first token comes from prefill, where both backends compute the same bits
    reference = tokens(installed, checkpoints("micro"), DEEPINFER_ACCELERATOR="cpu")
    assert [answer[0] for answer in answers] == [answer[0] for answer in reference]


def test_the_template_passes_conformance(installed):
    """Without the tools that only tests need. The guide's test runs all levels on a renamed copy."""
    result = installed.deepinfer("conformance", "--backend", "acme", "--level", "0,3", "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "acme passes" in result.stdout


def test_unset_its_device_decides(installed, tmp_path):
    doctor = installed.deepinfer("doctor").stdout
    assert "an engine would run on cpu (no accelerator: acme found no device)" in doctor
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "acme0").touch()
    doctor = installed.deepinfer("doctor", ACME_ROOT=str(tmp_path)).stdout
    assert "an engine would run on acme (its device is present)" in doctor


def test_two_devices_need_a_choice(environment, builds, variant, tmp_path):
    both = environment(builds["deepinfer-core"].wheel, builds["deepinfer-acme"].wheel, variant("zeta"))
    (tmp_path / "dev").mkdir()
    for node in ("acme0", "zeta0"):
        (tmp_path / "dev" / node).touch()
    roots = {"ACME_ROOT": str(tmp_path), "ZETA_ROOT": str(tmp_path)}
    result = both.deepinfer("ops", **roots)
    assert result.returncode == 2
    assert result.stderr == (
        "deepinfer: 2 backends find their device on this machine: acme (deepinfer-acme 0.1.0), "
        "zeta (deepinfer-zeta 0.1.0).\n  Choose one: DEEPINFER_ACCELERATOR=acme or DEEPINFER_ACCELERATOR=zeta\n"
    )
    assert "would run on zeta (chosen by" in both.deepinfer("doctor", DEEPINFER_ACCELERATOR="zeta", **roots).stdout


def test_a_typo_in_the_variable(installed):
    assert conclusion(installed, DEEPINFER_ACCELERATOR="acne") == (
        "DEEPINFER_ACCELERATOR=acne: no such backend. Installed: acme, cpu. Did you mean acme?\n"
        "  Every backend is a package of its own: pip install deepinfer-<name>"
    )


def test_a_template_written_for_a_newer_core(environment, builds, variant):
    """As a later release would be: its own version, plugin API and bounds on core are all newer."""
    wheel = variant("acme", {
        "pyproject.toml": ('version = "0.1.0"', 'version = "0.2.0"'),
        "src/deepinfer_acme/__init__.py": ("api=(0, 1)", 'api=(0, 2), compiler="acme_cc:Compiler"'),
    }, bounds=">=0.2,<0.3")  # fmt: skip
    newer = environment(builds["deepinfer-core"].wheel, wheel)
    text = (
        "backend acme (deepinfer-acme 0.2.0) was written for plugin API 0.2; this core has 0.1.\n"
        "  Install deepinfer-core>=0.2 or deepinfer-acme<0.2."
    )
    assert conclusion(newer, DEEPINFER_ACCELERATOR="acme") == text
    assert conclusion(newer) == text  # unset: a backend that cannot be asked never leads to cpu


def test_todays_template_on_later_cores(broken):
    """A later minor plugin API takes it as it is, a later major one says which versions fit."""
    broken.edit("deepinfer/hooks/record.py", "PLUGIN_API = (0, 1)", "PLUGIN_API = (0, 3)")
    assert served_by(broken, DEEPINFER_ACCELERATOR="acme")["attention.cached"]["provider"] == "acme"
    broken.edit("deepinfer/hooks/record.py", "PLUGIN_API = (0, 3)", "PLUGIN_API = (1, 0)")
    assert conclusion(broken, DEEPINFER_ACCELERATOR="acme") == (
        "backend acme (deepinfer-acme 0.1.0) was written for plugin API 0.1; this core has 1.0.\n"
        "  Install deepinfer-acme>0.1.0 or deepinfer-core>=0.1,<0.2."
    )


def test_a_broken_import(broken):
    broken.edit(PLUGIN, "import torch\n", "import acme_runtime\n")
    assert conclusion(broken, DEEPINFER_ACCELERATOR="acme") == (
        "backend acme (deepinfer-acme 0.1.0): its plugin cannot be imported: ModuleNotFoundError: No module named "
        "'acme_runtime'\n"
        f"  Looked for deepinfer_acme.plugin:AcmePlugin, registered in {broken.site}/deepinfer_acme-0.1.0.dist-info/"
        "entry_points.txt\n"
        f"  {WAY_OUT}"
    )


def test_a_raising_probe(broken):
    broken.edit("deepinfer_acme/probe.py", "return bool(device_nodes())", "raise OSError('bus error')")
    assert conclusion(broken) == (
        "backend acme (deepinfer-acme 0.1.0): its probe (deepinfer_acme.probe:present) failed: OSError: bus error\n"
        f"  {WAY_OUT}"
    )
    assert "an engine would run on cpu" in broken.deepinfer("doctor", DEEPINFER_ACCELERATOR="cpu").stdout


def test_a_missing_requirement(broken):
    broken.edit(INIT, 'Requires(torch=">=2.9")', 'Requires(torch=">=99", wheels=("acme-kernels>=1.2",))')
    assert re.sub(r"found [\w.+]+", "found T", conclusion(broken, DEEPINFER_ACCELERATOR="acme")) == (
        "backend acme (deepinfer-acme 0.1.0): 2 requirements are not met:\n"
        "  torch>=99: found T\n"
        "  acme-kernels>=1.2: not installed\n"
        "  Install with: pip install 'torch>=99' 'acme-kernels>=1.2'"
    )


def test_an_op_with_a_wrong_signature(broken):
    broken.edit("deepinfer_acme/gemm.py", "limit: float, row_weight", "clamp: float, row_weight")
    result = broken.deepinfer("ops", DEEPINFER_ACCELERATOR="acme")
    assert result.returncode == 2
    assert result.stderr == (
        "deepinfer: acme 0.1.0 (deepinfer-acme): AcmeGemm breaks the contract GemmOps:\n"
        "  gemm.swiglu: parameters are (self, gate_up, clamp, row_weight=None), the contract has "
        "(self, gate_up, limit, row_weight=None)\n"
    )


def test_a_backend_that_patches_torch(broken):
    broken.edit(PLUGIN, "class AcmePlugin:", "torch.relu = torch.nn.functional.gelu\n\n\nclass AcmePlugin:")
    result = broken.deepinfer("conformance", "--backend", "acme", "--level", "0")
    assert result.returncode == 1, result.stderr
    assert "changes nothing in torch, deepinfer and builtins" in result.stdout
    assert "opening the backend changed what it does not own:" in result.stdout
    assert "torch.relu was replaced" in result.stdout


def test_the_original_distribution_beside_ours(broken, tmp_path, builder):
    """Its files would overwrite core's; its metadata alone is enough to refuse."""
    project = tmp_path / "original"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "deepinfer"\nversion = "0.1.0"\n'
        "[tool.hatch.build.targets.wheel]\nbypass-selection = true\n"
    )
    broken.install(builder(project, tmp_path / "built").wheel)
    text = (
        f"the distribution deepinfer 0.1.0 is installed ({broken.site}/deepinfer); it and deepinfer-core both provide "
        "the package 'deepinfer' and overwrite each other's files.\n"
        "  Remove both, then install this one: pip uninstall -y deepinfer deepinfer-core && pip install deepinfer-core"
    )
    assert conclusion(broken) == text
    assert broken.deepinfer("ops", DEEPINFER_ACCELERATOR="acme").stderr == f"deepinfer: {text}\n"


def test_new_backend_from_the_wheel_alone(installed, tmp_path, builder, environment, builds):
    """A user without the repository makes a package that installs beside core and is found."""
    result = installed.deepinfer("new-backend", "my_chip", "--dir", tmp_path / "made")
    assert result.returncode == 0, result.stderr
    wheel = builder(tmp_path / "made", tmp_path / "built").wheel
    mine = environment(builds["deepinfer-core"].wheel, wheel)
    ops = served_by(mine, DEEPINFER_ACCELERATOR="my_chip")
    assert ops["attention.cached"]["impl"] == "deepinfer_my_chip.attention.MyChipAttention.cached"
