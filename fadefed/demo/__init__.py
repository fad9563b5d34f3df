"""`fadefed demo`: a whole federation on this machine, as separate processes, on real data."""

from fadefed.demo.run import run

__all__ = ["run"]
