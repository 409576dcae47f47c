"""The kinds of entries that are about names, signatures and calls; ``model_kinds`` has the others.

Signatures are written as Python writes them, without ``self``: what stands before ``*`` is passed by position,
what stands behind it by name.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.core_contract.core_source import CoreSource, Found
from scripts.core_contract.entry import Entry, moved
from scripts.core_contract.signatures import Parameters, parameters_of


@dataclass(frozen=True)
class Has(Entry):
    """A module or a class has these names: constants, classes, methods, attributes, enum members.

    Attributes:
        owner: the class inside the module; empty for the module itself.
        attributes: the names, separated by spaces.
        plain: whether they are plain lists and dictionaries, whose methods are Python's.
    """

    owner: str
    attributes: str
    plain: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        return self.owner

    @property
    def own_words(self) -> list[str]:
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
        """What stands between the brackets."""
        return Parameters.parse(self.signature.partition("(")[2].removesuffix(")"))

    @property
    def own_words(self) -> list[str]:
        return [self.name.rpartition(".")[2]]

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        theirs = parameters_of(core, found)
        if theirs is None:
            yield f"no function or class with a signature any more, in {found.place}"
            return
        for text in self.compared(theirs):
            yield f"{text}: it takes ({theirs}) in {found.place}"

    def compared(self, theirs: Parameters) -> Iterator[str]:
        """What differs from the parameters that core has."""
        raise NotImplementedError


class Calls(_Signed):
    """We call a function or a class with these arguments."""

    @property
    def own_words(self) -> list[str]:
        return [*super().own_words, *self.parameters.keywords]

    def compared(self, theirs: Parameters) -> Iterator[str]:
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
    """We define this ourselves, in a subclass or a stand-in: core's own has these parameters, in this order.

    ``*args`` and ``**kwargs`` take whatever else core's own has.
    """

    def compared(self, theirs: Parameters) -> Iterator[str]:
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
    """Inside of one of its functions, core makes this call, to something of ours.

    ``*args`` and ``**kwargs`` in ``call`` stand for any further arguments.

    Attributes:
        inside: the function or class.
        call: the call, as the source has it.
    """

    inside: str
    call: str

    @property
    def name(self) -> str:
        return self.inside

    @property
    def own_words(self) -> list[str]:
        return [
            self._wanted.func.attr if isinstance(self._wanted.func, ast.Attribute) else ast.unparse(self._wanted.func)
        ]

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
            yield f"no {self.call} inside, but {instead}, in {found.place}"


def _same_call(wanted: ast.Call, call: ast.Call) -> bool:
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in wanted.keywords}
    theirs = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    any_named = named.get(None) == "kwargs" and bool(named.pop(None))
    positional, given = list(map(ast.unparse, wanted.args)), list(map(ast.unparse, call.args))
    if positional and positional[-1] == "*args":
        positional, given = positional[:-1], given[: len(positional) - 1]
    if any_named:
        theirs = {name: value for name, value in theirs.items() if name in named}
    return (positional, named) == (given, theirs)


@dataclass(frozen=True)
class Mentions(Entry):
    """A function or class of core has these string constants inside: keys and names that we share with it.

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
    def own_words(self) -> list[str]:
        return self.strings.split()

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        there = {n.value for n in ast.walk(found.node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        there |= {n.arg for n in ast.walk(found.node) if isinstance(n, ast.keyword | ast.arg) and n.arg}
        for string in self.strings.split():
            if string not in there:
                yield f'no "{string}" inside, in {found.place}'


@dataclass(frozen=True)
class ReadsOnly(Entry):
    """Core reads no other attributes than these from something that we replace by a stand-in.

    Attributes:
        inside: the function or class of core that reads them.
        expression: the expression that stands for our object there.
        attributes: the attributes, separated by spaces; not every release reads all of them.
    """

    inside: str
    expression: str
    attributes: str

    @property
    def name(self) -> str:
        return self.inside

    @property
    def own_words(self) -> list[str]:
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
