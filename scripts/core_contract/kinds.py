"""Kinds of entries about names, signatures and calls. ``model_kinds`` has the others.

Signatures have Python's syntax, without ``self``. Arguments before ``*`` are passed by position, the others by name.
"""

import ast
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.core_contract.core_source import CoreSource, Found
from scripts.core_contract.entry import Entry, moved
from scripts.core_contract.signatures import Parameters, parameters_of


@dataclass(frozen=True)
class Has(Entry):
    """A module or a class has these names: constants, classes, methods, attributes or enum members.

    Attributes:
        owner: the class inside the module; empty for the module itself.
        attributes: the names, separated by spaces.
    """

    owner: str
    attributes: str

    @property
    def name(self) -> str:
        return self.owner

    @property
    def default_words(self) -> list[str]:
        return self.attributes.split()

    @property
    def paths(self) -> list[str]:
        return [self.path, *(f"{self.path}.{attribute}" for attribute in self.attributes.split())]

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        for attribute in self.attributes.split():
            if core.member(found, attribute) is None and not self.optional:
                yield f"no {attribute} in {found.place}" + ("" if self.owner else moved(core, attribute))


@dataclass(frozen=True)
class _Signed(Entry):
    """An entry that is written as a signature, such as ``ProgressBar.update_absolute(value, total, preview)``."""

    signature: str

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]

    @property
    def parameters(self) -> Parameters:
        """The parameters in the signature."""
        return Parameters.parse(self.signature.partition("(")[2].removesuffix(")"))

    @property
    def default_words(self) -> list[str]:
        return [self.name.rpartition(".")[2]]

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        theirs = parameters_of(core, found)
        if theirs is None:
            yield f"it is no function and no class with a known signature, in {found.place}"
            return
        for text in self.compare_parameters(theirs):
            yield f"{text}: it takes ({theirs}) in {found.place}"

    @abstractmethod
    def compare_parameters(self, theirs: Parameters) -> Iterator[str]:
        """Yield one sentence for each way in which core's parameters do not fit this entry."""


class Calls(_Signed):
    """We call a function or a class with these arguments."""

    @property
    def default_words(self) -> list[str]:
        return [*super().default_words, *self.parameters.keywords]

    def compare_parameters(self, theirs: Parameters) -> Iterator[str]:
        """Yield what core's parameters lack for our call, and what they require beyond it."""
        ours = self.parameters
        for index, name in enumerate(ours.positional):
            if index >= len(theirs.positional):
                if not theirs.rest:
                    yield f"no parameter {index + 1}, which we pass as {name}"
            elif theirs.positional[index] != name:
                yield f"parameter {index + 1} is {theirs.positional[index]}, and we pass {name}"
        unknown = [name for name in ours.keywords if name not in theirs.names]
        if unknown and not theirs.named_rest:
            yield f"no parameter {', '.join(unknown)}, which we pass by name"
        passed = {*theirs.positional[: len(ours.positional)], *ours.keywords}
        missing = sorted(theirs.required - passed)
        if missing and not unknown and not (ours.rest or ours.named_rest):
            yield f"it also requires {', '.join(missing)}"


class Overrides(_Signed):
    """We replace this method or function by ours, which has these parameters, and core's has the same in this order.

    With ``*args`` or ``**kwargs`` core's may have more.
    """

    def compare_parameters(self, theirs: Parameters) -> Iterator[str]:
        """Yield how core's parameters differ from those of our replacement."""
        ours = self.parameters
        unknown = [name for name in ours.names if name not in theirs.names]
        if unknown:
            yield f"no parameter {', '.join(unknown)}, which ours has"
        shared = [name for name in theirs.positional if name in ours.names]
        if shared != [name for name in ours.names if name in shared]:
            yield f"another order than in ours ({ours})"
        extra = [name for name in theirs.names if name not in ours.names]
        if extra and not unknown and not (ours.rest or ours.named_rest):
            yield f"ours lacks the parameter {', '.join(extra)}"
        for star, has, needed in (("*args", ours.rest, theirs.rest), ("**kwargs", ours.named_rest, theirs.named_rest)):
            if needed and not has:
                yield f"ours lacks {star}"


@dataclass(frozen=True)
class Passes(Entry):
    """Core makes this call, which reaches something of ours.

    Attributes:
        inside: the function or class of core that makes it.
        call: the call as it is in the source. ``*args`` and ``**kwargs`` stand for any further arguments.
    """

    inside: str
    call: str

    @property
    def name(self) -> str:
        return self.inside

    @property
    def default_words(self) -> list[str]:
        return [ast.unparse(self._wanted.func).rpartition(".")[2]]

    @property
    def _wanted(self) -> ast.Call:
        call = ast.parse(self.call, mode="eval").body
        assert isinstance(call, ast.Call)
        return call

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        function = ast.unparse(self._wanted.func)
        calls = [n for n in ast.walk(found.node) if isinstance(n, ast.Call) and ast.unparse(n.func) == function]
        if not any(_same_call(self._wanted, call) for call in calls):
            instead = " or ".join(dict.fromkeys(map(ast.unparse, calls))) or f"no call of {function}"
            yield f"there is {instead}, not {self.call}, in {found.place}"


def _same_call(wanted: ast.Call, call: ast.Call) -> bool:
    positional, core_positional = ([ast.unparse(argument) for argument in c.args] for c in (wanted, call))
    named, core_named = ({k.arg: ast.unparse(k.value) for k in c.keywords} for c in (wanted, call))
    if positional and positional[-1] == "*args":
        positional.pop()
        core_positional = core_positional[: len(positional)]
    if named.get(None) == "kwargs":
        named.pop(None)
        core_named = {name: value for name, value in core_named.items() if name in named}
    return (positional, named) == (core_positional, core_named)


@dataclass(frozen=True)
class Mentions(Entry):
    """A function or class of core contains these strings or names of arguments: keys that we share with it.

    Attributes:
        inside: the function or class; empty for the whole module.
        strings: the strings, separated by spaces.
    """

    inside: str
    strings: str

    @property
    def name(self) -> str:
        return self.inside

    @property
    def default_words(self) -> list[str]:
        return self.strings.split()

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        strings = {n.value for n in ast.walk(found.node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        strings |= {n.arg for n in ast.walk(found.node) if isinstance(n, ast.keyword | ast.arg) and n.arg}
        for string in self.strings.split():
            if string not in strings:
                yield f'it does not contain "{string}", in {found.place}'


@dataclass(frozen=True)
class ReadsOnly(Entry):
    """Core reads no other attributes than these from an object that a stand-in of ours replaces.

    Attributes:
        inside: the function or class of core that reads them.
        expression: how core names the object there.
        attributes: the attributes, separated by spaces. Not every release reads all of them.
    """

    inside: str
    expression: str
    attributes: str

    @property
    def name(self) -> str:
        return self.inside

    @property
    def default_words(self) -> list[str]:
        return [self.expression.rpartition(".")[2]]

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        for attribute, line in sorted(self._read(found).items()):
            if attribute not in self.attributes.split():
                yield f"it now reads {self.expression}.{attribute}, in {found.module.file}:{line}"

    def _read(self, found: Found) -> dict[str, int]:
        read: dict[str, int] = {}
        for node in ast.walk(found.node):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == self.expression:
                read.setdefault(node.attr, node.lineno)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
                name = node.args[1]
                if ast.unparse(node.args[0]) == self.expression and isinstance(name, ast.Constant):
                    read.setdefault(str(name.value), node.lineno)
        return read
