"""Any causal language model of transformers as a decoder that learner and engine know.

A packed batch is laid out as padded rows again, since transformers' attention on a CPU knows no packing: a
bucket of the layout is a batch, padded on the right, where no token attends to what is behind it. A prompt that
several responses share is computed for each of them.
"""

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal_q.errors import CheckpointError, said_by
from areal_q.models.config import DecoderConfig
from areal_q.models.decoder import Decoder
from areal_q.models.foreign import COMPUTED_BY, TRANSPOSED
from areal_q.models.hf.foreign_files import check_cache, check_recompute, silent, transformers
from areal_q.models.hf.weight_files import untied
from areal_q.models.layers.linear import Linear
from areal_q.models.layers.moe import Routing
from areal_q.models.layers.norm import wide
from areal_q.models.logprobs import BLOCK, of_logits
from areal_q.models.low_bit.bf16_rounding import roundable, straight
from areal_q.models.packed_layout import PackedLayout
from areal_q.quant import is_quantized

logger = logging.getLogger(__name__)


class HfDecoder(Decoder):
    """A decoder whose layers are transformers' own. Its `state_dict` has their names, each tensor once. Linears
    that transformers has as [in, out] are [out, in] here."""

    def __init__(self, config: DecoderConfig, net: Any) -> None:
        nn.Module.__init__(self)
        self.config, self.dtype = config, torch.float32
        self.behind_head = BehindHead(net)
        # Nothing here is padded with it, and a model's end of text, which often is its pad, is learnt too.
        net.get_input_embeddings().padding_idx = None
        for name, child in net.named_children():
            self.add_module(name, child)
        module: Any
        for name, module in self.named_modules():
            known = is_quantized(f"{name}.weight")
            if known and config.family in TRANSPOSED:
                turned = module.weight.detach().t().contiguous()
                module.weight = nn.Parameter(turned)
                module.out_features, module.in_features = turned.shape
            # `round_rest` knows an embedding, of which it rounds what is looked up alone.
            if module._parameters and type(module) is not nn.Embedding:
                kind: Any = Linear if known else roundable(type(module))
                module.__class__ = kind  # changes the forward pass and keeps the parameters
        self.one_pass = False  # if True, all rows are padded to the longest and computed at once
        self._nets = (net,)  # in a tuple, so that it is no further child

    @property
    def net(self) -> Any:
        """transformers' PreTrainedModel, which shares all modules with this one."""
        return self._nets[0]

    def recompute_layers(self, on: bool) -> None:
        net = self.net
        if not on:
            net.eval()  # layers heed it in training alone; nothing in the model is random
            return
        check_recompute(self.config)
        # The name since 5.2x, and the one before
        enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        net.train()

    def prepare_sharding(self) -> list[nn.Module]:
        self.one_pass = True
        kinds = self.net._no_split_modules or ()
        return [m for m in self.modules() if type(m).__name__ in kinds][::-1]

    def copied_trunk(self) -> Decoder:
        copied = copy.deepcopy(self)
        head = copied.net.get_output_embeddings()
        (name,) = (name for name, child in copied.named_children() if child is head)
        delattr(copied, name)
        delattr(copied.net, name)
        copied.dtype = torch.float32
        return copied

    def forward(
        self, token_ids: Tensor, layout: PackedLayout, routing: Routing | None = None
    ) -> Tensor:
        reduced, batches = self.dtype != torch.float32, [b.rows for b in layout.buckets]
        if self.one_pass:
            batches = [torch.cat([F.pad(b, (0, layout.longest - b.shape[1])) for b in batches])]
        with torch.autocast(token_ids.device.type, self.dtype, enabled=reduced):
            hidden = [
                self.net.base_model(input_ids=token_ids[rows], use_cache=False).last_hidden_state
                for rows in batches
            ]
        if self.one_pass:
            return self.by_token(hidden[0], layout).to(self.dtype)
        return _packed(hidden, layout).to(self.dtype)

    def by_token(self, x: Tensor, layout: PackedLayout) -> Tensor:
        rows = x.reshape(-1, layout.longest, x.shape[-1])
        return _packed(rows.split([len(b.rows) for b in layout.buckets]), layout)

    @property
    def head(self) -> Tensor:
        head = self.net.get_output_embeddings()
        return straight(head.weight) if head.rounds_rest else head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.net.get_output_embeddings()
        return self.behind_head(head(hidden.to(head.weight.dtype)))

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_learns: bool = False,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        cap, scale = self.behind_head.cap, self.behind_head.scale
        if cap is None and self.net.get_output_embeddings().bias is None:
            return super().logprobs(hidden, targets, temperature / scale, entropy_learns, among)
        # Blocks of tokens in place of blocks of the vocabulary: a block's logits are computed again.
        rows = max(1, BLOCK // self.config.vocab_size)
        blocks = hidden.split(rows), targets.split(rows)
        kept = [None] * len(blocks[0]) if among is None else among.split(rows)
        parts = [
            checkpoint(self._whole, *block, temperature, entropy_learns, use_reentrant=False)
            for block in zip(*blocks, kept, strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)  # pyright: ignore[reportArgumentType]
        return torch.cat(logprobs), torch.cat(entropies)

    def _whole(
        self,
        hidden: Tensor,
        targets: Tensor,
        among: Tensor | None,
        temperature: float,
        entropy_learns: bool,
    ) -> tuple[Tensor, Tensor]:
        head = self.net.get_output_embeddings()
        bias = head.bias
        if bias is not None:
            bias = wide(straight(bias) if head.rounds_rest else bias)
        logits = self.behind_head(F.linear(wide(hidden), wide(self.head), bias))
        if among is not None:
            logits = logits.gather(1, among.clamp(min=0)).masked_fill(among < 0, -1e30)
            targets = (among == targets[:, None]).int().argmax(1)
        return of_logits(logits / temperature, targets, entropy_learns)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the tensors by transformers' names; of those that are tied, the first alone."""
        once = {name for name, _ in chain(self.named_parameters(), self.named_buffers())}
        state = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if name in once}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what `state_dict` of this class returns. Raises RuntimeError if a tensor is missing or
        unknown, unless `strict` is False."""
        if strict and (odd := sorted(self.state_dict().keys() ^ state_dict.keys())):
            raise RuntimeError(f"{self.config.family}: tensor {odd[0]} is missing or unknown")
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        if assign:
            self.net.tie_weights()
        return found

    def save(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """Writes the weights `state`, and config.json, for transformers into `directory`."""
        dtype = next(iter(state.values())).dtype
        head = {n: state[n] for n in self.net.state_dict() if n in state}
        if self.config.family in TRANSPOSED:
            head |= {n: t.t().contiguous() for n, t in head.items() if is_quantized(n)}
        self.net.save_pretrained(directory, state_dict=self._with_tied(head))
        table = {k: v for k, v in self.config.to_hf().items() if k != COMPUTED_BY}
        table |= {
            "architectures": [type(self.net).__name__],
            "dtype": str(dtype).removeprefix("torch."),
        }
        file = directory / "config.json"
        file.write_text(json.dumps(table, indent=2) + "\n")
        for weights in directory.glob("*.safetensors"):  # safetensors lets nobody else read them
            weights.chmod(file.stat().st_mode)

    def _with_tied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `state` with the further names of tied tensors, which transformers itself leaves out."""
        names = {id(p): name for name, p in self.named_parameters()}
        every = self.named_parameters(remove_duplicate=False)
        return state | {name: state[names[id(p)]] for name, p in every if names[id(p)] in state}


def _packed(rows: Sequence[Tensor], layout: PackedLayout) -> Tensor:
    """Returns the padded rows of each bucket, [sequences, longest, D], as packed tokens [T, D]."""
    kept = [x[:, b.first : b.rows.shape[1]] for x, b in zip(rows, layout.buckets, strict=True)]
    return torch.cat([x.flatten(0, 1) for x in kept])[layout.unpad]


class BehindHead:
    """What a model does to its logits behind the output head: nothing, a factor, or a soft cap."""

    def __init__(self, net: Any) -> None:
        """Finds it out, whatever the weights are, by other numbers in place of the head's. Raises
        CheckpointError if it is something else, or what enters the head is not the last hidden state."""
        self.scale, self.cap = 1.0, None
        head, net_name = net.get_output_embeddings(), type(net).__name__
        if head is None or net.base_model is net:
            raise CheckpointError(f"{net_name}: there is no output head on a model of its own")
        probe = torch.linspace(-100, 100, head.weight.shape[0])
        probe[0] = 1.0
        entered: list[Tensor] = []

        def other(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            entered.append(args[0])
            return probe.expand_as(out)

        hook, ids = head.register_forward_hook(other), torch.tensor([[0, 0], [0, 1]])
        try:
            with torch.no_grad():
                logits = net(input_ids=ids, use_cache=False).logits[0, -1]
                hidden = net.base_model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            hook.remove()
        self.scale = float(logits[0])
        if not torch.allclose(logits, probe * self.scale, rtol=1e-4):
            self.scale, self.cap = 1.0, getattr(net.config, "final_logit_softcapping", None)
        if not torch.allclose(hidden[0, 0], hidden[1, 0], atol=1e-5):
            raise CheckpointError(f"{net_name}: a token sees those behind it")
        known = torch.allclose(logits, self(probe), rtol=1e-4)
        if not known or not torch.equal(entered[0][0, -1], hidden[0, -1]):
            raise CheckpointError(f"{net_name}: what it does around its output head is not known")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.cap is not None:
            return self.cap * torch.tanh(logits / self.cap)
        return logits * self.scale if self.scale != 1 else logits


def load_foreign(config: DecoderConfig, path: str | Path) -> HfDecoder:
    """Returns the model in directory `path`, whose config is `config`, on the CPU in float32 and ready to
    learn. Raises CheckpointError if transformers cannot read it, a tensor is missing, not finite, or one of its
    own where `config` says that it is tied."""
    check_cache(config)
    kind = transformers().AutoModelForCausalLM
    try:
        net, found = kind.from_pretrained(
            str(path),
            config=silent(config),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises anything
        raise CheckpointError(f"{path}: {said_by(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if odd := sorted(found["unexpected_keys"]):
        logger.warning(
            "%s: tensor %s is of no layer and left out (%d in all)", path, odd[0], len(odd)
        )
    # transformers unties what is stored twice with other values, while engines and exports go by `config`.
    with torch.device("meta"):
        tied = {name for name, _ in kind.from_config(silent(config)).named_parameters()}
    if own := [name for name, _ in net.named_parameters() if name not in tied]:
        raise untied(path, own[0])
    for name, tensor in net.named_parameters():
        if not all(end.isfinite() for end in tensor.detach().aminmax()):
            raise CheckpointError(f"{path}: {name} holds NaN or an infinity")
    logger.info(
        "%s: computed by transformers; batches are padded, and shared prompts computed for each response",
        config.family,
    )
    return _decoder(config, net).requires_grad_(True)


def empty_foreign(config: DecoderConfig) -> HfDecoder:
    """Returns a model of `config` with values that mean nothing. No random number is drawn for others."""
    check_cache(config)
    kind = transformers().AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        return _decoder(config, kind.from_config(silent(config), dtype=torch.float32))


def _decoder(config: DecoderConfig, net: Any) -> HfDecoder:
    return HfDecoder(config, net.eval())


def without_values(model: HfDecoder) -> HfDecoder:
    """Moves the parameters of `model` to the device "meta"; its buffers, which no file has, stay."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            setattr(module, name, empty)
    model.net.tie_weights()
    return model
