"""`fadefed ...`: composes the parts, holds no logic."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fadefed import __version__
from fadefed.errors import ConfigError, FadeFedError


def main(arguments: list[str] | None = None) -> int:
    """The command line. Exit code 0, or 2 with one sentence for a user's mistake, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except FadeFedError as error:
        print(f"fadefed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fadefed", description="Federated learning for edge boards on fading radio links."
    )
    parser.add_argument("--version", action="version", version=f"fadefed {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log every exchange")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=run)
        return sub

    client = add("client", run_client, "Join a federation from this board.")
    client.add_argument("--broker", required=True, metavar="HOST[:PORT]")
    client.add_argument("--data", required=True, metavar="SOURCE", help="path of an .npz file (docs/data.md)")
    client.add_argument("--name", required=True, metavar="ID", help="this device's id")
    client.add_argument("--folder", type=Path, help="what the board keeps (default: ~/.local/share/fadefed/ID)")
    client.add_argument("--stay", action="store_true", help="wait for the next federation when one has finished")
    _broker_options(client)

    aggregator = add("aggregator", run_aggregator, "Run a federation from this gateway.")
    aggregator.add_argument("federation", metavar="FEDERATION.toml")
    aggregator.add_argument("--run", type=Path, help="run folder (default: runs/NAME); an existing one is continued")
    aggregator.add_argument(
        "--wait", type=float, default=30.0, metavar="S", help="how long to try for the broker; 0: for ever"
    )

    channel = add("channel", run_channel, "Emulate a fading link between broker and aggregator.")
    channel.add_argument("link", metavar="LINK.toml", help="a file with a table [channel]")
    channel.add_argument("--broker", required=True, metavar="HOST[:PORT]")
    channel.add_argument(
        "--listen", default="127.0.0.1:1884", metavar="HOST:PORT", help="where the aggregator connects"
    )
    _broker_options(channel)

    simulate = add("simulate", run_simulate, "Run a federation in this process, without a broker.")
    simulate.add_argument("federation", metavar="FEDERATION.toml")
    simulate.add_argument("--mode", choices=("fast", "reference"), default="fast")
    simulate.add_argument("--engine", choices=("onnx", "numpy", "torch"))
    simulate.add_argument("--run", type=Path, help="run folder for metrics.jsonl and summary.json")

    demo = add("demo", run_demo, "Broker, channel, aggregator and ten clients on this machine, on real data.")
    demo.add_argument("--run", type=Path, default=Path("runs/demo"), help="run folder, replaced if it is a demo's")
    demo.add_argument("--rounds", type=int, default=300)
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--snr-db", type=float, default=10.0)
    demo.add_argument("--broker", choices=("mosquitto", "iotcore"), help="default: mosquitto where installed")

    broker = add("broker-config", run_broker_config, "Write a mosquitto configuration, access list and passwords.")
    broker.add_argument("folder", type=Path)
    broker.add_argument("--devices", required=True, help="device ids, separated by commas")
    broker.add_argument("--port", type=int, help="default: 8883 with TLS, else 1883")
    broker.add_argument("--listen", default="0.0.0.0", metavar="ADDRESS")
    broker.add_argument("--host", help="the broker's host name or IP address in its certificate; turns TLS on")
    broker.add_argument("--prefix", default="fadefed", help="topic prefix")

    data = add("deal", run_deal, "Deal a federation's pool of real data out to .npz files, one per device.")
    data.add_argument("federation", metavar="FEDERATION.toml")
    data.add_argument("folder", type=Path)

    experiment = add("experiment", run_experiment, "Reproduce a published result.")
    experiment.add_argument("name", choices=("mtfeel",))
    experiment.add_argument("--seeds", default="0-4", help="first-last")
    experiment.add_argument("--out", type=Path, help="also write the table as JSON")
    return parser


def _broker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--username", help="default for a client with a password: its id")
    parser.add_argument("--password-file", type=Path, help="or set FADEFED_PASSWORD")
    parser.add_argument("--ca", help="CA certificate file; turns TLS on")
    parser.add_argument("--prefix", default="fadefed", help="topic prefix")
    parser.add_argument("--keepalive", type=int, default=30, metavar="S")
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="S", help="how long to try for the broker; 0: for ever"
    )


def _address(options: argparse.Namespace, default_user: str | None = None) -> Any:
    from fadefed.mqtt import BrokerAddress

    password = os.environ.get("FADEFED_PASSWORD")
    if options.password_file is not None:
        try:
            password = options.password_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{options.password_file}: cannot be read ({error.strerror}).") from error
    username = options.username or (default_user if password is not None else None)
    return BrokerAddress.parse(options.broker, username=username, password=password, ca=options.ca)


def _on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop())


