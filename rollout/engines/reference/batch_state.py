"""The torch engine's state of each response in flight: its tokens, token budget and sampling settings."""

import numpy as np
import torch
from torch import Tensor

from areal_q.config import Sampling
from areal_q.config.engines import pages_of
from areal_q.models.config import DecoderConfig
from rollout.engines.base import Request
from rollout.engines.reference.kv_cache import States, grown
from rollout.engines.reference.page_pool import NOTHING
from rollout.engines.reference.sampling import seed_keys


class BatchState:
    """The state of all rows in tensors whose first dimension is the slot, so that a step needs no loop over
    rows."""

    def __init__(self, config: DecoderConfig, device: str) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.ids = empty(0, 0)
        """Prompt and response so far, int64 [slots, max_len]"""
        self.logprobs = empty(0, 0, dtype=torch.float32)
        """Log-probs of `ids` in nats, float32 [slots, max_len]; those of the prompt have no meaning."""
        self.pages = empty(0, 0)
        """Pages of the KV cache that hold the rows' tokens, int64 [slots, W]; NOTHING where there are none"""
        self.length = empty(0)
        """Number of tokens in `ids`, int64 [slots]; all but the last have keys and values in the cache."""
        self.end = empty(0)
        """Length at which the row's token budget is spent, int64 [slots]"""
        self.keys = empty(0)
        """Keys of the rows' streams of random numbers, int64 [slots]"""
        self.stops = empty(0, 1)
        """Ids that end the response, int64 [slots, S], padded with -1"""
        self.temperature = empty(0, dtype=torch.float32)
        self.top_k = empty(0)
        self.top_p = empty(0, dtype=torch.float32)
        self.min_p = empty(0, dtype=torch.float32)
        self.inputs, self.memory = States.empty(config, device, 0)

    def reserve(self, slots: int, length: int) -> None:
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor):
                wide = {"ids": length, "logprobs": length, "pages": pages_of(length)}.get(name, 0)
                setattr(
                    self, name, grown(tensor, {0: slots, 1: wide}, -1 if name == "stops" else 0)
                )

    def narrow(self, stops: int) -> None:
        """Narrows `stops` to `stops` ids for each row, since each step compares every token with all of
        them."""
        if self.stops.shape[1] > max(1, stops):
            self.stops = self.stops[:, : max(1, stops)].contiguous()

    def fill(self, end: int, requests: list[Request]) -> None:
        """Sets up the rows of `requests`, the last of which ends at row `end`."""
        copies = torch.tensor([r.num_samples for r in requests])
        rows = slice(end - int(copies.sum()), end)
        widest = max(len(r.stop_ids) for r in requests)
        self.stops = grown(self.stops, {1: widest}, -1)
        width = max(len(r.prompt_ids) for r in requests)
        prompts = np.zeros((len(requests), width), np.int64)
        stops = np.full((len(requests), self.stops.shape[1]), -1, np.int64)
        for i, request in enumerate(requests):
            prompts[i, : len(request.prompt_ids)] = request.prompt_ids
            stops[i, : len(request.stop_ids)] = list(request.stop_ids)

        def spread(values: object) -> Tensor:
            spread = torch.as_tensor(values).repeat_interleave(copies, 0)
            return spread.to(self.device, non_blocking=True)

        lengths = np.array([len(r.prompt_ids) for r in requests])
        sampling: list[Sampling] = [r.sampling for r in requests]
        self.ids[rows, :width] = spread(prompts)
        self.stops[rows] = spread(stops)
        self.length[rows] = spread(lengths)
        self.end[rows] = spread(lengths + np.array([s.max_tokens for s in sampling], np.int64))
        self.temperature[rows] = spread([s.temperature for s in sampling]).float()
        self.top_k[rows] = spread(np.array([s.top_k for s in sampling], np.int64))
        self.top_p[rows] = spread([s.top_p for s in sampling]).float()
        self.min_p[rows] = spread([s.min_p for s in sampling]).float()
        seeds = [r.seed + i for r in requests for i in range(r.num_samples)]
        self.keys[rows] = seed_keys(seeds).to(self.device, non_blocking=True)

    def fill_pages(self, first: int, tables: list[list[int]]) -> None:
        """Sets the pages of the rows from `first` on."""
        found = np.full((len(tables), self.pages.shape[1]), NOTHING, np.int64)
        for row, pages in zip(found, tables, strict=True):
            row[: len(pages)] = pages
        moved = torch.from_numpy(found).to(self.device, non_blocking=True)
        self.pages[first : first + len(tables)] = moved

    @property
    def states(self) -> States:
        """What layers that keep a state have of the rows: all tokens but the last."""
        return States(self.inputs, self.memory)

    def put_pages(self, slots: list[int], at: list[int], pages: list[int]) -> None:
        """Sets page at[i] of row slots[i] to pages[i]."""
        rows, columns, values = torch.tensor([slots, at, pages]).to(self.device, non_blocking=True)
        self.pages[rows, columns] = values

    def append(self, rows: int, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Appends tokens int64 [rows] with log-probs float32 [rows] to the first rows. Returns bool [rows],
        True for the rows that are done."""
        length = self.length[:rows]
        at = length.unsqueeze(1)
        self.ids[:rows].scatter_(1, at, tokens.unsqueeze(1))
        self.logprobs[:rows].scatter_(1, at, logprobs.unsqueeze(1))
        length += 1
        stopped = (tokens.unsqueeze(1) == self.stops[:rows]).any(1)
        return stopped.logical_or_(length >= self.end[:rows])

    def read(self, slots: list[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Returns ids [S, max_len], log-probs [S, max_len] and lengths [S] of the S slots, on the host."""
        at = torch.tensor(slots, device=self.device)
        ids, logprobs = self.ids[at].cpu().numpy(), self.logprobs[at].cpu().numpy()
        return ids, logprobs, self.length[at].tolist()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for tensor in vars(self).values():
            if isinstance(tensor, Tensor):
                tensor[targets] = tensor[sources]
