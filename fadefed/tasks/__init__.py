"""Data sources, and ways to split data over devices."""

from fadefed.tasks.data import Dataset, Fleet, load_npz, open_source, save_npz

__all__ = ["Dataset", "Fleet", "load_npz", "open_source", "save_npz"]
