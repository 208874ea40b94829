# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 2 · Weights are just names
#
# Week 1 · Phase 0, foundations · you need: Day 1 (the oracle)
#
# **Today** you turn a model file into a dictionary of tensors. You translate its names, unpack its
# 4-bit numbers and put the rows of q and k back in order, until all 273 tensors are equal to the
# oracle's.
#
# It takes about an hour. Short of time? Run the sections "Where the weights are" and "Measure it"
# without reading them, and leave the folded cells of the config and of the loader closed.

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(2)
today.picture("weights-are-names")

# %% [markdown]
# ## Why it matters
#
# A trained model is a **checkpoint**: a file that holds the figures of its shape (the **config**)
# and a few hundred **tensors**, each with a name. It holds no code. Any program that uses the same
# names and the same order of the numbers can run it: transformers, llama.cpp, vLLM and, from today
# on, yours.
#
# Names and order are also where loading goes wrong. A tensor under a wrong name, or with its rows
# in another order, still multiplies. Nothing raises an error; the model answers a little worse, or
# a lot. So every step today is checked for *equal*, not for *about right*.
#
# ## What is in the file
#
# The model came as one file in **GGUF**, the format of llama.cpp: config, tokens and tensors
# together. The `gguf` package reads its header and maps the rest into memory (a **memory map**: a
# page of the file is read when it is first touched).

# %%
from nanoserve.fetch import gguf_path, model_folder, resolve
from nanoserve.gguf_file import check_readable, gguf_config, open_gguf

resolve("smollm2")  # brings the model if this is your first day
path, folder = gguf_path(), model_folder()
tensors = open_gguf(path).tensors
len(tensors)

# %%
for tensor in tensors[:7]:
    shape = tensor.shape[::-1].tolist()  # GGUF counts dimensions from the innermost outwards
    print(f"{tensor.name:22} {tensor.tensor_type.name:5} {shape!s:14} {tensor.n_bytes:>10,} bytes")

# %% [markdown]
# A name, a type, a shape, some bytes. `blk.0` is layer 0 of 30. `attn_q` makes the queries of
# attention, `ffn_up` is a part of the MLP; you build both in the coming days. `F32` is float32.
# `Q4_1` and `Q8_0` are **quantisations**: numbers kept in few bits, with some loss.
#
# ## The config
#
# Before it reads any weight, the engine needs the shape of the model. The words you need today:
#
# | word | meaning | here |
# | --- | --- | --- |
# | hidden size | length of the vector that stands for a token | 576 |
# | layers | equal stages, one after the other | 30 |
# | query heads, `n_q` | parts of attention, each with queries of its own | 9 |
# | KV heads, `n_kv` | parts with keys and values; 3 query heads share each KV head (**GQA**) | 3 |
# | `head_dim` | length of one head's vectors | 64 |
# | tied head | the last matrix is the embedding (the table of tokens) used again | yes |

