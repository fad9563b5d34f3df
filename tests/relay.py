"""A TCP relay in user space that delays, or silences, what passes: `python -m tests.relay PORT TARGET DELAY_S`."""

import asyncio
import sys


class Relay:
    """Forwards connections to a port of this machine, each direction delayed by `delay_s`.

    `silent` set: nothing passes any more and nothing is closed, as when a radio link dies.
    """

    def __init__(self, target: int, delay_s: float = 0.0) -> None:
        self.target, self.delay_s = target, delay_s
        self.silent = False
        self.bytes_up = self.bytes_down = 0

    async def start(self, port: int = 0) -> int:
        server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self._server = server
        return int(server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, up_writer, True), self._pump(up_reader, writer, False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if self.silent:
                    continue
                if not data:
                    writer.close()
                    return
                writer.write(data)

        task = asyncio.create_task(deliver())
        try:
            while data := await reader.read(1 << 18):
                if up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                queue.put_nowait((loop.time() + self.delay_s, data))
        except OSError:
            pass
        queue.put_nowait((loop.time() + self.delay_s, b""))
        await task


async def main(port: int, target: int, delay_s: float) -> None:
    relay = Relay(target, delay_s)
    await relay.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
