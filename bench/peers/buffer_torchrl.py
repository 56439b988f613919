"""torchrl's replay buffer, in the process that uses it: no server, no other process can write to it.

Durable: LazyMemmapStorage, whose files the kernel writes when it likes, and `dumps` for what else is needed.
"""

import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from buffer_rows import arguments, make_group, report, resident_bytes, summary, timed  # noqa: E402
from tensordict import TensorDict  # noqa: E402  # pyright: ignore[reportMissingImports]
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer  # noqa: E402  # pyright: ignore[reportMissingImports]
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement  # noqa: E402  # pyright: ignore[reportMissingImports]


def main() -> None:
    tokens, responses, count, directory = arguments()
    groups = [
        TensorDict({k: torch.from_numpy(v) for k, v in make_group(n, tokens, responses).items()})
        for n in range(count)
    ]
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(count + 1, scratch_dir=directory / "memmap"),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=1,
    )
    buffer.add(groups[0])
    before = resident_bytes()
    times = timed(buffer.add, groups)
    after = resident_bytes()
    began = time.perf_counter()
    buffer.dumps(directory / "dump")
    persist_s = time.perf_counter() - began
    out = timed(lambda _: buffer.sample(1), list(range(count)))
    in_s, p99_s = summary(times)
    report(in_s=in_s, p99_s=p99_s, out_s=sum(out), persist_s=persist_s, grown=after - before)


main()
