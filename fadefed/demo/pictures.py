"""The demo's pictures, as PNG files."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fadefed.messages import Array

mpl.use("Agg")
DPI = 130


def draw_accuracy(path: Path, curves: dict[str, tuple[list[int], list[float]]]) -> None:
    """Mean test accuracy against rounds, one line a method; the first is drawn boldest."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = ["-", "-", "-", "--", "--"]
    for i, (label, (rounds, accuracy)) in enumerate(curves.items()):
        axes.plot(rounds, accuracy, styles[i % len(styles)], label=label, linewidth=2.4 if i == 0 else 1.4)
    axes.set(xlabel="round", ylabel="test accuracy, mean over devices", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8, title="dashed: float32 over an error-free link", title_fontsize=8)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def draw_alpha(path: Path, alpha: Array, cohorts: Array) -> None:
    """The importance matrix [N, N] as a heat map, the hidden cohorts marked by frames."""
    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(alpha, cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, label="importance alpha[k, m]")
    for cohort in np.unique(cohorts):
        members = np.flatnonzero(cohorts == cohort)
        low, size = members[0] - 0.5, len(members)
        axes.add_patch(mpl.patches.Rectangle((low, low), size, size, fill=False, edgecolor="white", linewidth=2))
        axes.text(
            low + size / 2, low + size / 2, f"cohort {'ABC'[cohort]}", color="white", ha="center", va="center",
            fontsize=9, alpha=0.9,
        )  # fmt: skip
    axes.set(xlabel="m: whose data", ylabel="k: whose model", xticks=range(len(alpha)), yticks=range(len(alpha)))
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def draw_outages(path: Path, lost: dict[str, int], sent: dict[str, int], closed_form: float) -> None:
    """Share of rounds in which each device's signs were lost, beside the closed form."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    shares = [lost[name] / max(sent[name], 1) for name in lost]
    axes.bar(range(len(shares)), shares, color="#4477aa")
    axes.axhline(closed_form, color="#cc3311", linestyle="--", label=f"closed form {closed_form:.4f}")
    axes.set(ylabel="share of rounds in outage", xticks=range(len(shares)))
    axes.set_xticklabels(list(lost), rotation=30, ha="right", fontsize=8)
    axes.set_ylim(0, max([*shares, closed_form]) * 1.3 + 1e-3)
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
