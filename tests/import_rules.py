"""Who may import whom: the rules of engine/ and tui/, read from the syntax trees alone.

`faults(sources)` takes {path relative to the root: source} and returns one line a fault, so that a
test can give it a tree that breaks a rule. A rule is a function of one `Module`, but for the two
that need all of them: cycles, and what starting the engine drags in.
"""

import ast
import os
import sys
from dataclasses import dataclass, field

MAX_LINES = 400
OURS = ("engine", "tui")
# Packages that may import a closed list only; a name stands for its submodules too.
STAGES = ("functools", "math", "numpy", "numba", "engine.shape", "engine.host", "engine.linear",
          "engine.device", "engine.attend_parts")
MODEL = (*STAGES, "engine.model.norm", "engine.model.dense", "engine.model.thirds",
         "engine.model.hyper_cuda", "engine.model.kda_chunk_cuda", "engine.model.kda_row_cuda")
POOL = ("numpy", "engine.shape", "engine.errors", "engine.pool")
# Modules low in the tree, by what of ours they may import.
LOW = {
    "engine.shape": (),
    "engine.host": (),
    "engine.linear": ("engine.host",),
    "engine.errors": ("engine.shape",),
    "engine.options": ("engine.errors",),
    "engine.config": ("engine.shape", "engine.errors", "engine.options"),
    "engine.world": ("engine.shape", "engine.errors"),
    "engine.sequence": ("engine.errors", "engine.pool", "engine.sample"),
    "engine.prompt": ("engine.errors",),
    "engine.round": ("engine.errors", "engine.pool"),
    "engine.scheduler": ("engine.errors", "engine.prompt", "engine.pool", "engine.round",
                         "engine.sample", "engine.sequence"),
    "engine.telemetry": (),
    "engine.hub": ("engine.errors",),
    "engine.pulse": ("engine.errors",),
    "engine.keeper": (),
    "engine.relay": (),
    "engine.front": ("engine.config", "engine.errors", "engine.keeper", "engine.relay"),
    "engine.api.parse": ("engine.chat",),
    "engine.api.body": ("engine.errors", "engine.sample"),
    "engine.api.reply": ("engine.api.parse", "engine.chat"),
    "engine.api.status": ("engine.hub", "engine.telemetry"),
    "engine.api.app": ("engine.api", "engine.errors"),
}
# Packages of which one part of engine/ is the only importer.
ONLY = {"mpi4py": ("engine.world",), "starlette": ("engine.api",), "uvicorn": ("engine.api",),
        "prometheus_client": ("engine.api",),
        "socket": ("engine.pulse", "engine.api.app", "tui.client")}
ENVIRONMENT_READER = "engine.config"
START = "engine.__main__"  # may import ours inside functions: it prepares the environment first
LATE = ("numpy", "numba", "llvmlite", "mpi4py")  # so must not be imported by importing START


