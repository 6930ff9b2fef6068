"""SGLang plugin of the timed servers alone: never installed, found in a folder of one run.

:func:`site` writes that folder. In the servers' processes :func:`register` draws random weights in
place of SGLang's dummy ones, pads heads for FlashMLA also in stock SGLang, and waits before
anything is loaded, so that a server imports while another one loads, and begins when told.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import random_init
from sglang_indexcache.library.writing import write_json

FOLDER = "INDEXCACHE_CARD_SERVER"
"""Variable with the folder of a server: ``begin`` and ``watch`` are laid there for it to see, and
each process that has imported lays a ``held`` of its own."""
FILL = "INDEXCACHE_CARD_FILL"
"""Variable that says that the KV pool is to be filled, for a decode without a prefill."""
BEGIN, HELD, WATCH, SEEN = "begin", "held", "watch", "seen.json"
_METADATA = "Metadata-Version: 2.1\nName: indexcache-card\nVersion: 0\n"
_ENTRY = "[sglang.srt.plugins]\nindexcache_card = benchmarks.card.plugin:register\n"


def site(folder: Path) -> Path:
    """Write a folder that makes the plugin known to the processes that have it on their path."""
    about = folder / "indexcache_card-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(_METADATA)
    (about / "entry_points.txt").write_text(_ENTRY)
    return folder


def register() -> None:
    """Install what the module says; in a process that another started, wait until told to begin."""
    if (parent := multiprocessing.parent_process()) is not None:
        folder = Path(os.environ[FOLDER])
        (folder / f"{HELD}.{os.getpid()}").touch()
        _wait_for(folder / BEGIN, parent)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pool = "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool.__init__"
    attention = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
    for target, hook, kind in (
        ("sglang.srt.model_loader.loader.initialize_dummy_weights", _load, HookType.REPLACE),
        (pool, _fill, HookType.AFTER),
        (f"{attention}._forward_flashmla_sparse", _pad, HookType.AROUND),
    ):
        HookRegistry.register(target, hook, kind)


def _wait_for(file: Path, parent: multiprocessing.process.BaseProcess) -> None:
    while not file.exists():
        if not parent.is_alive():
            raise SystemExit(f"the server ended before {file} was written")
        time.sleep(0.02)


def _load(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    random_init.initialize(model)
    config: Any = model.config
    Watcher(Path(os.environ[FOLDER]), config.num_experts_per_tok).watch(model)


def _fill(_result: None, pool: Any, *_: Any, **__: Any) -> None:
    if os.environ.get(FILL):
        random_init.fill(pool)


def _pad(original: Any, backend: Any, **call: Any) -> torch.Tensor:
    """Give FlashMLA the heads that it takes, as our backend does, and drop what they answer."""
    from sglang_indexcache.serving.cuda.backend import with_heads_for_flashmla

    padded = with_heads_for_flashmla(call, backend.device_sm_major)
    out: torch.Tensor = original(backend, **padded)
    return out if padded is call else out[:, : call["q_all"].shape[1]]


ENOUGH = 100_000
"""Tokens, all layers together, on which keys and experts are counted: it costs more than they."""


class Watcher:
    """Observer of a server's prefills while the file ``watch`` lies in its folder.

    For requests that are not timed, as watching waits for the card: the seconds of its indexers,
    which share of the index keys is distinct, how busy a layer's busiest expert is.
    """

    def __init__(self, folder: Path, experts_a_token: int) -> None:
        self._folder, self._per_token = folder, experts_a_token
        self._seconds = self._began = 0.0
        self._keys = self._distinct = 0
        self._chosen: dict[torch.nn.Module, torch.Tensor] = {}

    def watch(self, model: torch.nn.Module) -> None:
        """Attach to a model's indexers and routers."""
        for module in model.modules():
            kind = type(module).__name__
            if kind == "Indexer":
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after, with_kwargs=True)
            elif kind == "MoEGate":
                module.register_forward_hook(self._routed)

    @property
    def _is_watching(self) -> bool:
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return not is_captured and (self._folder / WATCH).exists()

    def _before(self, *_: Any) -> None:
        if self._is_watching:
            _synchronize()
            self._began = time.perf_counter()

    def _after(self, _module: Any, _args: Any, call: Mapping[str, Any], _result: Any) -> None:
        if not self._is_watching or not call["forward_batch"].forward_mode.is_extend():
            return
        _synchronize()
        self._seconds += time.perf_counter() - self._began
        if self._keys < ENOUGH:
            self._count_keys(call["forward_batch"], call["layer_id"])
        write_json(self._folder / SEEN, self.seen())

    def _count_keys(self, batch: Any, layer: int) -> None:
        """Count the keys of a chunk, and how many of them are distinct."""
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        pool: Any = get_token_to_kv_pool()
        width, page, slots = pool.index_head_dim, pool.page_size, batch.out_cache_loc.long()
        # The values of a page come first, in the GPU's layout as well as in the CPU platform's.
        pages = pool.get_index_k_with_scale_buffer(layer)[:, : page * width]
        keys = pages.unflatten(1, (page, width))[slots // page, slots % page]
        self._keys += len(keys)
        self._distinct += len(keys.float().unique(dim=0))

    def _routed(self, gate: Any, _args: Any, logits: torch.Tensor) -> None:
        if not self._is_watching or self._keys >= ENOUGH:
            return
        scores = logits.float().sigmoid()
        if gate.e_score_correction_bias is not None:
            scores = scores + gate.e_score_correction_bias
        # In one group of experts, as the timed shapes have it.
        chosen = scores.topk(self._per_token, -1).indices.flatten()
        counts = torch.bincount(chosen, minlength=scores.shape[-1])
        self._chosen[gate] = self._chosen.get(gate, torch.zeros_like(counts)) + counts

    def seen(self) -> dict[str, float]:
        """Return what was found so far; of experts what the least even layer has."""
        counts = self._chosen.values()
        shares = [float(count.max() * self._per_token / count.sum()) for count in counts]
        used = [int((count > 0).sum()) for count in counts]
        return {
            "indexer seconds": round(self._seconds, 4),
            "distinct index keys": self._distinct / max(self._keys, 1),
            "tokens of the busiest expert": max(shares, default=1.0),
            "experts used": min(used, default=0),
        }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
