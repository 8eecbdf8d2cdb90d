"""Run every notebook headless, from a checkout; nothing is installed and nothing is written.

    python notebooks/run.py [NAME.ipynb ...]

Each cell must run without an error, and a notebook in the repository must hold no outputs.
Exit status 1 if one fails. Needs the extra ``docs`` (nbclient, nbformat, ipykernel).
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent


def kernel_directory(folder: str) -> None:
    """Describe a kernel that runs this very interpreter, whatever Jupyter has installed."""
    place = pathlib.Path(folder) / "kernels" / "boostax"
    place.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "boostax", "language": "python"}
    (place / "kernel.json").write_text(json.dumps(spec))


def run(path: pathlib.Path, limit: int = 300) -> None:
    """Execute one notebook; raise if a cell fails or the file holds outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = [i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and c.get("outputs")]
    if stored:
        raise ValueError(f"{path.name}: cells {stored} hold outputs; clear them before committing")
    client = NotebookClient(
        notebook, timeout=limit, kernel_name="boostax", resources={"metadata": {"path": str(HERE)}}
    )
    client.execute()


def main(names: list[str]) -> int:
    """Run the named notebooks, or all of them."""
    paths = [HERE / pathlib.Path(n).name for n in names] or sorted(HERE.glob("*.ipynb"))
    # From a checkout boostax is found by its path, so that the first cell installs nothing.
    root = str(HERE.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        kernel_directory(folder)
        os.environ["JUPYTER_PATH"] = folder
        for path in paths:
            start = time.perf_counter()
            try:
                run(path)
            except Exception as error:
                failed.append(path.name)
                print(f"{path.name}: FAILED\n{error}", file=sys.stderr)
            else:
                print(f"{path.name}: passed, {time.perf_counter() - start:.0f} s")
    if not paths:
        print("no notebooks found", file=sys.stderr)
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