# %%
import json
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# %% jupyter={"source_hidden": true}
# lands in nanoserve/config.py: FAMILIES, UnsupportedModel, Llama3Scaling, ModelConfig
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The checkpoint needs an option that the engine lacks; the message names file and option."""


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 (rope_type "llama3"): low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens, before the scaling


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes count elements; the context counts tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    n_q: int  # query heads
    n_kv: int  # key and value heads, each shared by n_rep query heads
    head_dim: int
    context: int  # maximum number of tokens in a sequence
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qkv_bias: bool  # Qwen2; Llama and Qwen3 with attention_bias
    o_bias: bool
    qk_norm: bool  # Qwen3 normalises each head's query and key
    tied_head: bool  # the embedding is also the output head
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def n_rep(self) -> int:
        """Number of query heads that share one KV head."""
        return self.n_q // self.n_kv


# %% [markdown]
# Parsing is no exercise: **you may leave the next two folded cells closed.** They follow one rule:
# the engine **refuses by name** whatever it cannot do. If it ignored a sliding window, or an
# unknown scaling of positions, nothing would crash. But the engine would run another model than the
# one that was trained. `Fields` checks the type and the range of each field. `parse_config` builds
# the config from them, and refuses options that the engine lacks and fields that contradict each
# other.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/config.py: Fields, _is_int, read_json
class Fields:
    """The fields of one JSON object. Each method checks type and range and returns the value.

    A ValueError names the file, the field and the value. `null` is a wrong type, unless a method
    says otherwise; `true` and `false` are not numbers.
    """

    def __init__(self, values: dict, file: str, prefix: str = "") -> None:
        self.values, self.file, self.prefix = values, file, prefix

    def wrong(self, key: str, problem: str) -> ValueError:
        """The error for a field with a wrong value; `problem` ends the message."""
        return ValueError(f"{self.file}: {self.prefix}{key} {problem}")

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """The error for a field whose value is valid, but not supported by this engine."""
        value = reprlib.repr(self.values[key])
        return UnsupportedModel(
            f"{self.file}: {self.prefix}{key} {value} is not supported; supported: {supported}"
        )

    def size(self, key: str, default: int | None = None, high: int = 2**31 - 1) -> int:
        """An integer from 1 to high. Without a default the field is required."""
        value = self.values.get(key, default)
        if not _is_int(value) or not 1 <= value <= high:
            limit = "a positive integer" if not _is_int(value) or value < 1 else f"at most {high}"
            raise self.wrong(key, f"must be {limit}, got {self._got(key, value)}")
        return value

    def number(
        self, key: str, default: float | None = None, high: float = sys.float_info.max
    ) -> float:
        """A number above 0 and below high, as a float. Without a default the field is required."""
        value = self.values.get(key, default)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not 0 < value < high:  # NaN fails this comparison
            limit = "a finite number above 0" if high > 1 else f"a number above 0 and below {high}"
            raise self.wrong(key, f"must be {limit}, got {self._got(key, value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """`true` or `false`."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, got {reprlib.repr(value)}")
        return value

    def token_ids(self, key: str, vocab_size: int, several: bool = True) -> tuple[int, ...]:
        """One token id, a list of ids if `several`, or no id (absent or null), as a tuple."""
        value = self.values.get(key)
        ids = value if several and isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(i) and 0 <= i < vocab_size for i in ids):
            raise self.wrong(
                key,
                f"must be {'token ids' if several else 'a token id'} from 0 to {vocab_size - 1}, "
                f"got {reprlib.repr(value)}",
            )
        return tuple(ids)

    def _got(self, key: str, value: Any) -> str:
        return reprlib.repr(value) if key in self.values else "nothing"

    def inner(self, key: str) -> "Fields | None":
        """The object under a key; None where the field is absent, null or empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, f"must be an object or null, got {reprlib.repr(value)}")
        return Fields(value, self.file, f"{self.prefix}{key}.") if value else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises ValueError, with file and reason, if that fails."""
    check_readable(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON or UTF-8, or 5,000 digits in a number
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not valid JSON: its content is not an object")
    return content


# %% jupyter={"source_hidden": true}
# lands in nanoserve/config.py: load_config, parse_config
def load_config(path: Path) -> ModelConfig:
    """Read the config of a folder in the Hugging Face layout, or of a .gguf file.

    Reads no weight. Raises UnsupportedModel for an option that the engine lacks. Raises ValueError
    for a file that is missing or is not JSON, and for a field that is missing or wrong or that
    contradicts another field.
    """
    if path.suffix == ".gguf":
        return parse_config(gguf_config(path), file=str(path))
    config, generation = path / "config.json", path / "generation_config.json"
    return parse_config(
        read_json(config),
        read_json(generation) if generation.exists() else None,
        str(config),
        str(generation),
    )


def parse_config(
    hf: dict,
    generation: dict | None = None,
    file: str = "config.json",
    generation_file: str = "generation_config.json",
) -> ModelConfig:
    """Turn the content of config.json (and of generation_config.json) into a ModelConfig.

    An absent field gets the default of transformers for its family; null is accepted where
    transformers accepts it. Errors as for load_config; they name `file` or `generation_file`.
    """
    fields = Fields(hf, file)
    family = hf.get("model_type")
    if family not in FAMILIES:
        shown = reprlib.repr(family)
        raise UnsupportedModel(
            f"{file}: model_type {shown} is not supported; supported: {', '.join(FAMILIES)}"
        )
    num_layers = fields.size("num_hidden_layers", high=10_000)
    _check_options(fields, family)
    _check_windows(fields, family, num_layers)
    n_q, n_kv, head_dim = _heads(fields, family)
    theta, scaling = _rope(fields)
    vocab_size = fields.size("vocab_size")
    bias = fields.flag("attention_bias") if family in ("llama", "qwen3") else False
    eos_ids = fields.token_ids("eos_token_id", vocab_size)
    chosen = Fields(generation or {}, generation_file)
    if chosen.values.get("eos_token_id") is not None:
        eos_ids = chosen.token_ids("eos_token_id", vocab_size)
    bos = fields.token_ids("bos_token_id", vocab_size, several=False)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        n_q=n_q,
        n_kv=n_kv,
        head_dim=head_dim,
        context=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6, high=1),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias,
        qk_norm=family == "qwen3",
        tied_head=fields.flag("tie_word_embeddings"),
        eos_ids=eos_ids,
        bos_id=bos[0] if bos else None,
    )


def _check_options(fields: Fields, family: str) -> None:
    """Raise UnsupportedModel for an option that changes what the model computes."""
    values = fields.values
    if values.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    if family == "llama" and fields.flag("mlp_bias"):
        raise fields.unsupported("mlp_bias", "false")
    if values.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "null")
    if values.get("per_layer_config") not in (None, {}):
        raise fields.unsupported("per_layer_config", "null")


