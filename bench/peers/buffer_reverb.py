"""dm-reverb: one table, first in first out, each item sampled once; server and client in processes of their
own, gRPC on loopback between them.

Durable: `checkpoint()` writes the whole table; between checkpoints nothing is on disk.
"""

import subprocess
import sys
import time

import reverb  # pyright: ignore[reportMissingImports]
from buffer_rows import arguments, make_group, report, resident_bytes, summary, timed


def serve(count: str, directory: str) -> None:
    table = reverb.Table(
        name="t",
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=int(count) + 1,
        max_times_sampled=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    checkpointer = reverb.checkpointers.DefaultCheckpointer(path=directory)
    server = reverb.Server(tables=[table], port=None, checkpointer=checkpointer)
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def main() -> None:
    tokens, responses, count, directory = arguments()
    groups = [make_group(n, tokens, responses) for n in range(count)]
    command = [sys.executable, __file__, "serve", str(count), str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        client = reverb.Client(f"localhost:{int(server.stdout.readline())}")
        client.insert(groups[0], priorities={"t": 1.0})
        list(client.sample("t", 1))
        before = resident_bytes(server.pid)
        times = timed(lambda group: client.insert(group, priorities={"t": 1.0}), groups)
        after = resident_bytes(server.pid)
        began = time.perf_counter()
        client.checkpoint()
        persist_s = time.perf_counter() - began
        began = time.perf_counter()
        seen = sum(len(sample) for sample in client.sample("t", num_samples=count))
        out_s = time.perf_counter() - began
        server.stdin.close()
    assert seen == count, seen
    in_s, p99_s = summary(times)
    report(in_s=in_s, p99_s=p99_s, out_s=out_s, persist_s=persist_s, grown=after - before)


if sys.argv[1] == "serve":
    serve(*sys.argv[2:])
else:
    main()
