"""Sets the stage when imported: ``torch.cuda``, the ways into compiled code, the references."""

from tests.rehearsal.stage import collectives, graphs, launches, mutants

collectives.install()
launches.install()  # before any module of SGLang imports one of them by name

from sglang_indexcache.serving.cuda import choice  # noqa: E402
from tests.rehearsal.stage.kernels import (  # noqa: E402, F401
    attention,
    dense,
    experts,
    indexer,
    quantized,
    rotary,
    speculative,
)

choice.ENGINE_TOPK.add(128)  # the references take the small checkpoints' lists too
launches.stand_in()
collectives.stand_in()
graphs.stand_in()
mutants.put_back()