def _check_windows(fields: Fields, family: str, num_layers: int) -> None:
    """Raise UnsupportedModel unless every layer attends to the whole sequence.

    Mistral applies sliding_window unless it is null, and ignores use_sliding_window. Qwen applies
    sliding_window only with use_sliding_window: to the layers from max_window_layers on, or to the
    layers that layer_types names. Llama has no window, but transformers' KV cache applies
    sliding_window to Llama too.
    """
    values, kinds = fields.values, fields.values.get("layer_types")
    if family == "mistral" and "layer_types" in values:
        raise fields.unsupported("layer_types", "an absent field (it marks a Ministral model)")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.wrong(
                "layer_types",
                f"must be null or a list of {num_layers} names, got {reprlib.repr(kinds)}",
            )
        if any(kind != "full_attention" for kind in kinds):
            raise fields.unsupported("layer_types", "full_attention in every layer")
    window = values.get("sliding_window", None if family == "llama" else 4096)
    if window is not None and not _is_int(window):
        raise fields.wrong("sliding_window", f"must be an integer or null, got {window!r:.40}")
    if family in ("qwen2", "qwen3"):
        first = values.get("max_window_layers", 28)
        if not _is_int(first):
            raise fields.wrong("max_window_layers", f"must be an integer, got {first!r:.40}")
        if not fields.flag("use_sliding_window") or kinds is not None or first >= num_layers:
            return
    if window is not None:
        raise Fields({"sliding_window": window}, fields.file).unsupported(
            "sliding_window", "attention to the whole sequence"
        )


