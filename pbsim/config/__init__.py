"""What a user writes: hardware, workload, method and run settings as typed tables; TOML in, resolved TOML out."""

from pbsim.config.files import (
    Source,
    apply_overrides,
    builtin,
    dump_resolved,
    find,
    plain,
    read_source,
    read_toml,
    shipped,
    validate,
    validate_all,
    with_regions,
)
from pbsim.config.hardware import Hardware
from pbsim.config.method import MITIGATIONS, SCHEDULES, Method, parse_method
from pbsim.config.run import Settings
from pbsim.config.workload import Workload

__all__ = [
    "MITIGATIONS",
    "SCHEDULES",
    "Hardware",
    "Method",
    "Settings",
    "Source",
    "Workload",
    "apply_overrides",
    "builtin",
    "dump_resolved",
    "find",
    "parse_method",
    "plain",
    "read_source",
    "read_toml",
    "shipped",
    "validate",
    "validate_all",
    "with_regions",
]
