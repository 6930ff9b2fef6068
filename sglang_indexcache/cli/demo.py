"""``indexcache demo``: see the difference on this machine."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.cli.common import Output, command, group, json_or_text, name_and_value, out

app = group("See on this machine what sharing does.")


@command(app, "run", epilog="Example: indexcache demo run -o demo")
def demo_command(output: Output = Path(".demo")) -> None:
    """Serve a small model with every indexer and with a quarter of them, in turns. 3 to 5 minutes.

    Both servers answer the same questions and are timed on the same prompts. The output folder
    gets demo.json, with every sample, and the servers' logs.
    """
    import sglang  # noqa: F401  # first: the extra that brings it brings the rest

    from sglang_indexcache.demo.run import run

    run(output, out)


@command(app, "model", epilog="Example: indexcache demo model --preset deepseek-v3.2 -o model")
def make_model_command(
    output: Output,
    preset: str = "glm-5",
    size: str = "small",
    seed: int = 0,
    vocab_size: int = 4096,
    dtype: str = "bfloat16",
    field: list[str] | None = None,
) -> None:
    """Make a small DSA checkpoint with random weights and a real tokenizer.

    Options:
        preset (NAME): Its shape in small: glm-5 or deepseek-v3.2.
        size (NAME): Its size: tiny or small.
        vocab_size (COUNT): How many entries the tokenizer has.
        dtype (DTYPE): How weights are stored: bfloat16 or float32.
        field (NAME=VALUE): Replace a config field, for example --field num_hidden_layers=24.
    """
    from sglang_indexcache.demo.model import ModelSpec, make_model

    overrides = {
        name: json_or_text(value)
        for name, value in (name_and_value(text, "--field") for text in field or [])
    }
    spec = ModelSpec(preset, size, seed, vocab_size, dtype, overrides)
    with out.status(f"making {output} ..."):
        count = make_model(spec, output)
    out.print(f"wrote {output}: {preset} shape, {count / 1e6:.1f} M parameters, random weights")