@dataclass
class Module:
    """One source file. imports: (module name, line, inside a function) of each import."""

    name: str
    path: str
    tree: ast.Module
    imports: list = field(default_factory=list)

    @property
    def package(self):
        """Name of the package it lies in, itself for a package's __init__."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]


def within(name, allowed):
    """Whether a dotted name is one of `allowed` or lies inside one."""
    return any(name == a or name.startswith(a + ".") for a in allowed)


# ---- reading -----------------------------------------------------------------------------------

def read_modules(sources):
    """{path: source} -> {name: Module} of engine/ and tui/, imports resolved to module names."""
    modules = {}
    for path, source in sorted(sources.items()):
        name = path[:-len(".py")].replace("/", ".").removesuffix(".__init__")
        if within(name, OURS):
            modules[name] = Module(name, path, ast.parse(source, path))
    for module in modules.values():
        _collect(module, module.tree, modules, deferred=False)
    return modules


def _collect(module, node, modules, deferred):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            names = _from_names(module, child, modules)
        elif isinstance(child, ast.Call):
            names = _called_import(child)
        else:
            names = []
        module.imports += [(name, child.lineno, deferred) for name in dict.fromkeys(names)]
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        _collect(module, child, modules, deferred or inside)


def _from_names(module, node, modules):
    """`from a import b`: module a.b where that is one of ours, else a."""
    base = node.module or ""
    if node.level:
        up = module.package.split(".")[:len(module.package.split(".")) - node.level + 1]
        base = ".".join(up + ([node.module] if node.module else []))
    return [f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names]


def _called_import(node):
    """importlib.import_module("a"), __import__("a"): an import like another."""
    function = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    if function in ("import_module", "__import__") and node.args:
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


# ---- rules of one module -----------------------------------------------------------------------

def forbidden_edges(module):
    """(line, imported name, why) of each import that the direction of dependencies forbids."""
    for name, line, deferred in module.imports:
        why = _forbidden(module.name, name)
        if why is None and deferred and within(name, OURS) and module.name != START:
            why = "an import inside a function hides an edge"
        if why is not None:
            yield line, name, why


def _forbidden(importer, name):
    ours = within(name, OURS)
    if ours and not within(name, importer.split(".")[:1]):
        return "engine and tui speak HTTP only"
    for package, importers in ONLY.items():
        if within(name, (package,)) and not within(importer, importers):
            return f"{' and '.join(importers)} alone may import {package}"
    if within(importer, ("engine.stages",)):
        return None if within(name, STAGES) else "a stage imports " + ", ".join(STAGES) + " only"
    if within(importer, ("engine.pool",)):
        return None if within(name, POOL) or _standard(name) \
            else "the pool imports " + ", ".join(POOL) + " only"
    if within(importer, ("engine.model",)):
        return None if within(name, MODEL) or _standard(name) \
            else "the model imports " + ", ".join(MODEL) + " only"
    if ours and importer in LOW and not within(name, LOW[importer]):
        return f"{importer} imports of ours " + (", ".join(LOW[importer]) or "nothing") + " only"
    return None


def _standard(name):
    return name.split(".")[0] in sys.stdlib_module_names


def environment_uses(module):
    """Lines that read or write the environment outside the one module that may."""
    if within(module.name, ("engine",)) and module.name != ENVIRONMENT_READER:
        for node in ast.walk(module.tree):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                name = next((a.name for a in node.names if a.name in ("environ", "getenv")), None)
            if name in ("environ", "getenv", "putenv", "environb"):
                yield node.lineno


# ---- rules of all ------------------------------------------------------------------------------

def module_level(module, modules):
    """What importing a module imports of ours: names in `modules`."""
    return [name for name, _, deferred in module.imports if not deferred and name in modules]


def cycles(modules):
    """Each cycle of module-level imports once: its names, from the first in the alphabet on."""
    found, done = [], set()

    def visit(name, path):
        if name in path:
            cycle = path[path.index(name):]
            first = cycle.index(min(cycle))
            cycle = cycle[first:] + cycle[:first]
            if cycle not in found:
                found.append(cycle)
        elif name not in done:
            for imported in module_level(modules[name], modules):
                visit(imported, path + [name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])
    return found


def dragged_in(modules, start, late):
    """(importing module, name) of each `late` package that importing `start` would import."""
    reached, found = [start] if start in modules else [], []
    for name in reached:
        for imported, _, deferred in modules[name].imports:
            if not deferred and within(imported, late):
                found.append((name, imported))
            if not deferred and imported in modules and imported not in reached:
                reached.append(imported)
    return found


def faults(sources):
    """One line for each broken rule in {path: source}; [] is a tree in order."""
    lines = [f"{path}: {source.count(chr(10))} lines, at most {MAX_LINES}"
             for path, source in sorted(sources.items()) if source.count("\n") > MAX_LINES]
    modules = read_modules(sources)
    for module in modules.values():
        lines += [f"{module.path}:{line}: imports {name}: {why}"
                  for line, name, why in forbidden_edges(module)]
        lines += [f"{module.path}:{line}: the environment belongs to {ENVIRONMENT_READER}"
                  for line in environment_uses(module)]
    lines += ["import cycle: " + " -> ".join(cycle + cycle[:1]) for cycle in cycles(modules)]
    lines += [f"{START} must import {name} late, and {module} imports it at once"
              for module, name in dragged_in(modules, START, LATE)]
    return lines


def read_sources(root, folders, skip=("tests/oracle",)):
    """{relative path: source} of the .py files under `folders` of a pathlib root."""
    sources = {}
    for folder in folders:
        for path in (root / folder).rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if not name.startswith(tuple(s + "/" for s in skip)):
                sources[name] = path.read_text(encoding="utf-8").replace(os.linesep, "\n")
    return sources
