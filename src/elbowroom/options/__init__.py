"""Every option once: defined with type, limits and help text, and read from the command line, environment and files."""

from elbowroom.options.definition import Options
from elbowroom.options.problems import OptionsError, Problem
from elbowroom.options.reading import Resolved, Source, read

__all__ = ["Options", "OptionsError", "Problem", "Resolved", "Source", "read"]
