"""TransferQueue: its controller and storage units on Ray, as `init()` starts them; a row is a response.

Durable: `save_checkpoint` writes everything; between checkpoints nothing is on disk.
"""

import logging
import time
import warnings

warnings.filterwarnings("ignore")

import ray  # noqa: E402  # pyright: ignore[reportMissingImports]
import torch  # noqa: E402
import transfer_queue as tq  # noqa: E402  # pyright: ignore[reportMissingImports]
from buffer_rows import arguments, make_group, report, resident_bytes, summary, timed  # noqa: E402
from tensordict import TensorDict  # noqa: E402  # pyright: ignore[reportMissingImports]


def main() -> None:
    tokens, responses, count, directory = arguments()
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    tq.init()
    rows = [
        TensorDict(
            {k: torch.from_numpy(v) for k, v in make_group(n, tokens, responses).items()},
            batch_size=responses,
        )
        for n in range(count)
    ]
    keys = [[f"{n}-{i}" for i in range(responses)] for n in range(count)]

    def put(n: int) -> None:
        tq.kv_batch_put(keys=keys[n], partition_id="train", fields=rows[n])

    tq.kv_batch_put(keys=["warm"], partition_id="warm", fields=rows[0][:1])
    before = resident_bytes()
    times = timed(put, list(range(count)))
    after = resident_bytes()
    began = time.perf_counter()
    tq.save_checkpoint(directory / "checkpoint")
    persist_s = time.perf_counter() - began
    out = timed(lambda n: tq.kv_batch_get(keys[n], "train"), list(range(count)))
    in_s, p99_s = summary(times)
    report(in_s=in_s, p99_s=p99_s, out_s=sum(out), persist_s=persist_s, grown=after - before)
    tq.close()
    ray.shutdown()


main()