def run_client(options: argparse.Namespace) -> int:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before NumPy loads: results then repeat to the bit

    from edge_client import Agent, AgentConfig
    from fadefed.mqtt.topics import check_device_name
    from fadefed.tasks import open_source

    name = check_device_name(options.name)
    folder = options.folder or Path.home() / ".local" / "share" / "fadefed" / name
    data = open_source(options.data)
    config = AgentConfig(
        name=name,
        broker=_address(options, name),
        folder=folder,
        prefix=options.prefix,
        keepalive_s=options.keepalive,
        wait_s=options.wait or None,
        stay=options.stay,
    )
    agent = Agent(config, data)
    _on_signals(agent.stop)
    agent.run()
    return 0


def run_aggregator(options: argparse.Namespace) -> int:
    from aggregator import Aggregator
    from fadefed.federation import Federation
    from fadefed.learning.export import export_task
    from fadefed.mqtt import BrokerAddress

    federation = Federation.read(options.federation)
    folder = options.run or Path("runs") / federation.config.name
    graphs = export_task(federation.task, folder / "task")
    broker = federation.broker
    password = broker.password or os.environ.get("FADEFED_PASSWORD")
    address = BrokerAddress(broker.host, broker.port, broker.username, password, broker.ca)
    aggregator = Aggregator(federation, folder, graphs, address, _log_progress)
    _on_signals(aggregator.stop)
    summary = aggregator.run(options.wait or None)
    if summary is None:
        return 130
    print(json.dumps(summary["mean"], indent=2))
    return 0


def _log_progress(row: dict[str, Any]) -> None:
    if "test_accuracy" in row or row["phase"] == "discrepancy":
        shown = {name: row[name] for name in ("train_loss", "test_accuracy", "pairs_left") if name in row}
        text = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        logging.getLogger("fadefed.aggregator").info(
            "round %d, %s: %d of %d reported, %d signals erased  %s",
            row["round"], row["phase"], row["reported"], row["asked"], row["erased"], text,
        )  # fmt: skip


def run_channel(options: argparse.Namespace) -> int:
    from channel_emu import Channel, LinkConfig
    from channel_emu.proxy import Proxy
    from fadefed.config import TomlFile
    from fadefed.mqtt import BrokerAddress, Topics

    listen = BrokerAddress.parse(options.listen)
    broker = _address(options)
    broker.tls_context()
    proxy = Proxy(Channel(LinkConfig.read(TomlFile.read(options.link))), broker, Topics(options.prefix))

    async def serve() -> None:
        try:
            port = await proxy.start(listen.host, listen.port)
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {options.listen} ({error.strerror}). Choose another --listen."
            ) from error
        logging.getLogger("fadefed.channel").info("Listening on %s:%d.", listen.host, port)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await proxy.stop()

    asyncio.run(serve())
    return 0


def run_simulate(options: argparse.Namespace) -> int:
    import contextlib

    from fadefed.federation import Federation
    from fadefed.files import write_atomic
    from fadefed.simulation import Simulation, fast_engine, temporary_graphs

    federation = Federation.read(options.federation)
    engine = options.engine or (federation.config.engine if options.mode == "reference" else fast_engine())
    with contextlib.ExitStack() as stack:
        graphs = stack.enter_context(temporary_graphs(federation.task)) if engine == "onnx" else None
        metrics = None
        if options.run is not None:
            options.run.mkdir(parents=True, exist_ok=True)
            metrics = stack.enter_context((options.run / "metrics.jsonl").open("w"))
        result = Simulation(federation, mode=options.mode, engine=engine, graphs=graphs).run(metrics)
    summary = result.summary()
    if options.run is not None:
        write_atomic(options.run / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    print(json.dumps(summary["mean"], indent=2))
    return 0


def run_demo(options: argparse.Namespace) -> int:
    from fadefed.demo import run

    return run(options.run, options.rounds, options.seed, options.snr_db, options.broker)


def run_broker_config(options: argparse.Namespace) -> int:
    from fadefed.mqtt.broker_config import write_broker_config

    devices = [name.strip() for name in options.devices.split(",") if name.strip()]
    written = write_broker_config(
        options.folder,
        devices,
        port=options.port,
        listen=options.listen,
        tls_host=options.host,
        prefix=options.prefix,
    )
    print(f"Start the broker with: mosquitto -c {written.config}")
    print(f"Each user's password lies in {written.credentials}/USER.password; give a board only its own.")
    if written.ca is not None:
        print(f"Give every board {written.ca} and the option --ca.")
    return 0


def run_deal(options: argparse.Namespace) -> int:
    from fadefed.federation import Federation, device_name
    from fadefed.tasks import save_npz

    federation = Federation.read(options.federation)
    for number, dataset in enumerate(federation.deal()):
        save_npz(options.folder / f"{device_name(number)}.npz", dataset)
    print(f"{federation.config.devices} files in {options.folder}")
    return 0


def run_experiment(options: argparse.Namespace) -> int:
    from fadefed.experiments import mtfeel

    first, _, last = options.seeds.partition("-")
    if not (first.isdigit() and (last or first).isdigit()):
        raise ConfigError(f"--seeds {options.seeds}: give FIRST-LAST, 0-4 say.")
    return mtfeel.run(list(range(int(first), int(last or first) + 1)), options.out)


if __name__ == "__main__":
    sys.exit(main())
