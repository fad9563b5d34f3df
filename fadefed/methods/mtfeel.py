"""MtFEEL: a personal model per device, trained on a learned mixture of all devices' losses.

Mahara, Shruti M., Bharath, Murthy: Multi-task Federated Edge Learning (MtFEEL) in Wireless Networks. Equation numbers
are the paper's; G-numbers name the resolutions of its gaps:

G2  the discrepancy ascent follows sign(L_k - L_j)(g_k - g_j); the printed eq. 8 descends.
G3  discrepancies restart at w0 for every pair, keep the running maximum, and have diagonal 0.
G4  kappa comes from a cover of the simplex; the smallest literal constant makes every device rely on itself alone.
G5  the penalty uses 1/n_j, as McDiarmid's inequality gives; `pen_exponent = 2` is the printed form.
G6  eq. 10's third term is printed sqrt(2) too large.
G13 the alpha step comes first in each round, with fresh losses: the printed recursion, re-indexed.
G14 projection onto the simplex is Euclidean.

Rows k own models, columns m own data: X[k, m] is model k on device m's examples, and device m computes it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fadefed.errors import ConfigError
from fadefed.messages import Array, Exchange, Key, Order, Reception, Report, Scalar, SignalSpec
from fadefed.methods.method import (
    Call,
    Device,
    MethodClient,
    MethodServer,
    Roster,
    Settings,
    State,
    mean_metrics,
)
from fadefed.methods.one_model import weighted_sum
from fadefed.streams import stream

STALL_LIMIT = 3  # discrepancy exchanges without any progress before training goes on without the missing pairs


@dataclass(frozen=True)
class Config:
    """Options; the defaults are the sound form (spec section 9).

    eta, mu: step sizes of weights and alpha, by default 1/sqrt(rounds). gamma: weight-norm factor.
    kappa: penalty constant, by default M sqrt(N/2 log(cover/delta)) with an L1 cover of radius cover_radius (G4).
    exchange: `two-phase` asks for losses, steps alpha, and then only for the signs that alpha uses; `full` asks for
      everything at once. Both give the same models.
    on_outage: a lost sign vector counts zero (`drop`), is renormalised away, is replaced by the last received one
      (`hold`), or by random signs (`garbage`).
    profile: `paper-literal` takes the printed penalty exponent 2 and diagonal 1; with `sqrt2_error`, eq. 10 as printed.
    """

    eta: float | None = None
    mu: float | None = None
    gamma: float = 0.0
    kappa: float | None = None
    delta: float = 0.05
    cover_radius: float = 0.1
    pen_exponent: Literal[1, 2] | None = None
    diagonal: Literal["zero", "one", "rowmin"] | None = None
    profile: Literal["sound", "paper-literal"] = "sound"
    sqrt2_error: bool = False
    dde_steps: int = 10
    dde_rate: float = 0.05
    exchange: Literal["two-phase", "full"] = "two-phase"
    skip_first_alpha_step: bool = False
    frozen_alpha: bool = False
    on_outage: Literal["drop", "renorm", "hold", "garbage"] = "drop"
    sign_codec: Literal["sign", "ternary"] = "sign"
    ties: Literal["random", "plus"] = "random"

    def __post_init__(self) -> None:
        if self.dde_steps < 0 or self.dde_rate <= 0:
            raise ConfigError("dde_steps must be at least 0 and dde_rate above 0.")
        if not (0 < self.delta < 1 and self.cover_radius > 0):
            raise ConfigError("delta must lie between 0 and 1, and cover_radius above 0.")
        if self.on_outage == "hold" and self.sign_codec == "ternary":
            raise ConfigError('on_outage = "hold" keeps one bit per parameter and cannot hold ternary signs.')

    @property
    def exponent(self) -> int:
        return self.pen_exponent or (2 if self.profile == "paper-literal" else 1)

    @property
    def diagonal_policy(self) -> str:
        return self.diagonal or ("one" if self.profile == "paper-literal" else "zero")


def project_simplex(v: Array) -> Array:
    """Euclidean projection of each row of v [..., N] onto the probability simplex, float64, by sorting (spec 3.4)."""
    v = np.asarray(v, dtype=np.float64)
    u = -np.sort(-v, axis=-1)
    c = np.cumsum(u, axis=-1) - 1
    index = np.arange(1, v.shape[-1] + 1)
    r = (u - c / index > 0).sum(axis=-1, keepdims=True)
    tau = np.take_along_axis(c, r - 1, axis=-1) / r
    return np.asarray(np.maximum(v - tau, 0))


def default_kappa(loss_bound: float, devices: int, delta: float, cover_radius: float) -> float:
    """M sqrt(N/2 log(cover/delta)), log cover = (N - 1) log(1 + 2/eps) (G4)."""
    log_cover = (devices - 1) * math.log(1 + 2 / cover_radius) + math.log(1 / delta)
    return loss_bound * math.sqrt(devices / 2 * log_cover)


def penalised_objective(
    alpha: Array, losses: Array, discrepancy: Array, lam: Array, n: Array, kappa: float, exponent: int
) -> float:
    """Psi_hat without its weight norms (eq. 7): mixture loss + kappa sqrt(sum (lam A)^2 / n^e) + sum lam A d."""
    weighted = lam[:, None] * alpha
    return float((weighted * (losses + discrepancy)).sum() + kappa * math.sqrt((weighted**2 / n**exponent).sum()))


def alpha_gradient(
    alpha: Array,
    losses: Array,
    discrepancy: Array,
    lam: Array,
    n: Array,
    kappa: float,
    exponent: int,
    sqrt2_error: bool = False,
) -> Array:
    """d Psi_hat / d alpha [N, N] (eq. 10, corrected by G6): lam L + lam D + kappa lam^2 A / n^e / sqrt(Sq)."""
    weighted = lam[:, None] * alpha
    square = (weighted**2 / n**exponent).sum()
    if sqrt2_error:
        square = square / 2
    third = kappa * lam[:, None] * weighted / n**exponent / math.sqrt(square)
    return np.asarray(lam[:, None] * (losses + discrepancy) + third)


def gap_subgradient(loss_j: float, loss_k: float, gradient_j: Array, gradient_k: Array) -> Array:
    """A subgradient of |L_k - L_j| (eq. 8, corrected by G2): sign(L_k - L_j)(g_k - g_j)."""
    return np.asarray(np.sign(loss_k - loss_j) * (gradient_k - gradient_j))


def weighted_sign_sum(signs: Mapping[int, Array], weights: Array, d: int) -> Array:
    """sum_m weights[m] signs[m] [d], float64, for sign vectors of -1 and +1 only (any that is missing counts zero).

    Seven devices at a time: their bits make an index, and a table of 128 partial sums does the rest. Vectors of weight
    zero are left out before they are grouped, so they change no bit of the result.
    """
    total = np.zeros(d, dtype=np.float64)
    partial, pattern, bits = np.empty(d, dtype=np.float64), np.empty(d, dtype=np.uint8), np.empty(d, dtype=np.uint8)
    members = [m for m in sorted(signs) if weights[m] != 0]
    for start in range(0, len(members), 7):
        pattern[:] = 0
        table = np.zeros(2, dtype=np.float64)
        for position, m in enumerate(members[start : start + 7], start=1):
            # -1 is 0xff and +1 is 0x01: any bit but the lowest tells them apart. (A shift would be slower.)
            np.bitwise_and(signs[m].view(np.uint8), np.uint8(1 << position), out=bits)
            np.bitwise_or(pattern, bits, out=pattern)
            table = np.concatenate([table + weights[m], table - weights[m]])
        # mode="clip" lets NumPy write into `partial` directly; every index is within the table.
        total += np.take(table, pattern, out=partial, mode="clip")
    return total


class Server(MethodServer):
    """Discrepancies first (spec 3.3), then rounds of losses, alpha step, signs, weight step (spec 3.5).

    State arrays over N devices that ever joined, in order of their numbers: W [N, d], A, D and L [N, N].
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.task = settings.tasks[0]
        self.options: Config = settings.options
        self.w0 = settings.initial(self.task)
        d = self.w0.size
        self.names: list[str] = []
        self.waiting: list[list[Any]] = []  # (name, samples) of devices that joined within a round
        self.n = np.zeros(0)
        self.W = np.zeros((0, d), dtype=self.w0.dtype)
        self.A = np.zeros((0, 0))
        self.D = np.zeros((0, 0))
        self.L = np.zeros((0, 0))
        self.models_number = 0  # the exchange that published the models of this round
        self.held: dict[str, Array] = {}  # "k/m" -> packed signs, for on_outage = "hold"
        # Pairs whose discrepancy is not done: (j, k), steps done, trial parameters, best gap so far.
        self.pairs: list[list[int]] = []
        self.pair_step = np.zeros(0, dtype=np.int64)
        self.trials = np.zeros((0, d), dtype=self.w0.dtype)
        self.stalled = 0
        self.phase = "losses"
        self._asked: list[int] = []

    # --- the roster ---------------------------------------------------------------------------------------

    def joined(self, device: Device) -> None:
        self.stalled = 0
        if device.name not in self.names and [device.name, device.samples] not in self.waiting:
            self.waiting.append([device.name, device.samples])

    def admit_waiting(self) -> None:
        """Give every device that is waiting its row and column. `next` does so between rounds."""
        for name, samples in self.waiting:
            self._admit(name, samples)
        self.waiting = []

    def _admit(self, name: str, samples: int) -> None:
        """A row and a column for a new device. Only between rounds: within one, models and masks must fit."""
        size = len(self.names)
        self.names.append(name)
        self.n = np.append(self.n, float(samples))
        self.W = np.concatenate([self.W, self.w0[None]])
        bound = self.task.loss_bound
        self.L = _grown(self.L, bound)
        self.D = _grown(self.D, bound if math.isfinite(bound) else 1.0)
        self.D[-1, -1] = 0.0
        self.A = _grown(self.A, 0.0)
        if self.round == 0:
            self.A[:] = 1 / (size + 1)
        else:
            self.A[-1] = 1 / (size + 1)
        self.pairs += [[j, size] for j in range(size)]
        self.pair_step = np.concatenate([self.pair_step, np.zeros(size, dtype=np.int64)])
        self.trials = np.concatenate([self.trials, np.repeat(self.w0[None], size, axis=0)])

    @property
    def lam(self) -> Array:
        """lambda_k = n_k / n [N] (G1)."""
        return np.asarray(self.n / self.n.sum())

    @property
    def kappa(self) -> float:
        options = self.options
        if options.kappa is not None:
            return options.kappa
        return default_kappa(self.task.loss_bound, len(self.names), options.delta, options.cover_radius)

    @property
    def step_size(self) -> float:
        return 1 / math.sqrt(self.settings.rounds)

    def _key(self, name: str) -> Key:
        return (self.task.name, name)

    # --- exchanges ----------------------------------------------------------------------------------------

    def next(self, roster: Roster) -> Exchange | None:
        if self.phase == "losses":
            self.admit_waiting()
            if self.pairs and self.stalled < STALL_LIMIT and not self.options.frozen_alpha:
                exchange = self._discrepancy_exchange(roster)
                if exchange is not None:
                    return exchange
            if self.round >= self.settings.rounds:
                return None
            self.round += 1
            return self._losses_exchange(roster)
        return self._signs_exchange(roster)

    def _discrepancy_exchange(self, roster: Roster) -> Exchange | None:
        """Both devices of every unfinished pair evaluate the pair's trial parameters; None when nobody can."""
        online = {i for i, name in enumerate(self.names) if name in roster}
        self._asked = [p for p, (j, k) in enumerate(self.pairs) if j in online and k in online]
        orders: dict[str, Order] = {}
        for i in sorted(online):
            mine = [p for p in self._asked if i in self.pairs[p]]
            if not mine:
                continue
            moved = [p for p in mine if self.pair_step[p] > 0]
            order = Order(scalars={"initial": len(moved) < len(mine)})
            order.scalars["gradients"] = bool((self.pair_step[mine] < self.options.dde_steps).any())
            if moved:
                order.tensors[self._key("trials")] = self.trials[moved]
            orders[self.names[i]] = order
        if not orders:
            return None
        spec = SignalSpec(self.task.dtype)
        names = ("losses", "gradients", "initial_loss", "initial_gradient")
        answers = {self._key(name): spec for name in names}
        exchange = Exchange(self.round, "discrepancy", self.round, orders, answers, {self._key("initial"): self.w0})
        exchange.shared_number = self.models_number if self.round == 0 and self.models_number else None
        return exchange

    def _losses_exchange(self, roster: Roster) -> Exchange:
        full = self.options.exchange == "full"
        answers = {self._key("losses"): SignalSpec(self.task.dtype)}
        if full:
            answers[self._key("sign")] = self._sign_spec
        orders = {name: Order(scalars={"row": self.names.index(name)}) for name in roster if name in self.names}
        return self.exchange("full" if full else "losses", roster, answers, {self._key("models"): self.W}, orders)

    def _signs_exchange(self, roster: Roster) -> Exchange:
        """Only the signs that this round's alpha uses (spec 8.2, item 2)."""
        orders = {}
        for m, name in enumerate(self.names):
            mask = self.A[:, m] > 0
            if name in roster and mask.any():
                orders[name] = Order({self._key("support"): mask})
        answers = {self._key("sign"): self._sign_spec}
        exchange = Exchange(self.round, "signs", self.round, orders, answers, {self._key("models"): self.W})
        exchange.shared_number = self.models_number
        return exchange

    @property
    def _sign_spec(self) -> SignalSpec:
        return SignalSpec(self.options.sign_codec, "digital", self.options.ties)

    def absorb(self, exchange: Exchange, reception: Reception) -> dict[str, Any]:
        if exchange.phase == "discrepancy":
            if not self.models_number:
                self.models_number = exchange.number
            return self._absorb_discrepancy(reception)
        if exchange.phase == "signs":
            self.phase = "losses"
            return self._weight_step(exchange, reception)
        for m, name in enumerate(self.names):
            losses = reception.get(name, self._key("losses"))
            if losses is not None and losses.shape == (len(self.names),):
                self.L[:, m] = losses
        metrics: dict[str, Any] = mean_metrics(reception) | self._alpha_step()
        if exchange.phase == "full":
            return metrics | self._weight_step(exchange, reception)
        self.models_number = exchange.number
        self.phase = "signs"
        return metrics

    # --- discrepancy (spec 3.3) ---------------------------------------------------------------------------

    def _absorb_discrepancy(self, reception: Reception) -> dict[str, Any]:
        """One ascent step for every asked pair whose two devices both answered."""
        answers: dict[tuple[int, int], tuple[float, Array | None]] = {}
        for i, name in enumerate(self.names):
            mine = [p for p in self._asked if i in self.pairs[p]]
            moved = [p for p in mine if self.pair_step[p] > 0]
            for p, loss, gradient in self._evaluations(reception, name, mine, moved):
                answers[p, i] = (loss, gradient)
        done, progress = [], False
        for p in self._asked:
            j, k = self.pairs[p]
            if (p, j) not in answers or (p, k) not in answers:
                continue
            progress = True
            (loss_j, gradient_j), (loss_k, gradient_k) = answers[p, j], answers[p, k]
            best = 0.0 if self.pair_step[p] == 0 else self.D[j, k]
            self.D[j, k] = self.D[k, j] = max(best, abs(loss_j - loss_k))
            if self.pair_step[p] >= self.options.dde_steps or gradient_j is None or gradient_k is None:
                done.append(p)
                continue
            rate = self.trials.dtype.type(self.options.dde_rate)
            self.trials[p] += rate * gap_subgradient(loss_j, loss_k, gradient_j, gradient_k).astype(self.trials.dtype)
            self.pair_step[p] += 1
        keep = [p for p in range(len(self.pairs)) if p not in set(done)]
        self.pairs = [self.pairs[p] for p in keep]
        self.pair_step, self.trials = self.pair_step[keep], self.trials[keep]
        self.stalled = 0 if progress else self.stalled + 1
        if not self.pairs:
            self._set_diagonal()
        return {"pairs_left": len(self.pairs)}

    def _evaluations(
        self, reception: Reception, name: str, mine: list[int], moved: list[int]
    ) -> list[tuple[int, float, Array | None]]:
        """(pair, loss, gradient or None) that device `name` reported, for the pairs it was asked about."""
        result: list[tuple[int, float, Array | None]] = []
        losses = reception.get(name, self._key("losses"))
        gradients = reception.get(name, self._key("gradients"))
        if losses is not None and losses.shape == (len(moved),):
            usable = gradients is not None and gradients.shape == (len(moved), self.w0.size)
            for row, p in enumerate(moved):
                result.append((p, float(losses[row]), gradients[row] if usable and gradients is not None else None))
        loss = reception.get(name, self._key("initial_loss"))
        gradient = reception.get(name, self._key("initial_gradient"))
        if loss is not None and loss.shape == (1,):
            usable = gradient is not None and gradient.shape == self.w0.shape
            for p in mine:
                if self.pair_step[p] == 0:
                    result.append((p, float(loss[0]), gradient if usable else None))
        return result

    def _set_diagonal(self) -> None:
        policy = self.options.diagonal_policy
        if policy == "one":
            np.fill_diagonal(self.D, 1.0)
        elif policy == "rowmin" and len(self.D) > 1:
            others = self.D + np.where(np.eye(len(self.D)) > 0, np.inf, 0.0)
            np.fill_diagonal(self.D, others.min(axis=1))

    # --- alpha and weight steps (spec 3.5, steps 5 and 6) ----------------------------------------------------

    def _alpha_step(self) -> dict[str, Any]:
        """A <- Proj(A - mu a), all rows at once (eq. 10)."""
        arguments = (self.L, self.D, self.lam, self.n, self.kappa, self.options.exponent)
        objective = penalised_objective(self.A, *arguments) + self.options.gamma * float(
            np.linalg.norm(self.W, axis=1).sum()
        )
        metrics = {"objective": objective, "alpha_step": 0.0}
        if not self.options.frozen_alpha and not (self.round == 1 and self.options.skip_first_alpha_step):
            mu = self.options.mu if self.options.mu is not None else self.step_size
            step = project_simplex(self.A - mu * alpha_gradient(self.A, *arguments, self.options.sqrt2_error))
            metrics["alpha_step"] = float(((step - self.A) ** 2).sum(axis=1).mean())
            self.A = step
        metrics["effective_support"] = float((1 / (self.A**2).sum(axis=1)).mean())
        return metrics

    def _weight_step(self, exchange: Exchange, reception: Reception) -> dict[str, Any]:
        """W_k <- W_k - eta (lam_k sum_m A_km R_km + gamma sign(W_k)) (eq. 9)."""
        eta = self.options.eta if self.options.eta is not None else self.step_size
        moved = 0.0
        for k in range(len(self.names)):
            signs, weights = self._received(k, exchange, reception)
            if self.options.sign_codec == "ternary":
                members = [m for m in sorted(signs) if weights[m] != 0]
                direction = weighted_sum([signs[m] for m in members], weights[members]) if members else np.zeros(1)
            else:
                direction = weighted_sign_sum(signs, weights, self.w0.size)
            step = eta * self.lam[k] * direction
            if self.options.gamma:
                step = step + eta * self.options.gamma * np.sign(self.W[k])
            new = (self.W[k] - step).astype(self.W.dtype)
            change = new - self.W[k]
            moved += float(change @ change)
            self.W[k] = new
        return {"weight_step": moved / max(len(self.names), 1)}

    def _received(self, k: int, exchange: Exchange, reception: Reception) -> tuple[dict[int, Array], Array]:
        """Sign vectors of model k by column m, with what `on_outage` puts in for lost ones, and their weights [N]."""
        signs: dict[int, Array] = {}
        weights = self.A[k].copy()
        policy = self.options.on_outage
        for m in np.flatnonzero(weights > 0):
            vector = reception.get(self.names[m], self._key(f"sign/{k}"))
            if vector is not None and vector.shape == self.w0.shape:
                signs[int(m)] = vector
                if policy == "hold":
                    self.held[f"{k}/{m}"] = np.packbits(vector > 0, bitorder="little")
            elif policy == "hold" and f"{k}/{m}" in self.held:
                bits = np.unpackbits(self.held[f"{k}/{m}"], count=self.w0.size, bitorder="little")
                signs[int(m)] = 2 * bits.astype(np.int8) - 1
            elif policy == "garbage":
                rng = stream(self.settings.seed, "garbage", self.round, k, counter=int(m))
                signs[int(m)] = 2 * rng.integers(0, 2, self.w0.size, dtype=np.int8) - 1
        if policy == "renorm" and signs:
            weights /= weights[sorted(signs)].sum()
        return signs, weights

    # --- results and state ----------------------------------------------------------------------------------

    def parameters_for(self, device: str) -> Array | None:
        return self.W[self.names.index(device)] if device in self.names else self.w0

    def state(self) -> State:
        names = (
            "names",
            "waiting",
            "n",
            "W",
            "A",
            "D",
            "L",
            "models_number",
            "held",
            "pairs",
            "pair_step",
            "trials",
        )
        return super().state() | {name: getattr(self, name) for name in (*names, "stalled", "phase")}


