"""The method interface: a learning algorithm in two halves that meet only through messages.

A whole method, to show the contract. Each device reports the gradient of its loss; the gateway averages:

    class Server(MethodServer):
        def __init__(self, settings):
            super().__init__(settings)
            self.task = settings.tasks[0]
            self.w = settings.initial(self.task)

        def next(self, roster):
            self.round += 1
            if self.round > self.settings.rounds:
                return None
            answers = {(self.task.name, "gradient"): SignalSpec("float32")}
            return self.exchange("train", roster, answers, shared={(self.task.name, "w"): self.w})

        def absorb(self, exchange, reception):
            arrived = [reception.get(name, (self.task.name, "gradient")) for name in reception.reports]
            if arrived:
                self.w = self.w - np.float32(0.1) * np.mean(arrived, axis=0)
            return {"devices": len(arrived)}

        def parameters_for(self, device):
            return self.w

        def state(self):
            return super().state() | {"w": self.w}

    class Client(MethodClient):
        def respond(self, call):
            w = call.shared[self.task.name, "w"][None, None]
            _, gradient = call.engine.loss_and_gradient(self.task.name, w, call.fleet.train)
            return [(Report({(self.task.name, "gradient"): g[0]}), {}) for g in gradient]

Servers are plain NumPy and know nothing of MQTT, files or clocks. Clients are written over the fleet axis: the
simulator answers for a thousand devices in one call, a board for a fleet of one, with the same code.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fadefed.errors import NonFiniteError
from fadefed.learning import Batch, Engine, Task
from fadefed.learning.task import accuracy
from fadefed.messages import Array, Exchange, Key, Order, Reception, Report, Scalar, SignalSpec
from fadefed.messages.codecs import Coded, encode, encode_with_feedback
from fadefed.messages.wire import Body, CodedReport
from fadefed.streams import Label, random_bytes, stream
from fadefed.tasks import Fleet

State = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """A device on the roster: its id, its permanent number (counts from 0) and its training examples."""

    name: str
    number: int
    samples: int


Roster = Mapping[str, Device]
"""Devices that are online now, by id, in order of their numbers."""


@dataclass(frozen=True)
class Settings:
    """What every server is built from. `options` is the method's own Config."""

    tasks: tuple[Task, ...]
    rounds: int
    seed: int
    options: Any
    evaluate_every: int = 1

    def initial(self, task: Task) -> Array:
        """The initial parameters [d] of `task`, from the stream (seed, "initial", task)."""
        return task.initial(stream(self.seed, "initial", task.name))


class MethodServer(ABC):
    """The gateway's half. The runtime calls `next`, carries the exchange out, calls `absorb`, and checkpoints."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.round = 0

    @abstractmethod
    def next(self, roster: Roster) -> Exchange | None:
        """The next exchange, or None when the method has finished.

        A device is asked by an order in the exchange; the method decides which devices of the roster to ask.
        """

    @abstractmethod
    def absorb(self, exchange: Exchange, reception: Reception) -> dict[str, Any]:
        """Learn from what arrived; what is missing is an outage, not an error. Returns metrics."""

    @abstractmethod
    def parameters_for(self, device: str) -> Array | None:
        """The parameters [d] that `device` will run; None when only the device knows them."""

    def joined(self, device: Device) -> None:  # noqa: B027 (most methods need not know)
        """`device` came onto the roster, for the first time or again."""

    def left(self, device: str) -> None:  # noqa: B027
        """`device` went off the roster."""

    def state(self) -> State:
        """All that `restore` needs to go on as if nothing had happened, to the bit."""
        return {"round": self.round}

    def restore(self, state: State) -> None:
        """Take up `state`, as `state()` gave it. The default sets attributes of the same names."""
        for name, value in state.items():
            setattr(self, name, value)

    def exchange(
        self,
        phase: str,
        roster: Roster,
        answers: dict[Key, SignalSpec],
        shared: dict[Key, Array] | None = None,
        orders: dict[str, Order] | None = None,
    ) -> Exchange:
        """An exchange of this round with all of `roster`, or with those in `orders`; slot = round.

        Asks for an evaluation (`evaluate`) in the rounds that the settings say.
        """
        orders = orders if orders is not None else {name: Order() for name in roster}
        if self.evaluates():
            for order in orders.values():
                order.scalars["evaluate"] = True
        return Exchange(self.round, phase, self.round, orders, answers, shared or {})

    def evaluates(self) -> bool:
        """Whether devices measure accuracy in this round."""
        every = self.settings.evaluate_every
        return self.round >= 1 and (self.round - 1) % every == 0


@dataclass
class Call:
    """One exchange as the clients of a fleet see it.

    orders, numbers, states: one per device of `fleet`, in its order. `shared` is the same for all.
    """

    exchange: Exchange
    orders: Sequence[Order]
    numbers: Sequence[int]
    shared: dict[Key, Array]
    fleet: Fleet
    engine: Engine
    states: Sequence[State]
    seed: int

    def rng(self, b: int, label: Label) -> np.random.Generator:
        """Device b's randomness of this round for the purpose `label`: the same in every runtime."""
        return stream(self.seed, "device", self.exchange.round, label, counter=self.numbers[b])

    def batch(self, b: int) -> Batch:
        """Device b's training examples as a fleet of one, without padding."""
        return self.fleet.device(b).train if len(self.fleet) > 1 else self.fleet.train


