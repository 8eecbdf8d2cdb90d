"""The package as a whole: what importing it costs, its public names, its extras."""

import importlib
import importlib.util
import json
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest

import boostax

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEAVY = ("pydantic", "sklearn", "matplotlib", "rich", "orbax", "tensorboardX", "pytest")


def run(code: str) -> str:
    """Run ``code`` in a fresh interpreter at the checkout's root and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_on_top_of_jax_flax_and_optax():
    added = json.loads(
        run(
            "import json, sys, jax, flax, optax\n"
            "before = set(sys.modules)\n"
            "import boostax\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
    )
    assert added == ["boostax"]


def test_import_alone_loads_neither_jax_nor_extras():
    loaded = json.loads(run("import json, sys, boostax; print(json.dumps(sorted(sys.modules)))"))
    assert {"jax", "flax", "optax", "numpy", *HEAVY}.isdisjoint(loaded)


def test_techniques_need_no_extra_and_no_config():
    # Whoever uses one technique in their own chain pays for that technique only.
    loaded = json.loads(
        run(
            "import json, sys, jax, flax, optax\n"
            "before = set(sys.modules)\n"
            "import boostax\n"
            "for name in ('accumulate', 'microbatch', 'freeze', 'centralize', 'train_step'):\n"
            "    getattr(boostax, name)\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
    )
    assert set(HEAVY).isdisjoint({name.split(".")[0] for name in loaded})


def test_every_public_name_is_there_and_documented():
    for name in boostax.__all__:
        value = getattr(boostax, name)
        assert value.__doc__, f"boostax.{name} has no docstring"
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: boostax\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(boostax.__all__)


def test_names_for_type_checkers_are_the_public_names():
    source = (ROOT / "boostax" / "__init__.py").read_text(encoding="utf-8")
    typed = re.findall(r"^    from boostax\.([\w.]+) import (\w+) as (\w+)$", source, re.MULTILINE)
    assert {name: module for module, name, alias in typed} == boostax._HOME
    assert all(name == alias for _, name, alias in typed)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match=r"'acumulate'.*Did you mean 'accumulate'\?"):
        boostax.acumulate  # noqa: B018
    assert set(boostax.__all__) <= set(dir(boostax))


def test_every_module_imports():
    for module in pkgutil.walk_packages(boostax.__path__, "boostax."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_version_agrees_with_the_project_file():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["version"] == boostax.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{boostax.__version__}]" in changelog


def test_missing_extra_names_the_extra():
    output = run(
        "import sys\n"
        "sys.modules['sklearn'] = None\n"  # importing it now raises ModuleNotFoundError
        "from boostax.errors import MissingExtraError, require\n"
        "try:\n"
        "    require('sklearn.datasets', 'demo')\n"
        "except MissingExtraError as error:\n"
        "    assert isinstance(error, ImportError)\n"
        "    print(error)"
    )
    assert "'sklearn'" in output
    assert "pip install 'boostax[demo]'" in output


@pytest.mark.parametrize("package", ["sklearn", "matplotlib", "rich"])
def test_compare_without_the_demo_extra_says_so(package, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.modules[{package!r}] = None\n"
            "from boostax.cli import main\n"
            f"sys.exit(main(['compare', '--out', {str(tmp_path / 'out')!r}]))",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'boostax[demo]'" in done.stderr
    assert "Traceback" not in done.stderr
