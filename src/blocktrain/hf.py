"""BlockTrain's models for `transformers`: a config, a causal language model around BlockModel, a tokenizer of bytes,
and the folder that contains them. Importing this module registers the classes. It needs the extra hf.
Next: model/stack.py, which computes the logits; docs/hf.md, how to use it.

    import blocktrain.hf
    model = AutoModelForCausalLM.from_pretrained("folder")
    tokenizer = AutoTokenizer.from_pretrained("folder")
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

from blocktrain.errors import ConfigError, StorageError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.files import write_whole
from blocktrain.model.block import Block, build_block
from blocktrain.model.continuation import Continuation
from blocktrain.model.stack import BlockModel, window_start
from blocktrain.spec import NUM_SYMBOLS, RunSpec
from blocktrain.train.run import load_model

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
CODE_FILE = "modeling_blocktrain.py"
CODE = '''"""For trust_remote_code: the classes are those of the installed package blocktrain."""

from blocktrain.hf import BlockTrainConfig, BlockTrainForCausalLM

__all__ = ["BlockTrainConfig", "BlockTrainForCausalLM"]
'''


class BlockTrainConfig(PreTrainedConfig):
    """The run's spec and the weights of the composition."""

    model_type = "blocktrain"

    def __init__(
        self,
        spec: Mapping[str, Any] | None = None,
        combine: Mapping[str, Sequence[float]] | None = None,
        **settings: Any,
    ) -> None:
        self.spec = RunSpec.model_validate(spec or {}).model_dump(mode="json")
        self.combine = {path: list(weights) for path, weights in (combine or {}).items()}
        shape = self.run_spec.model
        self.vocab_size, self.max_position_embeddings = shape.vocabulary, shape.context
        self.hidden_size, self.num_hidden_layers = shape.width, shape.total_layers
        self.num_attention_heads = shape.heads
        settings.setdefault("tie_word_embeddings", False)
        super().__init__(**settings)

    @property
    def run_spec(self) -> RunSpec:
        return RunSpec.model_validate(self.spec)


class BlockTrainForCausalLM(PreTrainedModel, GenerationMixin):
    """One token is one byte, unless the model has a tokenizer. `generate` has one KV cache per row and reads the same
    windows as BlockModel.generate."""

    config_class = BlockTrainConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ("StackedBlock", "DenoiseBlock")

    def __init__(self, config: BlockTrainConfig) -> None:
        super().__init__(config)
        with torch.device("cpu"):  # blocks draw their initial weights with a generator, which the meta device lacks
            self.model = BlockModel(config.run_spec, config.combine)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        continuations: dict[int, Continuation] | None = None,
        **_: object,
    ) -> CausalLMOutput:
        if continuations is not None:
            return CausalLMOutput(logits=self._next_logits(input_ids, attention_mask, continuations))
        if attention_mask is None or bool(attention_mask.all()):
            logits = self._logits(input_ids)
        else:
            logits = self._logits_of_rows(input_ids, attention_mask.bool())
        return CausalLMOutput(loss=None if labels is None else _loss(logits, labels), logits=logits)

    def generate(self, *inputs: Any, **settings: Any) -> Any:
        """As transformers has it, but for assisted decoding, which cuts back caches of its own kind."""
        for name in ASSISTED:
            if settings.get(name) or getattr(settings.get("generation_config"), name, None):
                raise ConfigError(
                    f"this model does not decode with {name}: leave it out, or serve the model with blocktrain serve, "
                    f"which drafts with its own first blocks"
                )
        if settings.get("use_cache") is not False:
            settings["continuations"] = {}
        return super().generate(*inputs, **settings)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        continuations: dict[int, Continuation] | None = None,
        **_: object,
    ) -> dict[str, Any]:
        """The window of each row that the model reads next; or the rows themselves, if they have KV caches."""
        if continuations is not None:
            return {"input_ids": input_ids, "attention_mask": attention_mask, "continuations": continuations}
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
        for row in mask:
            (places,) = row.nonzero(as_tuple=True)
            row[places[: window_start(len(places), self.config.max_position_embeddings)]] = 0
        first = int(mask.any(0).nonzero()[0])
        return {"input_ids": input_ids[:, first:], "attention_mask": mask[:, first:]}

    def _next_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None, continuations: dict[int, Continuation]
    ) -> Tensor:
        """The logits after each row, [B, 1, vocabulary]. A row that takes another one's place, as in a beam search, is
        computed again from where they differ."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = []
        for row, (ids, read) in enumerate(zip(input_ids, mask.bool(), strict=True)):
            text = ids[read].tolist()
            continuation = continuations.get(row) or continuations.setdefault(row, self.model.continuation())
            logits.append(continuation.logits(text, window_start(len(text), self.config.max_position_embeddings)))
        return torch.stack(logits)[:, None].to(input_ids.device)

    def _logits(self, input_ids: Tensor) -> Tensor:
        context = self.config.max_position_embeddings
        if input_ids.size(1) > context:
            raise ConfigError(
                f"{input_ids.size(1)} tokens were given and this model reads at most {context} at once: "
                f"shorten the text"
            )
        path = self.model.paths[0]
        return self.model.combined(self.model.readings(input_ids, path), path)

    def _logits_of_rows(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Padding is not read, because it would shift the positions of the bytes after it. Its logits are 0."""
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size, device=input_ids.device, dtype=self.dtype)
        for row, (ids, read) in enumerate(zip(input_ids, mask, strict=True)):
            if read.any():
                logits[row, read] = self._logits(ids[read][None])[0]
        return logits

    def _init_weights(self, module: nn.Module) -> None:
        """transformers clears tables that are computed and not stored. This computes them again."""
        if isinstance(module, Block):
            with torch.device("cpu"):
                initial = build_block(self.config.run_spec, module.index)
            stored = module.state_dict()
            for name, table in initial.named_buffers():
                if name not in stored:
                    module.get_buffer(name).copy_(table)


