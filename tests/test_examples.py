"""The example scripts: each trains, and boosting one takes at most five lines."""

import difflib
import importlib.util
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "examples"


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["plain", "boosted"])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_script_trains(library, kind, capsys):
    # Chance is 0.1; two of eight epochs are enough to tell.
    accuracy = script(f"mnist_{library}_{kind}").train(epochs=2)
    assert accuracy > 0.5
    assert "epoch 2: loss 0." in capsys.readouterr().out


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_boosting_takes_at_most_five_lines(library):
    plain, boosted = (
        (EXAMPLES / f"mnist_{library}_{kind}.py").read_text().splitlines()
        for kind in ("plain", "boosted")
    )
    diff = list(difflib.unified_diff(plain, boosted, n=0, lineterm=""))[2:]
    added = [line[1:] for line in diff if line.startswith("+")]
    assert 1 <= len(added) <= 5
    assert any("boostax.AutoBoost" in line for line in added)
    # Nothing of the training itself is hidden in another place.
    assert 60 <= len(plain) <= 90
