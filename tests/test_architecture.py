"""The direction of dependencies, sizes that a person can hold in the head, and what every public name must show.

These read the sources as text; they need neither git nor a built extension (the last one imports the package).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import timelyfreeze

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "timelyfreeze"

# Part of the package -> the parts that it may import. `pipeline` wires, `cli` sits on top; a new part needs a row here.
BASE = {"errors", "files"}
MAY_IMPORT = {
    "compiled": set[str](),
    "errors": set[str](),
    "files": {"errors"},
    "schedule": BASE,
    "cost": BASE | {"schedule"},
    "planner": BASE | {"schedule", "cost"},
    "viz": BASE | {"schedule", "cost", "planner"},
    "ops": BASE | {"_C"},
    "acceleration": BASE | {"_C", "compiled", "ops"},
    "runtime": BASE | {"_C", "compiled", "ops", "schedule"},
    "freeze": BASE | {"_C", "compiled", "ops", "schedule", "cost", "planner"},
    "distributed": BASE | {"_C", "schedule", "cost", "planner", "runtime", "freeze"},
    "asynchronous": BASE | {"_C", "acceleration", "ops", "schedule", "runtime", "distributed", "planner", "freeze"},
    "pipeline_state": BASE | {"schedule", "planner", "runtime", "freeze"},
    "pipeline": BASE
    | {"_C", "acceleration", "schedule", "cost", "planner", "ops", "runtime", "freeze", "distributed", "asynchronous"}
    | {"pipeline_state"},
    "compat": BASE | {"schedule", "runtime", "freeze", "pipeline"},
    "cli": BASE
    | {"acceleration", "schedule", "cost", "planner", "viz", "freeze", "runtime", "distributed", "pipeline"}
    | set(timelyfreeze.__all__),
    "__main__": {"cli"},
}
NO_TORCH = {"errors", "files", "schedule", "cost", "planner", "viz"}

# The same for C++: folder of csrc -> the folders whose headers it may include.
MAY_INCLUDE = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "ops": {"core", "kernels", "ops"},
    "runtime": {"core", "ops", "runtime"},
    "bindings": {"core", "kernels", "ops", "runtime", "bindings"},
    "tests": {"core", "kernels", "runtime", "tests"},
}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|pybind11)/|^Python\.h$")
# What CPU kernels may use of torch, and their tests: header-only SIMD, threads, short floats.
KERNEL_HEADERS = ("ATen/cpu/vec/", "ATen/Parallel.h", "c10/util/BFloat16.h", "c10/util/Half.h")
C10D_HEADER = "torch/csrc/distributed/c10d/"

MAX_FILE_LINES = 430  # about 400
MAX_FUNCTION_LINES = 70  # about 60, docstring not counted
CODE = {".py", ".cpp", ".h", ".cu", ".cuh"}

# Put together here, so that this file does not hold what it looks for.
FORBIDDEN = re.compile("/(work|tmp)" + "/|sub" + r"agent|/\.libra" + "ry|developer " + "session", re.IGNORECASE)


def sources(*suffixes: str) -> list[Path]:
    """Every text file of the project with one of the suffixes (all where none is given); no build outputs."""
    folders = [ROOT / name for name in ("timelyfreeze", "csrc", "tests", "bench", "examples", "requirements", ".ci")]
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in [*folders, ROOT / ".github"]:
        found += [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = suffixes or tuple({path.suffix for path in found} - {".so", ".pyc", ".png"})
    return sorted(path for path in found if path.suffix in wanted)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or its own name at the top."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def package_files() -> list[Path]:
    """The package's modules, without the lazy front that names them all."""
    return [path for path in sources(".py") if PACKAGE in path.parents and path != PACKAGE / "__init__.py"]


def imported_modules(tree: ast.AST, path: Path) -> Iterator[str]:
    """Full names of what is imported anywhere in the file: in functions and under TYPE_CHECKING too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imported_modules(ast.parse(path.read_text()), path))


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def cpp_files() -> list[Path]:
    return [path for path in sources(".h", ".cpp", ".cu", ".cuh") if ROOT / "csrc" in path.parents]


def test_python_parts_import_only_what_lies_below_them() -> None:
    faults = []
    for path in package_files():
        part = part_of(path)
        assert part in MAY_IMPORT, f"{name_of(path)}: {part} has no row in MAY_IMPORT; add one"
        used = {name.split(".")[1] for name in imports_of(path) if name.startswith("timelyfreeze.")}
        used -= {"__version__", part}
        faults += [f"{name_of(path)} imports timelyfreeze.{name}" for name in sorted(used - MAY_IMPORT[part])]
    assert faults == []


def test_planning_needs_no_torch() -> None:
    faults = [
        f"{name_of(path)} imports {name}"
        for path in package_files()
        for name in imports_of(path)
        if part_of(path) in NO_TORCH and name.split(".")[0] == "torch"
    ]
    assert faults == []


def test_one_file_knows_the_solver() -> None:
    users = [name_of(p) for p in package_files() if any(n.split(".")[0] == "highspy" for n in imports_of(p))]
    assert len(users) <= 1, users
    assert all(name.startswith("timelyfreeze/planner/") for name in users)


def test_cpp_folders_include_only_what_lies_below_them() -> None:
    faults = []
    for path in cpp_files():
        folder = path.relative_to(ROOT / "csrc").parts[0]
        assert folder in MAY_INCLUDE, f"{name_of(path)}: {folder} has no row in MAY_INCLUDE; add one"
        for header in includes_of(path):
            own = header.split("/")[0]
            if own in MAY_INCLUDE and own not in MAY_INCLUDE[folder]:
                faults.append(f"{name_of(path)} includes {header}")
    assert faults == []


def test_core_and_kernels_know_no_torch() -> None:
    faults = []
    for path in cpp_files():
        folder = path.relative_to(ROOT / "csrc").parts[0]
        if folder in ("core", "kernels"):
            headers = [header for header in includes_of(path) if TORCH_HEADER.search(header)]
            faults += [
                f"{name_of(path)} includes {h}" for h in headers if folder == "core" or not h.startswith(KERNEL_HEADERS)
            ]
    assert faults == []


def test_one_file_knows_c10d() -> None:
    users = [name_of(path) for path in cpp_files() if any(C10D_HEADER in header for header in includes_of(path))]
    assert len(users) <= 1, users


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in sources(*CODE)}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(place, lines) of every function, its docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield f"{name_of(path)}:{node.lineno} {node.name}", length


def cpp_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(place, lines) of every function at namespace level: clang-format leaves only its ends at column 0."""
    start = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line == "}":
            yield f"{name_of(path)}:{start}", number - start + 1
        elif line and line[0] not in " #/":
            start = number


def test_functions_are_short() -> None:
    lengths = dict(entry for path in sources(".py") for entry in python_functions(path))
    lengths |= dict(entry for path in cpp_files() for entry in cpp_functions(path))
    assert {place: length for place, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_private_words() -> None:
    faults = [
        f"{name_of(path)}:{number} {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert faults == []


@pytest.mark.parametrize("name", timelyfreeze.__all__)
def test_public_name_has_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(timelyfreeze, name)) or ""
    assert ">>>" in text or "::\n" in text or "```" in text, f"timelyfreeze.{name} shows no example"
