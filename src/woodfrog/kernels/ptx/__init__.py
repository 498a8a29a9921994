"""PTX text as a syntax tree with positions. Knows grammar, not what instructions mean."""

from __future__ import annotations

from woodfrog.kernels.ptx.parser import parse
from woodfrog.kernels.ptx.syntax import Function, Instruction, Module, ParameterDeclaration, Variable

__all__ = ["Function", "Instruction", "Module", "ParameterDeclaration", "Variable", "parse"]
