"""Eight simulated devices, strict ranks, and a compilation cache for the whole suite."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
# Most of the suite's time was LLVM's. XLA's own passes, which decide what is computed, stay; CI runs
# the quick subset with all of it.
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import hypothesis
import jax
import numpy as np
import pytest

_CACHE = pathlib.Path(
    os.environ.get("BOOSTAX_TEST_CACHE")
    or pathlib.Path(__file__).resolve().parents[1] / ".cache/jax"
)
# JAX writes an entry in place, so that a second process can meet half of it: a folder per worker.
jax.config.update(
    "jax_compilation_cache_dir", str(_CACHE / os.environ.get("PYTEST_XDIST_WORKER", "alone"))
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "boostax", deadline=None, max_examples=10, derandomize=True, database=None
)
hypothesis.settings.load_profile("boostax")


def pytest_itemcollected(item):
    """With pytest-xdist, let one worker run what shares compiled steps: a row, or a file.

    Here and not in ``pytest_collection_modifyitems``, where pytest-xdist has looked already.
    """
    row = getattr(getattr(item, "callspec", None), "params", {}).get("row")
    group = getattr(row, "name", None) or item.path.name
    item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def reference():
    """Load a file of reference values: ``reference("c_gradient_accumulation")["k3_w0_0"]``."""

    def load(name: str) -> dict[str, np.ndarray]:
        path = pathlib.Path(__file__).parent / "reference" / f"{name}.npz"
        with np.load(path, allow_pickle=False) as file:
            return dict(file)

    return load