def byte_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """One token per byte; the token's number is the byte. Rows of a batch are padded with the byte 0, which the model
    does not read there. Its name in a text is text, like any other character."""
    alphabet = _byte_names()
    tokenizer = Tokenizer(BPE(vocab={name: byte for byte, name in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        pad_token=alphabet[0],
        split_special_tokens=True,
    )


def tokenizer_for(run: RunDirectory) -> PreTrainedTokenizerFast:
    """The run's own tokenizer, with the same ids; or one token per byte."""
    file, context = run.tokenizer_file(), run.spec.model.context
    if file is None:
        return byte_tokenizer(context)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(file.decode()),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        pad_token=_byte_names()[0],  # every tokenizer of ours has the byte 0
        split_special_tokens=True,
    )


def write_folder(run: RunDirectory | str | Path, out: str | Path) -> None:
    """Writes what `from_pretrained` loads: weights, config, tokenizer, and the file that trust_remote_code imports. The
    files are made in a temporary folder. The config is copied last, because nothing loads without it."""
    run, out = run if isinstance(run, RunDirectory) else RunDirectory.open(run), Path(out)
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as folder:
        _save(run, Path(folder))
        _make_folder(out)
        for path in sorted(Path(folder).iterdir(), key=lambda path: path.name == "config.json"):
            write_whole(out / path.name, path.read_bytes())


def _save(run: RunDirectory, out: Path) -> None:
    model = load_model(run)
    config = BlockTrainConfig(run.spec.without_paths().model_dump(mode="json"), model.combine)
    module = Path(CODE_FILE).stem
    config.auto_map = {
        "AutoConfig": f"{module}.{BlockTrainConfig.__name__}",
        "AutoModelForCausalLM": f"{module}.{BlockTrainForCausalLM.__name__}",
    }
    wrapped = BlockTrainForCausalLM(config)
    wrapped.model.load_state_dict(model.state_dict())
    wrapped.save_pretrained(out)
    tokenizer_for(run).save_pretrained(out)
    (out / CODE_FILE).write_text(CODE)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be created ({error.strerror}): choose another folder") from None


def _loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Nats per byte. The labels are the input; each byte is predicted from the bytes before it. −100 is ignored."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)


def _byte_names() -> list[str]:
    """The characters that byte-level tokenizers use for the 256 bytes (Radford et al., 2019): a visible byte is itself,
    any other is the next character from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(NUM_SYMBOLS) if byte not in seen]
    return [chr(byte) if byte in seen else chr(NUM_SYMBOLS + hidden.index(byte)) for byte in range(NUM_SYMBOLS)]


AutoConfig.register(BlockTrainConfig.model_type, BlockTrainConfig, exist_ok=True)
AutoModelForCausalLM.register(BlockTrainConfig, BlockTrainForCausalLM, exist_ok=True)
