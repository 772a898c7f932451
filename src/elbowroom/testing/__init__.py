"""Tools for tests of code that moves tensors between a device and host memory, without having such a device."""

from elbowroom.testing.simulated import SimulatedAccelerator, SimulatedTensor, simulated_accelerator

__all__ = ["SimulatedAccelerator", "SimulatedTensor", "simulated_accelerator"]
