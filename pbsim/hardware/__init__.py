"""What the network runs on: cycles of a core, links of the fabric, and the machine they make."""

from pbsim.hardware.core import Cost, Cycles, StageCycles
from pbsim.hardware.fabric import Links, Route
from pbsim.hardware.machine import Channel, Machine, MachineCore, build_machine
from pbsim.hardware.placement import Region

__all__ = [
    "Channel",
    "Cost",
    "Cycles",
    "Links",
    "Machine",
    "MachineCore",
    "Region",
    "Route",
    "StageCycles",
    "build_machine",
]