def _grown(square: Array, value: float) -> Array:
    """`square` [N, N] with one more row and column of `value`."""
    grown = np.full((len(square) + 1, len(square) + 1), value)
    grown[:-1, :-1] = square
    return grown


class Client(MethodClient):
    """Evaluates other devices' models on its own examples; never sees their data or alpha."""

    def respond(self, call: Call) -> Iterable[tuple[Report, State]]:
        phase = call.exchange.phase
        if phase == "discrepancy":
            return [(self._discrepancy(call, b), {}) for b in range(len(call.orders))]
        models = call.shared[self._key("models")]
        if phase == "signs":
            masks = np.stack([order.tensors[self._key("support")] for order in call.orders])
            chosen = call.engine.chosen_gradients(self.task.name, models, call.fleet.train, masks)
            return ((Report(self._signals(mask, g)), {}) for mask, g in zip(masks, chosen, strict=True))
        rows = np.array([int(order.scalars["row"]) for order in call.orders])
        measured = self.evaluation(call, models[rows])
        if phase == "full":
            return [(self._full(call, b, models, int(rows[b]), measured[b]), {}) for b in range(len(call.orders))]
        losses = call.engine.losses(self.task.name, models[None], call.fleet.train)
        return [(self._loss_report(losses[b], int(rows[b]), measured[b], {}), {}) for b in range(len(call.orders))]

    def _key(self, name: str) -> Key:
        return (self.task.name, name)

    def _loss_report(self, losses: Array, row: int, measured: dict[str, Scalar], signals: dict[Key, Array]) -> Report:
        return Report({self._key("losses"): losses, **signals}, {"train_loss": float(losses[row]), **measured})

    def _full(self, call: Call, b: int, models: Array, row: int, measured: dict[str, Scalar]) -> Report:
        losses, gradients = call.engine.loss_and_gradient(self.task.name, models[None], call.batch(b))
        signals = self._signals(np.ones(len(models), dtype=bool), gradients[0])
        return self._loss_report(losses[0], row, measured, signals)

    def _signals(self, mask: Array, gradients: Array) -> dict[Key, Array]:
        """Gradients [mask.sum(), d] of the chosen models as the signals sign/k; the codec takes the sign."""
        return {self._key(f"sign/{k}"): gradient for k, gradient in zip(np.flatnonzero(mask), gradients, strict=True)}

    def _discrepancy(self, call: Call, b: int) -> Report:
        """Losses and gradients of trial parameters on this device's examples (spec 3.3)."""
        order, batch = call.orders[b], call.batch(b)
        wanted = [("initial_loss", "initial_gradient", call.shared[self._key("initial")][None])]
        trials = order.tensors.get(self._key("trials"))
        if not order.scalars["initial"]:
            wanted = []
        if trials is not None:
            wanted.append(("losses", "gradients", trials))
        report = Report()
        for loss_name, gradient_name, params in wanted:
            if order.scalars["gradients"]:
                losses, gradients = call.engine.loss_and_gradient(self.task.name, params[None], batch)
                gradient = gradients[0, 0] if gradient_name == "initial_gradient" else gradients[0]
                report.signals[self._key(gradient_name)] = gradient
            else:
                losses = call.engine.losses(self.task.name, params[None], batch)
            report.signals[self._key(loss_name)] = losses[0]
        return report
