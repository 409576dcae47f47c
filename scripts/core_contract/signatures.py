"""Parameters of functions and classes, read from their definitions."""

import ast
from dataclasses import dataclass

from scripts.core_contract.core_source import CoreSource, Found, Function, assigned


@dataclass(frozen=True)
class Parameters:
    """Parameters of a function, or arguments of a call, without ``self``.

    Attributes:
        positional: names of those that can be passed by position, in order.
        keywords: names of those that are passed by name only.
        rest: whether it has ``*args``.
        named_rest: whether it has ``**kwargs``.
        required: names of those without a default.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    rest: bool = False
    named_rest: bool = False
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, arguments: ast.arguments, *, bound: bool) -> "Parameters":
        """Read a function's parameters. ``bound`` omits the first, ``self`` or ``cls``."""
        every = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        without_default = every[: len(every) - len(arguments.defaults)]
        needed = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        without_default += [argument.arg for argument, default in needed if default is None]
        return cls(
            positional=tuple(every[bound:]),
            keywords=tuple(argument.arg for argument in arguments.kwonlyargs),
            rest=arguments.vararg is not None,
            named_rest=arguments.kwarg is not None,
            required=frozenset(without_default) - frozenset(every[:bound]),
        )

    @classmethod
    def parse(cls, text: str) -> "Parameters":
        """Read the inside of a signature, such as ``a, b, *, c, **kwargs``."""
        function = ast.parse(f"def f({text}): ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        return cls.of(function.args, bound=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return (*self.positional, *self.keywords)

    def __str__(self) -> str:
        star = ["*args"] if self.rest else ["*"] if self.keywords else []
        return ", ".join([*self.positional, *star, *self.keywords, *(["**kwargs"] if self.named_rest else [])])


def parameters_of(core: CoreSource, found: Found) -> Parameters | None:
    """The parameters of a function of core, or of a class's initialiser; None if the source does not show them."""
    if isinstance(found.node, Function):
        static = any(ast.unparse(decorator) == "staticmethod" for decorator in found.node.decorator_list)
        return Parameters.of(found.node.args, bound=found.owner is not None and not static)
    if isinstance(found.node, ast.ClassDef):
        return _of_class(core, found, found.node)
    return None


def _of_class(core: CoreSource, found: Found, node: ast.ClassDef) -> Parameters | None:
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        names = [name for field in fields for name, _ in assigned(field)]
        required = [name for field in fields if field.value is None for name, _ in assigned(field)]
        return Parameters(tuple(names), required=frozenset(required))
    initialiser = core.member(found, "__init__")
    if initialiser is None:
        return Parameters(()) if not node.bases else None
    return parameters_of(core, initialiser)
