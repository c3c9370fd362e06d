"""What a run leaves: its directory, the audit it passed, tables and figures."""

from pbsim.results.run import Run, open_run

__all__ = ["Run", "open_run"]
