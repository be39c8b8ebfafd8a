"""Suggestions for unknown setting names: the same key in another table, our name for one that people know from
elsewhere, or the nearest key. Pure. Next: spec.py, which asks; settings.py, the keys that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LEARNING_RATE = "optim.muon_lr (for the layers' matrices) and optim.adam_lr (for everything else)"
# name elsewhere -> ours
OTHER_NAMES = {
    **dict.fromkeys(("lr", "learning_rate", "max_lr", "peak_lr", "base_lr"), LEARNING_RATE),
    **dict.fromkeys(("batch_size", "batch", "bs", "per_device_train_batch_size"), "train.windows (windows per step)"),
    **dict.fromkeys(
        ("max_steps", "num_steps", "n_steps", "iters", "iterations", "max_iters", "num_iterations"),
        "train.steps (of the first phase)",
    ),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "train.steps (steps instead of epochs)"),
    **dict.fromkeys(
        ("dim", "d_model", "n_embd", "hidden_size", "hidden_dim", "embed_dim", "model_dim", "embedding_size"),
        "model.width",
    ),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads", "attention_heads"), "model.heads"),
    **dict.fromkeys(
        ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"), "model.layers (in total, of all blocks)"
    ),
    **dict.fromkeys(("n_blocks", "num_blocks", "n_block"), "model.blocks"),
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_length", "max_seq_len", "block_size", "context_length", "context_size"),
        "model.context (in bytes)",
    ),
    **dict.fromkeys(("ctx", "n_ctx", "max_position_embeddings", "max_length"), "model.context (in bytes)"),
    **dict.fromkeys(("warmup", "num_warmup_steps", "warmup_iters", "lr_warmup_steps"), "optim.warmup_steps"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clipping", "clip", "clip_grad_norm"), "optim.clip_norm"),
    **dict.fromkeys(("betas", "beta1", "beta2", "adam_beta1", "adam_beta2"), "optim.adam_betas = [0.9, 0.98]"),
    "momentum": "optim.muon_momentum",
    **dict.fromkeys(("random_seed", "manual_seed", "rng_seed"), "seed"),
    **dict.fromkeys(("dataset", "data", "data_path", "data_dir", "dataset_name", "text", "path"), "corpus.source"),
    **dict.fromkeys(("val_share", "val_split", "validation_split", "valid_split"), "corpus.valid_share"),
    **dict.fromkeys(("test_split", "test_size"), "corpus.test_share"),
    **dict.fromkeys(("loss", "loss_type", "method", "training_objective"), "objective.kind"),
    **dict.fromkeys(("eval_every", "eval_interval", "eval_steps", "evaluation_interval"), "swarm.evaluate_every"),
    **dict.fromkeys(("local_steps", "inner_steps", "h", "sync_every"), "swarm.round_steps"),
    **dict.fromkeys(("compression", "quantization", "codec"), "swarm.update and swarm.download"),
    "outer_learning_rate": "swarm.outer_lr",
}
# What people look for and this program does not have, with what it does instead
NOT_HERE = {
    **dict.fromkeys(("weight_decay", "wd"), "there is no weight decay"),
    **dict.fromkeys(("vocab_size", "n_vocab", "vocabulary_size"), "corpus.tokenizer sets the vocabulary"),
    **dict.fromkeys(("optimizer", "optimiser", "optim_name"), "the optimiser is always Muon with AdamW"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), "the learning rate rises, stays and falls"),
}


def advice(path: list[str], known: Iterable[str]) -> str:
    """The end of a sentence about the unknown key `path`; `known` are the keys that exist, as table.key."""
    last, keys = path[-1].lower(), sorted(known)
    if same := namesake(last, keys):
        return same
    if last in NOT_HERE:
        return f"{NOT_HERE[last]}: remove it"
    in_table = {key.split(".")[-1]: key for key in keys if key.split(".")[:-1] == path[:-1]}
    anywhere = {key.split(".")[-1]: key for key in reversed(keys)} | {table: table for table in _tables(keys)}
    for names in (in_table, anywhere):
        if near := difflib.get_close_matches(last, names, n=1):
            return f"did you mean {names[near[0]]}?"
    return "remove it"


def namesake(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a key in no table, or under the name that it has elsewhere. Empty: there is none."""
    if found := [key for key in sorted(known) if key.split(".")[-1] == name]:
        return f"did you mean {' or '.join(found)}?"
    return f"here it is {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""


def _tables(keys: Iterable[str]) -> set[str]:
    return {key.split(".")[0] for key in keys if "." in key}
