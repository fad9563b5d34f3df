"""MtFEEL with 90 % of its reports erased: the share of its error-free gain over the untrained model that it keeps."""

import numpy as np

from benchmarks.common import options, show
from channel_emu import LinkConfig
from fadefed.experiments.mtfeel import federation
from fadefed.simulation import Simulation


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    # r = 0.3 at -10 dB: P_out = 1 - exp(-(2^0.3 - 1) / 0.1) = 0.9009.
    link = LinkConfig("outage", snr_db=-10.0, bandwidth_hz=25_450 / 0.3)
    rows, kept = [], []
    for seed in range(arguments.seeds):
        free = Simulation(federation("mtfeel", seed), engine="numpy").run()
        lossy = Simulation(federation("mtfeel", seed), engine="numpy", link=link).run()
        untrained = next(row["test_accuracy"] for row in free.rows if "test_accuracy" in row)
        good, bad = float(free.test_accuracy.mean()), float(lossy.test_accuracy.mean())
        erased = np.mean([row["erased"] / row["signals"] for row in lossy.rows if row["phase"] == "signs"])
        kept.append((bad - untrained) / (good - untrained))
        rows += [
            {"what": f"seed {seed}: share of sign vectors erased", "value": float(erased)},
            {
                "what": f"seed {seed}: test accuracy untrained / error free / erased",
                "value": f"{untrained:.3f} / {good:.3f} / {bad:.3f}",
            },
        ]
    rows.append({"what": "share of the gain kept, mean", "value": float(np.mean(kept)), "target": ">= 0.5"})
    show("MtFEEL, 30 devices, 300 rounds, Rayleigh at -10 dB, r = 0.3", rows, arguments.json)


if __name__ == "__main__":
    main()
