"""Runs the CUDA source that TileLang emits on a CPU, one fiber per thread, and reports what is wrong with it.

load(kernel) -> EmulatedKernel; calling it takes torch CPU tensors and returns a Report. See ../README.md.
"""

from cta_emulator.arguments import Virtual
from cta_emulator.launch import EmulatedKernel, load
from cta_emulator.report import Finding, Report, Suppression
from cta_emulator.source import UnsupportedSourceError

__all__ = ["EmulatedKernel", "Finding", "Report", "Suppression", "UnsupportedSourceError", "Virtual", "load"]
