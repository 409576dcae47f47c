"""ComfyUI's source as syntax trees. Finds dotted names, follows imports and base classes, and imports nothing.

Only the modules that a lookup needs are parsed, so a whole check takes seconds.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
SEARCHED = ("*.py", "comfy/**/*.py", "comfy_api/**/*.py", "comfy_extras/*.py", "comfy_execution/*.py", "app/**/*.py")
"""Where ``CoreSource.elsewhere`` looks for a name that has moved."""
MAX_ALIASES = 20


@dataclass(frozen=True, eq=False)
class Found:
    """What core defines under a dotted name.

    Attributes:
        module: the module that defines it.
        node: its definition. For an assigned name that is the assigned expression, for a module its tree.
        owner: the class that defines it, if any.
    """

    module: "Module"
    node: ast.AST
    owner: ast.ClassDef | None = None

    @property
    def place(self) -> str:
        """File and line of the definition."""
        line = getattr(self.node, "lineno", None)
        return self.module.file if line is None else f"{self.module.file}:{line}"


@dataclass(frozen=True)
class _Import:
    module: str
    name: str | None = None


@dataclass(eq=False)
class Module:
    """One parsed file.

    Attributes:
        name: its dotted name.
        file: its path, relative to the checkout.
        names: what each top-level name is bound to. A definition takes precedence over an assignment.
        stars: the modules that it imports with ``*``.
    """

    name: str
    file: str
    tree: ast.Module
    is_package: bool
    names: dict[str, ast.AST | _Import] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in statements(self.tree.body):
            self._bind(node)

    def _bind(self, node: ast.stmt) -> None:
        if isinstance(node, Function | ast.ClassDef):
            self.names[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                self.names.setdefault(alias.asname or first, _Import(alias.name if alias.asname else first))
        elif isinstance(node, ast.ImportFrom):
            self._bind_from(node)
        else:
            for name, value in assigned(node):
                self.names.setdefault(name, value)

    def _bind_from(self, node: ast.ImportFrom) -> None:
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        base = package[: len(package) + 1 - node.level] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.names.setdefault(alias.asname or alias.name, _Import(source, alias.name))


class CoreSource:
    """A ComfyUI checkout.

    Args:
        root: its folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._members: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    def module(self, name: str) -> Module | None:
        """The module of a dotted name; None if there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        stem = self.root.joinpath(*name.split("."))
        for file, is_package in ((stem.with_name(f"{stem.name}.py"), False), (stem / "__init__.py", True)):
            if file.is_file():
                tree = ast.parse(file.read_text(encoding="utf-8"))
                return Module(name, str(file.relative_to(self.root)), tree, is_package)
        return None

    def find(self, path: str) -> Found | None:
        """What a dotted name such as ``comfy.samplers.KSampler.SAMPLERS`` refers to; None if it does not exist."""
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            if module := self.module(".".join(parts[:count])):
                found: Found | None = Found(module, module.tree)
                for name in parts[count:]:
                    found = self.member(found, name) if found else None
                return found
        return None

    def member(self, found: Found, name: str, depth: int = 0) -> Found | None:
        """A name of a module, or a member of a class: defined in it, assigned to its instances, or inherited."""
        if depth > MAX_ALIASES:
            return None
        if isinstance(found.node, ast.Module):
            return self._of_module(found.module, name, depth)
        if isinstance(found.node, ast.ClassDef):
            return self._of_class(found, found.node, name, depth)
        return None

    def _of_module(self, module: Module, name: str, depth: int) -> Found | None:
        bound = module.names.get(name)
        if isinstance(bound, _Import):
            return self.find(bound.module if bound.name is None else f"{bound.module}.{bound.name}")
        if bound is not None:
            return self._settle(module, bound, None, depth)
        for star in module.stars:
            source = self.module(star)
            if source and (found := self._of_module(source, name, depth + 1)):
                return found
        inner = self.module(f"{module.name}.{name}")
        return Found(inner, inner.tree) if inner else None

    def _of_class(self, found: Found, node: ast.ClassDef, name: str, depth: int) -> Found | None:
        if node not in self._members:
            self._members[node] = members(node)
        defined = self._members[node].get(name)
        if defined is not None:
            return self._settle(found.module, defined, node, depth)
        for base in self.bases(found):
            if inherited := self.member(base, name, depth + 1):
                return inherited
        return None

    def _settle(self, module: Module, node: ast.AST, owner: ast.ClassDef | None, depth: int) -> Found:
        """Follow an alias such as ``alias = other.name``, if core defines what it refers to."""
        if isinstance(node, ast.Name | ast.Attribute) and (target := self.expression(module, node, depth + 1)):
            return target
        return Found(module, node, owner)

    def expression(self, module: Module, node: ast.AST, depth: int = 0) -> Found | None:
        """What a name or attribute chain at a module's top level refers to; None if core does not define it."""
        if isinstance(node, ast.Name):
            return None if depth > MAX_ALIASES else self._of_module(module, node.id, depth)
        if isinstance(node, ast.Attribute):
            owner = self.expression(module, node.value, depth)
            return self.member(owner, node.attr, depth) if owner else None
        return None

    def bases(self, found: Found) -> Iterator[Found]:
        """Yield the base classes of a class, as far as core defines them."""
        for base in getattr(found.node, "bases", []):
            target = self.expression(found.module, base)
            if target and isinstance(target.node, ast.ClassDef) and target.node is not found.node:
                yield target

    def elsewhere(self, name: str) -> list[str]:
        """File and line of every top-level definition of a name. A missing name may have moved there."""
        definition = re.compile(rf"^(?:class|def|async def) {re.escape(name)}\b|^{re.escape(name)} *=", re.MULTILINE)
        return [
            f"{file.relative_to(self.root)}:{text.count(chr(10), 0, match.start()) + 1}"
            for file, text in self._texts
            if (match := definition.search(text))
        ]

    def modules_with(self, text: str) -> Iterator[str]:
        """Yield the dotted names of modules whose source contains a text."""
        for file, content in self._texts:
            if text in content:
                yield ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def _texts(self) -> list[tuple[Path, str]]:
        files = (file for pattern in SEARCHED for file in sorted(self.root.glob(pattern)))
        return [(file, file.read_text(encoding="utf-8", errors="replace")) for file in files]


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, including those inside ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for inner in getattr(node, part, []):
                    yield from statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a statement assigns to, each with its value, or with its annotation if it has no value."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value or node.annotation
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from ((element.id, node.value) for element in elements if isinstance(element, ast.Name))


def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """What a class defines itself: methods, class attributes, and instance attributes that its methods assign."""
    found: dict[str, ast.AST] = {}
    for statement in statements(node.body):
        if isinstance(statement, Function | ast.ClassDef):
            found[statement.name] = statement
        for name, value in assigned(statement):
            found.setdefault(name, value)
    for name, value in _instance_attributes(node):
        found.setdefault(name, value)
    return found


def _instance_attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    owners = ("self", "cls", node.name)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            if isinstance(inner.value, ast.Name) and inner.value.id in owners:
                yield inner.attr, ast.Constant(None, lineno=inner.lineno)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.args:
            first = inner.args[0]
            if inner.func.attr.startswith("register_") and isinstance(first, ast.Constant):
                yield str(first.value), ast.Constant(None, lineno=inner.lineno)