def _heads(fields: Fields, family: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim."""
    values, hidden = fields.values, fields.size("hidden_size")
    n_q = fields.size("num_attention_heads")
    kv_null = values.get("num_key_value_heads", ...) is None and family != "mistral"
    kv_absent = {"llama": n_q, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
    n_kv = n_q if kv_null else fields.size("num_key_value_heads", kv_absent)
    if n_q % n_kv:
        raise fields.wrong(
            "num_key_value_heads", f"must divide num_attention_heads {n_q}, got {n_kv}"
        )
    null = family in ("llama", "mistral") and values.get("head_dim", ...) is None
    derived = null or ("head_dim" not in values and family != "qwen3")
    if hidden % n_q and (derived or family == "llama"):
        raise fields.wrong(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads {n_q}"
        )
    head_dim = hidden // n_q if derived else fields.size("head_dim", 128)
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even for RoPE, got {head_dim}")
    return n_q, n_kv, head_dim


def _rope(fields: Fields) -> tuple[float, Llama3Scaling | None]:
    """RoPE's theta and scaling, from rope_theta and rope_scaling.

    Newer files have both in rope_parameters. A file may use both forms if they agree.
    """
    theta = fields.number("rope_theta", 10_000.0)
    rotated = fields.values.get("partial_rotary_factor")
    if rotated is not None and rotated != 1:
        raise fields.unsupported("partial_rotary_factor", "1.0")
    inner = (fields.inner("rope_scaling"), fields.inner("rope_parameters"))
    meanings = [_rope_object(rope, fields) for rope in inner if rope is not None]
    if len(set(meanings)) > 1:
        raise fields.wrong("rope_scaling", "contradicts rope_parameters")
    return meanings[0] if meanings else (theta, None)


def _rope_object(rope: Fields, outer: Fields) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling of `rope`, the object rope_scaling or rope_parameters of `outer`."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(
            f"{rope.file}: {rope.prefix}rope_type {reprlib.repr(kind)} is not supported; "
            "supported: default, llama3"
        )
    if rope.values.get("type", kind) != kind:
        raise rope.wrong("type", f"contradicts rope_type {kind!r}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "llama3":
        known |= {"factor", "low_freq_factor", "high_freq_factor"}
        known |= {"original_max_position_embeddings"}
    for key in sorted(rope.values.keys() - known):
        raise UnsupportedModel(
            f"{rope.file}: {rope.prefix}{reprlib.repr(key)[1:-1]} is not supported "
            f"with rope_type {kind}"
        )
    if rope.values.get("partial_rotary_factor", 1) != 1:
        raise rope.unsupported("partial_rotary_factor", "1.0")
    theta = rope.number("rope_theta", outer.number("rope_theta", 10_000.0))
    if outer.values.get("rope_theta", theta) != theta:
        raise rope.wrong(
            "rope_theta", f"{theta:g} contradicts rope_theta {outer.values['rope_theta']:g}"
        )
    if kind == "default":
        return theta, None
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context=rope.size("original_max_position_embeddings"),
    )
    if scaling.factor < 1:
        raise rope.wrong("factor", f"must be at least 1, got {scaling.factor:g}")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.wrong("high_freq_factor", "must be above low_freq_factor")
    key = "original_max_position_embeddings"
    if outer.values.get(key, scaling.original_context) != scaling.original_context:
        raise rope.wrong(key, f"contradicts {key} at the top level")
    return theta, scaling


# %%
from pprint import pprint

config = load_config(path)
pprint(config)

# %% [markdown]
# The folder beside the file holds the same model in the Hugging Face layout: `config.json`,
# `model.safetensors` and the tokenizer. Both configs are equal. The last three lines show
# the errors for configs that the engine refuses:


# %%
from nanoserve.course.show import wrapped


def told(call):
    """Print the error of a call."""
    try:
        call()
    except ValueError as error:
        print(wrapped(f"{type(error).__name__}: {error}"))


print(load_config(folder) == config)
told(lambda: parse_config({"model_type": "gpt2"}))
told(lambda: parse_config(gguf_config(path) | {"rope_scaling": {"rope_type": "yarn"}}))
told(lambda: parse_config(gguf_config(path) | {"rms_norm_eps": None}))

# %% [markdown]
# ## Names
#
# GGUF says `blk.0.attn_q.weight`; Hugging Face says `model.layers.0.self_attn.q_proj.weight`. The
# engine uses the Hugging Face names, because most checkpoints come with them. The dictionary:

# %%
# lands in nanoserve/weights.py: GGUF_NAMES
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# %% [markdown]
# ### Your turn: `hf_name`
#
# | GGUF name | pieces | Hugging Face name |
# | --- | --- | --- |
# | `blk.3.attn_q.weight` | layer 3, part `attn_q`, kind `weight` | `model.layers.3.self_attn.q_proj.weight` |
# | `blk.3.attn_q.bias` | layer 3, part `attn_q`, kind `bias` | `model.layers.3.self_attn.q_proj.bias` |
# | `output_norm.weight` | no layer, part `output_norm` | `model.norm.weight` |
# | `blk.2.mystery.weight` | a part that is not in the table | `blk.2.mystery.weight` |
#
# 1. A tensor of a layer goes under `model.layers.<number>.`; any other has no such prefix.
# 2. The part is looked up in `GGUF_NAMES`; the kind stays.
# 3. A name with an unknown part, or with a kind other than `weight` and `bias`, comes back
#    unchanged. Later the loader refuses such a tensor, and names it.
#
# Stuck? `today.hint()` gives a hint about your mistake, and says more with each call.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unchanged if its part is not in GGUF_NAMES."""
    raise NotImplementedError("your turn")


today.check(hf_name)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. (The same holds
# for every folded solution today.) It takes the name apart with one regular expression; `split`
# is as good.

# %%
import re


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: hf_name
def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    For example, blk.3.attn_norm.weight becomes model.layers.3.input_layernorm.weight. A name with
    an unknown part is returned unchanged; check_shapes then refuses the tensor as surplus.
    """
    layer, part, kind = re.match(r"(?:blk\.(\d+)\.)?(\w*)\.?(.*)", gguf_name).groups()
    if part not in GGUF_NAMES or kind not in ("weight", "bias"):
        return gguf_name
    return f"{'' if layer is None else f'model.layers.{layer}.'}{GGUF_NAMES[part]}.{kind}"


# %% [markdown]
# The file gives one list of names. The config alone determines a second list, with the shape that
# each tensor must have. The folded cell makes the second list; the cell after it compares the two.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: expected_shapes
def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of every weight but the head. A Linear weight is [out, in]."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.n_q * config.head_dim, config.n_kv * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if config.qkv_bias:
            layer["self_attn.q_proj.bias"] = (q_size,)
            layer["self_attn.k_proj.bias"] = layer["self_attn.v_proj.bias"] = (kv_size,)
        if config.o_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


# %%
names = [hf_name(tensor.name) for tensor in tensors]
shapes = expected_shapes(config)
print(len(names), "in the file,", len(shapes), "expected, the same:", set(names) == set(shapes))

# %% [markdown]
# ## Where the weights are
#
# Two guesses before you look. The **embedding** is the table with one row for each of the 49,152
# tokens. Put numbers in place of `None` and run the cell.

# %%
share = "What share of the parameters is in the embedding? (0 to 1)"
today.predict("embedding", share, guess=None, low=0, high=1)
each = "How many bytes does a weight take in this file, on average? (float32: 4)"
today.predict("bytes", each, guess=None, low=0, high=8)


# %%
def part(name: str) -> str:
    kinds = {"embed": "embedding", "self_attn": "attention", "mlp": "MLP"}
    return next((kind for word, kind in kinds.items() if word in name), "norms")


parts = ["embedding", "attention", "MLP", "norms", "all"]
count, size = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
for tensor, name in zip(tensors, names, strict=True):
    for key in (part(name), "all"):
        count[key] += int(tensor.n_elements)
        size[key] += int(tensor.n_bytes)

# %%
print(f"{'':10}{'parameters':>13}{'in float32':>12}{'in this file':>14}{'bytes each':>12}")
for key in parts:
    in_float32, here = 4 * count[key] / 1e6, size[key] / 1e6
    print(
        f"{key:10}{count[key]:13,}{in_float32:9.1f} MB{here:11.1f} MB{size[key] / count[key]:12.3f}"
    )

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker


def bars(values, ylabel, title, top, form):
    fig, ax = figure(height=3.2, ylabel=ylabel, title=title)
    drawn = ax.bar(parts[: len(values)], values, width=0.55, color=COLOURS["engine"])
    ax.bar_label(drawn, fmt=form, padding=3)
    ax.grid(visible=False, axis="x")
    ax.set_ylim(0, top)
    return fig, ax


# %%
shares = [count[key] / count["all"] for key in parts[:4]]
fig, ax = bars(shares, "share of the parameters", "Where the parameters are", 1, "%.3g")
prediction_marker(ax, 0.42, today.guess("embedding"))
fig

# %%
each = [size[key] / count[key] for key in parts]
fig, ax = bars(each, "bytes per parameter", "What they take in the file", 5, "%.3g")
ax.axhline(4, color=COLOURS["muted"])
label_line(ax, 1, 4, "in float32: 4 bytes each", COLOURS["muted"], "above")
ax.set_xlim(-0.5, 5)
prediction_marker(ax, 4.65, today.guess("bytes"))
fig

# %% [markdown]
# The MLP has more than half of the parameters, the embedding a fifth. In a model of 70 billion
# parameters with the same vocabulary the embedding's share would be under one per cent. A
# vocabulary is expensive for a small model. With the tied head, the model stores the table only
# once.
#
# The numbers of the norms keep 4 bytes each: they are so few that packing them would save almost
# nothing.
#
# ## 32 weights in 20 bytes
#
# `Q4_1` cuts a row into **blocks** of 32 weights (the blocks of memory of Day 14 are another
# thing). A block keeps two float16 numbers, the **scale** (the picture's d) and the **minimum**
# (m), and for each weight a number q from 0 to 15. To **dequantise** is to undo that:
#
# $$ w = \text{scale} \cdot q + \text{minimum} $$
#
# | bytes | hold |
# | --- | --- |
# | 0, 1 | the scale, float16 |
# | 2, 3 | the minimum, float16 |
# | 4 to 19 | 16 bytes; byte i holds q of weight i in its **low** four bits, q of weight i + 16 in its **high** four |
#
# An example: byte `0x5C` at place 0, scale 0.5, minimum -1. The low four bits are `0xC` = 12, so
# weight 0 is 0.5 · 12 - 1 = 5. The high four are 5, so weight 16 is 0.5 · 5 - 1 = 1.5.
#
# ### Your turn: `dequantize_q4_1`
#
# In: uint8 `[n, 20]`, one block in each row. Out: float32 `[n, 32]`, with the product and the sum
# in float32. `x.view(torch.float16)` reads each pair of neighbouring bytes as one float16.

# %%
import torch


def dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Undo Q4_1: uint8 [n, 20] -> float32 [n, 32], where value = scale * q + minimum."""
    raise NotImplementedError("your turn")


today.check(dequantize_q4_1)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: dequantize_q4_1
def dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Undo Q4_1 (ggml): uint8 [n, 20] -> float32 [n, 32], where value = scale * nibble + minimum.

    In each block, bytes 0-1 are the scale and bytes 2-3 the minimum, both float16. The low nibbles
    of the other 16 bytes are values 0 to 15; the high nibbles are values 16 to 31.
    """
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    packed = blocks[:, 4:]  # [n, 16]
    nibbles = torch.cat([packed & 0xF, packed >> 4], dim=1)  # [n, 32]
    return scale * nibbles + minimum


# %% [markdown]
# The `gguf` package handles the other quantisations, such as the embedding's `Q8_0` (32 numbers of
# 8 bits and a scale).

# %%
import numpy as np


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: dequantize
def dequantize(tensor: "ReaderTensor") -> torch.Tensor:
    """A GGUF tensor's values in float32, with the dimensions in PyTorch's order."""
    from gguf.quants import dequantize as dequantize_any

    shape = tuple(map(int, tensor.shape[::-1]))
    if tensor.tensor_type.name == "Q4_1":
        return dequantize_q4_1(torch.from_numpy(np.array(tensor.data)).view(-1, 20)).view(shape)
    return torch.from_numpy(dequantize_any(tensor.data, tensor.tensor_type).copy()).view(shape)


# %% [markdown]
# The `gguf` package can undo `Q4_1` too, with its own code in NumPy. Does it give the same numbers
# for every tensor of layer 0?

# %%
from gguf.quants import dequantize as dequantize_gguf

layer_0 = [t for t in tensors if t.name.startswith("blk.0.") and t.tensor_type.name == "Q4_1"]
same = [
    np.array_equal(dequantize(t).numpy(), dequantize_gguf(t.data, t.tensor_type)) for t in layer_0
]
print(sum(same), "of", len(same), "tensors equal")
assert all(same)

# %% [markdown]
# Look at one block: 32 weights, and the 16 levels that they can have.

# %%
by_name = dict(zip(names, tensors, strict=True))
block = dequantize(by_name["model.layers.0.self_attn.q_proj.weight"])[0, :32]
low, high, used = block.min(), block.max(), block.unique()
step = used.diff().min()
print(f"{low:.3f} to {high:.3f} in steps of {step:.3f}; {len(used)} of 16 levels are in use")

# %% jupyter={"source_hidden": true}
# Draws the plot: 32 weights on 16 levels
levels = [low + q * step for q in range(16)]
fig, ax = figure(xlabel="weight in the block", ylabel="value", title="32 weights on 16 levels")
ax.hlines(levels, -0.6, 31.6, color=COLOURS["grid"], linewidth=1.2)
ax.plot(block, "o", color=COLOURS["engine"])
ax.grid(visible=False)
ax.set(xlim=(-1, 40), xticks=range(0, 32, 4))
for q, name in ((0, "q = 0, the minimum"), (15, "q = 15")):
    label_line(ax, 31.6, levels[q], name, COLOURS["ink"])
fig

# %% [markdown]
# The weights before rounding are not in this file, so the plot cannot show how far each was moved.
# Rounding to the nearest level moves a weight by at most half a step.
#
# ## The order of q and k
#
# From Day 4 on, **RoPE** encodes a token's position: it takes the numbers of a query or key in
# pairs and turns each pair by an angle. There are two conventions for which numbers make a pair:
#
# - the Hugging Face layout pairs numbers that are **half a head apart**: i and i + head_dim / 2;
# - GGUF's Llama pairs **neighbours**: 2i and 2i + 1.
#
# A row of q's weight makes one number of the query. So the rows of q and k were reordered when the
# file was written, and you put them back (the lower right of the picture). Inside each head of d
# rows, for i from 0 to d / 2 - 1:
#
# $$ \text{out}[i] = \text{in}[2i] \qquad \text{out}[i + d / 2] = \text{in}[2i + 1] $$
#
# One head of 6 rows: the file has Hugging Face's rows in the order 0, 3, 1, 4, 2, 5. The result has
# them in the order 0, 1, 2, 3, 4, 5.
#
# ### Your turn: `unpermute`
#
# In: `[n_heads * head_dim, ...]`, where the dots are the columns of a weight, or nothing for a
# bias. Out: the same shape. Heads stay where they are. `n_heads` is 9 for q and 3 for k. No loop is
# needed: split the first dimension, swap two, join again.


# %%
def unpermute(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo GGUF's order of a Llama's q or k rows: [n_heads * head_dim, ...], same shape out."""
    raise NotImplementedError("your turn")


today.check(unpermute)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: unpermute
def unpermute(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Undo GGUF's order of a Llama's q or k rows: [n_heads * head_dim, ...], same shape out.

    RoPE rotates rows in pairs. GGUF stores the two rows of a pair side by side; the Hugging Face
    layout stores them half a head apart (rows i and i + head_dim / 2).
    """
    pairs = weight.unflatten(0, (n_heads, -1, 2))  # [n_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)


# %%
in_file = torch.tensor([0, 3, 1, 4, 2, 5])
print(unpermute(in_file, n_heads=1).tolist())

# %% [markdown]
# ## The loader
#
# Now the pieces come together. The loader first **lists** a file: names, shapes, and for each
# tensor a function that reads it (`StoredTensor`). It checks the list against the config, and reads
# values only if the list has no fault. Short of time? **Leave the folded cells closed** and go on
# at "Prove it": what follows needs only `load_weights`.

# %%
from collections.abc import Callable


# %% jupyter={"source_hidden": true}
# until day 32: lands in nanoserve/weights.py: StoredTensor, list_gguf
@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, and read() to load its values."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def list_gguf(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file under their Hugging Face names, dequantised as they are read.

    Raises UnsupportedModel for a quantisation that the gguf package cannot undo.
    """
    from gguf import quants

    stored = {}
    for tensor in open_gguf(path).tensors:
        if tensor.name == "rope_freqs.weight":  # gguf_config reads it
            continue
        kind = tensor.tensor_type.name
        if kind not in FLOATS and not hasattr(quants, kind):
            raise UnsupportedModel(f"tensor {tensor.name}: quantisation {kind} is not supported")

        def read(tensor: "ReaderTensor" = tensor) -> torch.Tensor:
            values = dequantize(tensor)
            heads = {"attn_q": config.n_q, "attn_k": config.n_kv}.get(tensor.name.split(".")[-2])
            return unpermute(values, heads) if heads and config.family == "llama" else values

        # GGUF lists dimensions from the innermost to the outermost.
        stored[hf_name(tensor.name)] = StoredTensor(tuple(map(int, tensor.shape[::-1])), read)
    return stored


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: FLOATS, check_shapes
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_shapes(stored: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError for the first tensor that is missing, surplus or of the wrong shape."""
    for name, shape in expected.items():
        if name not in stored:
            raise ValueError(f"tensor {name} is missing from the checkpoint")
        if stored[name].shape != shape:
            raise ValueError(
                f"tensor {name} has shape {list(stored[name].shape)}, "
                f"but the config requires {list(shape)}"
            )
    for name in stored:
        if name not in expected:
            raise ValueError(
                f"tensor {name} is in the checkpoint, but the config has no place for it"
            )


# %% [markdown]
# The second format is **safetensors**: named tensors as they lie in memory, in one file or several
# (**shards**).


# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: list_safetensors
def list_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of the shards in model.safetensors.index.json."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    elif index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise ValueError(f"{index} is not valid: weight_map must map names to files")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        raise ValueError(f"{folder} has no weights: no model.safetensors, no {index.name}")
    stored = {}
    for file in files:
        check_readable(file)
        try:
            shard = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
        for name in shard.keys():  # a safetensors file is not a dict
            if name.endswith("rotary_emb.inv_freq"):  # a constant in old Llama files
                continue
            view = shard.get_slice(name)
            if view.get_dtype() not in FLOATS:
                raise UnsupportedModel(
                    f"tensor {name} is stored as {view.get_dtype()}; supported: {', '.join(FLOATS)}"
                )
            # Defaults bind shard and name now; a closure would use those of the last iteration.
            stored[name] = StoredTensor(
                tuple(view.get_shape()), lambda shard=shard, name=name: shard.get_tensor(name)
            )
    return stored


# %% [markdown]
# `load_weights` lists, checks and reads. (Day 32 gives these functions one more argument or field, for
# weights that stay in four bits. A cell that begins with `# until day` holds the form until that day.)


# %% jupyter={"source_hidden": true}
# until day 32: lands in nanoserve/weights.py: load_weights
def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """Read a folder of safetensors, or a .gguf file, into {Hugging Face name: tensor}.

    The result always has "lm_head.weight"; a tied head is the embedding itself, in the same memory.
    Raises a ValueError that names the file or tensor: a file that cannot be read or is not whole; a
    tensor that is missing, surplus or of the wrong shape; a head that contradicts the config.
    """
    stored = list_gguf(path, config) if path.suffix == ".gguf" else list_safetensors(path)
    head = stored.pop("lm_head.weight", None)
    check_shapes(stored, expected_shapes(config))
    if head is not None:
        shape = (config.vocab_size, config.hidden_size)
        check_shapes({"lm_head.weight": head}, {"lm_head.weight": shape})
    elif not config.tied_head:
        raise ValueError("tensor lm_head.weight is missing, and tie_word_embeddings is not true")
    weights = {name: tensor.read().to(device, dtype) for name, tensor in stored.items()}
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding if head is None else head.read().to(device, dtype)
    if config.tied_head and head is not None:
        if not torch.equal(weights["lm_head.weight"], embedding):
            raise ValueError(
                "tensor lm_head.weight differs from the embedding, but tie_word_embeddings is true"
            )
        weights["lm_head.weight"] = embedding
    return weights


# %% [markdown]
# ## Prove it
#
# Load the GGUF with the code above, and take the oracle's **state dict**. That is PyTorch's word
# for a dictionary from name to tensor.

# %%
import time

start = time.process_time()
weights = load_weights(path, config)
seconds_gguf = time.process_time() - start
print(len(weights), "tensors of", weights["model.norm.weight"].dtype)

# %%
from nanoserve.oracle import load_oracle

theirs = load_oracle("smollm2").state_dict()
equal = [name for name, tensor in theirs.items() if torch.equal(weights[name], tensor)]
print(
    len(equal), "of", len(theirs), "tensors equal; no other names:", weights.keys() == theirs.keys()
)
assert len(equal) == len(theirs) == 273

# %% [markdown]
# Equal to the last bit. This proves the names, the shapes and today's reading of the file. It does
# not prove the conversion, because transformers read the folder that nanoserve once made from the
# same GGUF. Two other checks cover the conversion: the `gguf` package gave the same numbers above,
# and the repository's tests compare all tensors with transformers' own reader of GGUF.
#
# The package's own `load_weights` has more to do from Day 32 on. It still reads the same values:

# %%
from nanoserve import weights as package

packaged = package.load_weights(path, config)
assert all(torch.equal(packaged[name], weights[name]) for name in weights)
print(len(packaged), "tensors, equal to those above")
del packaged

# %% [markdown]
# The file has 272 tensors and the dictionary 273. The additional tensor is `lm_head.weight`, which
# scores the next token. It is **tied**: a second name for the embedding, in the same memory.

# %%
embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
print(list(head.shape), "the same storage:", head.data_ptr() == embedding.data_ptr())

# %% [markdown]
# Which errors does the loader raise for a damaged checkpoint? Leave a tensor out, add one, change a
# shape:

# %%
stored = list_safetensors(folder)
name = "model.layers.7.mlp.up_proj.weight"
told(lambda: check_shapes({k: v for k, v in stored.items() if k != name}, shapes))
told(lambda: check_shapes(stored | {"model.layers.30.mlp.up_proj.weight": stored[name]}, shapes))
told(lambda: check_shapes(stored | {"model.norm.weight": stored[name]}, shapes))

# %% [markdown]
# ## What the names do not catch
#
# If you forget to undo the permutation, every name and every shape is still right. What does such a
# model write? The rest of the engine comes on later days, so use the package: its `LLM` makes text
# from a prompt. Below, q and k keep the rows in the file's order, and all else is right.

# %%
from nanoserve import LLM, SamplingParams
from nanoserve.model import Model

in_file_order = {
    hf_name(t.name): dequantize(t) for t in tensors if t.name.split(".")[-2] in ("attn_q", "attn_k")
}
forgotten = weights | in_file_order
print(len(in_file_order), "of", len(weights), "tensors differ in the order of their rows")

# %%
llm, written = LLM("smollm2"), {}
for prompt in ("The capital of France is", "One, two, three, four, five,"):
    for name, values in (("right", weights), ("forgotten", forgotten)):
        llm.model = Model(config, values)
        [answer] = llm.generate(prompt, SamplingParams(max_tokens=6))
        written[name, prompt[:3]] = answer.text
        print(f"{name:10} {prompt + answer.text!r}")
assert " Paris" in written["right", "The"] and " Paris" in written["forgotten", "The"]
assert " six" in written["right", "One"] and " six" not in written["forgotten", "One"]

# %% [markdown]
# Both models say Paris. For that fact the order of the words seems to matter little. But the
# broken model cannot count: the angles that encode positions now turn the wrong pairs. The first
# prompt alone would not have shown the mistake. A few good answers prove little; `torch.equal` on
# every tensor proves the weights.
#
# ## Your answer is the engine
#
# `today.mine()` puts your answers that passed into the engine, in place of the package's functions,
# and prints how often each was called. Load the `.gguf` itself with them: your functions then make
# the names, the numbers and the order of q and k.

# %% tags=["nbval-ignore-output"]
with today.mine():
    llm = LLM(path)
    [answer] = llm.generate("One, two, three, four, five,", SamplingParams(max_tokens=6))
print(answer.text)
assert answer.text == " six, seven, eight,"

# %% [markdown]
# ## Measure it
#
# Why convert at all, if a GGUF can be loaded directly? Dequantising takes time at each load, and a
# safetensors file needs none: it is mapped, and a weight is read when it is first used. Below is
# the processor time until all 273 names are there. Processor time leaves out the work of other
# programs:

# %% tags=["nbval-ignore-output"]
start = time.process_time()
mapped = load_weights(folder, config)
seconds_folder = time.process_time() - start
print(f"GGUF {seconds_gguf:.2f} s, safetensors {seconds_folder:.3f} s")
assert seconds_folder < seconds_gguf / 3

# %% [markdown]
# Both figures leave something out. An earlier cell had already read the GGUF's header. And the
# mapped weights have not been used yet: the first forward pass reads them from disk, once. On disk
# the GGUF is the smaller file: 97 MB of tensors against 538.
#
# ## The words of the day

# %%
today.glossary()

# %% [markdown]
# ## What you learned
#
# 1. **A checkpoint is a dictionary.** Loading translates names, number format and order. All of it
#    can be checked for equality.
# 2. **A right name and a right shape prove little.** Rows in another order multiply without an
#    error, and the broken model still knows Paris.
# 3. **Refuse by name, before you read.** An error that names the missing tensor shows the fault
#    at once. A model that runs without the tensor hides the fault.
#
# ## Tomorrow
#
# The model reads and writes numbers, and you type text. Day 3 turns text into ids and back.
#
# **In one paragraph.** A model file is a list of named tensors and a few figures about their shape.
# I translated 272 names, unpacked numbers of 4 bits that share a scale and a minimum in each block,
# and put the rows of q and k back in the order that Hugging Face uses. Then every tensor was equal
# to the oracle's, bit for bit. With the rows in the wrong order there was no error: the model still
# said Paris, but it could not count to six.