class MethodClient(ABC):
    """The board's half."""

    def __init__(self, tasks: Sequence[Task], options: Any) -> None:
        self.task = tasks[0]
        self.options = options

    @abstractmethod
    def respond(self, call: Call) -> Iterable[tuple[Report, State]]:
        """One (report, new state) per device of the fleet, in order.

        A generator is welcome: each report is coded before the next one is asked for, so tensors may be views of a
        buffer that is used again.
        """

    def parameters(self, order: Order, state: State) -> Array:
        """What this device will run, given the final order: by default the parameters that the server sends."""
        return order.tensors[self.task.name, "parameters"]

    def evaluation(self, call: Call, params: Array) -> list[dict[str, Scalar]]:
        """For each device asked to evaluate, accuracy of params [B or 1, d] on its own test and train examples."""
        results: list[dict[str, Scalar]] = []
        for b, order in enumerate(call.orders):
            if not order.scalars.get("evaluate"):
                results.append({})
                continue
            one = call.fleet.device(b) if len(call.fleet) > 1 else call.fleet
            own = params[b if len(params) > 1 else 0]
            results.append(evaluate(self.task, call.engine, own, one))
        return results


def evaluate(task: Task, engine: Engine, params: Array, one: Fleet) -> dict[str, Scalar]:
    """Accuracy of params [d] on one device's train and, where it has any, test examples."""
    result: dict[str, Scalar] = {}
    for name, batch in (("train_accuracy", one.train), ("test_accuracy", one.test)):
        if batch.y.shape[1]:
            outputs = engine.predict(task.name, params[None], batch.x[0])
            result[name] = float(accuracy(outputs[None], batch)[0, 0])
    return result


def answer(client: MethodClient, call: Call) -> list[tuple[CodedReport, State]]:
    """Respond and code: what a device commits and sends, one (coded report, new state) per device of the fleet.

    Sign ties are keyed by (seed, round, signal, device). Error-feedback residuals live in the state, beside the
    method's own. A device whose signals are not finite answers with an error instead and keeps its state.
    """
    inner = [state.get("method", {}) for state in call.states]
    responses = client.respond(replace(call, states=inner))
    answers = []
    for number, old, (report, new) in zip(call.numbers, call.states, responses, strict=True):
        residuals = dict(old.get("residuals", {}))
        common = {"exchange": call.exchange.number, "slot": call.exchange.slot, "number": number}
        try:
            bodies = tuple(
                Body(key, *_code(call, number, key, tensor, residuals)) for key, tensor in report.signals.items()
            )
        except NonFiniteError as error:
            message = f"{error} in round {call.exchange.round}, phase {call.exchange.phase}."
            answers.append((CodedReport(**common, bodies=(), error=message), old))  # type: ignore[arg-type]
            continue
        coded = CodedReport(**common, bodies=bodies, scalars=report.scalars)  # type: ignore[arg-type]
        state: State = {"method": new}
        if residuals:
            state["residuals"] = residuals
        answers.append((coded, state))
    return answers


def _code(call: Call, number: int, key: Key, tensor: Array, residuals: State) -> tuple[Coded, Any]:
    spec = call.exchange.spec(key)
    if spec is None:
        raise ValueError(f"The method reports {key}, which exchange {call.exchange.number} does not ask for.")

    def tie_bits(count: int) -> Array:
        return random_bytes(call.seed, "ties", call.exchange.round, *key, counter=number, count=count)

    ties = tie_bits if spec.ties == "random" else None
    name = "/".join(key)
    try:
        if spec.codec == "sign-feedback":
            coded, residuals[name] = encode_with_feedback(tensor, residuals.get(name), ties)
        else:
            coded = encode(spec.codec, tensor, ties)
    except NonFiniteError as error:
        raise NonFiniteError(f"Signal {name}: {error}") from error
    return coded, spec.access


def mean_metrics(reception: Reception) -> dict[str, float]:
    """Means over devices of the numbers they reported: losses and accuracies."""
    sums: dict[str, list[float]] = {}
    for scalars in reception.scalars.values():
        for name, value in scalars.items():
            if isinstance(value, float):
                sums.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sums.items()}


@dataclass(frozen=True)
class Method:
    """A method's name, configuration, and its two halves, for the registry."""

    name: str
    config: type[Any]
    server: type[MethodServer]
    client: type[MethodClient]
