"""Text to ids and back, for the real tokenizer and for small tokenizers of every kind."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from nanoserve.fetch import fetch
from nanoserve.tokenizer import Detokenizer, Tokenizer, byte_alphabet, load_tokenizer
from tests.folders import denied

REFERENCE = json.loads((Path(__file__).parent / "data/smollm2_reference.json").read_text())
TOKENIZER = load_tokenizer()
LIBRARY = tokenizers.Tokenizer.from_file(str(fetch() / "tokenizer.json"))
IM_START, IM_END = 1, 2
MANY = settings(max_examples=150, deadline=None)


@pytest.fixture(scope="module")
def their_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(fetch())


# ids


@pytest.mark.parametrize("case", REFERENCE["token_ids"], ids=lambda case: case["text"][:16])
def test_ids_are_those_of_llama_cpp(case):
    assert TOKENIZER.encode(case["text"], parse_special=True) == case["ids"]


@pytest.mark.parametrize("name", REFERENCE["greedy"])
def test_the_reference_prompts_have_the_recorded_ids(name):
    case = REFERENCE["greedy"][name]
    assert TOKENIZER.encode(case["text"], parse_special=True) == case["prompt_ids"]


def test_every_digit_is_a_token_of_its_own():
    ids = TOKENIZER.encode("1234567890")
    assert [TOKENIZER.decode([i]) for i in ids] == list("1234567890")


def test_the_byte_alphabet_is_that_of_the_tokenizers_library():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"], alphabet["é"]) == (32, 10, 65, 0xE9)


# SmolLM2's vocabulary lacks the bytes 0xF1 and 0xF2, which begin the unassigned planes 4 to 11,
# and six control characters: its own tokenizer drops them, in llama.cpp and in transformers alike.
LOST = ["\x04", "\x06", "\x13", "\x14", "\x16", "\x1d"]
KNOWN = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=LOST)
KNOWN |= st.characters(min_codepoint=0xC0000)


@MANY
@given(st.text(KNOWN))
def test_any_unicode_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@MANY
@given(st.text())
def test_any_unicode_comes_back_where_the_vocabulary_has_all_bytes(text):
    assert LLAMA3_LIKE.decode(LLAMA3_LIKE.encode(text)) == text


def test_the_real_vocabulary_lacks_six_characters_and_the_unassigned_planes():
    def comes_back(char: str) -> bool:
        return TOKENIZER.decode(TOKENIZER.encode(char)) == char

    assert [chr(i) for i in range(0x800) if not comes_back(chr(i))] == LOST
    planes = [p for p in range(17) if not comes_back(chr(p << 16 | 0x20))]
    assert planes == list(range(4, 12))


@MANY
@given(st.text(alphabet="<|>im_startend \n0é"))
def test_text_like_special_tokens_comes_back_whether_parsed_or_not(text):
    text = text + "<|im_end|>" + text
    for parse in (False, True):
        ids = TOKENIZER.encode(text, parse_special=parse)
        assert TOKENIZER.decode(ids) == text
        assert any(TOKENIZER.is_special(i) for i in ids) == parse


@MANY
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(ids):
    plain = [i for i in ids if not TOKENIZER.is_special(i)]
    assert TOKENIZER.decode(plain) == LIBRARY.decode(plain)
    assert TOKENIZER.decode(ids, skip_special=True) == TOKENIZER.decode(plain)


def test_the_empty_text_has_no_ids():
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.decode([]) == ""


def test_special_tokens_are_plain_characters_unless_parsed():
    text = "<|im_start|>user\nhi<|im_end|>"
    plain, parsed = TOKENIZER.encode(text), TOKENIZER.encode(text, parse_special=True)
    assert not {IM_START, IM_END} & set(plain)
    assert (parsed[0], parsed[-1]) == (IM_START, IM_END)
    assert TOKENIZER.decode(plain) == TOKENIZER.decode(parsed) == text
    assert TOKENIZER.decode(parsed, skip_special=True) == "user\nhi"
    assert TOKENIZER.token_id("<|im_end|>") == IM_END
    assert TOKENIZER.token_id("no such token") is None


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(ValueError, match="text is not valid Unicode"):
        TOKENIZER.encode("a\ud83d")


@pytest.mark.parametrize("bad", [-1, TOKENIZER.vocab_size, 10**12])
def test_an_id_outside_the_vocabulary_is_named(bad):
    with pytest.raises(ValueError, match=rf"token id {bad} is outside the vocabulary of 49152"):
        TOKENIZER.decode([5, bad])


# streaming

HARD = [
    "I love pizza 🍕 and 🥨",
    "family: 👨‍👩‍👧‍👦, flag: 🇯🇵, skin: 👍🏽",  # joiners, pairs, modifiers
    "東京は日本の首都です。",
    "e\u0301 é ﷽ \U0001d518\U0001d52b \U0010ffff",
    "literal \ufffd kept",
]


def stream(ids: list[int], prompt: list[int] = (), tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", HARD)
def test_no_piece_is_half_a_character(text):
    pieces = stream(TOKENIZER.encode(text))
    assert "".join(pieces) == text
    assert any("\ufffd" in piece for piece in pieces) == ("\ufffd" in text)
    assert len([piece for piece in pieces if piece]) > 1


@MANY
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_pieces_of_any_ids_join_to_the_whole(ids):
    pieces, whole = stream(ids), TOKENIZER.decode(ids, skip_special=True)
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@MANY
@given(st.text(KNOWN), st.data())
def test_a_prompt_may_end_inside_a_character(text, data):
    ids = TOKENIZER.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    pieces = stream(ids[cut:], ids[:cut])
    shown = TOKENIZER.decode(ids[:cut]).rstrip("\ufffd")
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    if "\ufffd" not in text:
        assert shown + "".join(pieces) == text


def test_a_character_that_the_prompt_began_is_shown_whole():
    ids = TOKENIZER.encode("🍕!")
    assert len(ids) > 2
    assert "".join(stream(ids[1:], ids[:1])) == "🍕!"


def test_text_is_shown_as_soon_as_it_is_complete():
    ids = TOKENIZER.encode("Hello world")
    assert stream(ids) == ["Hello", " world", ""]


def test_a_stream_that_ends_inside_a_character_says_so_once():
    ids = TOKENIZER.encode("🍕")[:-1]
    assert stream(ids) == [""] * len(ids) + ["\ufffd"]
    assert "".join(stream(ids)) == TOKENIZER.decode(ids)


def test_special_and_padded_ids_are_no_text():
    assert stream([IM_START, TOKENIZER.vocab_size, TOKENIZER.vocab_size + 63]) == [""] * 4


# chat templates

CONVERSATIONS = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "<b>&amp; 'quoted' \"twice\"</b>"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "  spaces \n\n and 🍕 {{ braces }} {% if %}"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_template_renders_as_in_transformers(messages, prompt, their_tokenizer):
    ours = TOKENIZER.render_chat(messages, add_generation_prompt=prompt)
    assert ours == their_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    assert messages[-1]["content"] in ours


LLAMA2_LIKE = """{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{% break %}{% endif %}
    [{{ message['role'] }}] {{ message['content'] | trim }} {{ message | tojson }}
{%- endfor %}
{%- if tools is not none %}{{ tools | length }}{% endif %}"""


@pytest.mark.parametrize("messages", [CONVERSATIONS[0], CONVERSATIONS[2]])
def test_a_templates_whitespace_filters_and_extensions_are_those_of_transformers(messages):
    ours = Tokenizer(byte_level(), {"chat_template": LLAMA2_LIKE, "bos_token": "<s>"})
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(byte_level()),
        bos_token="<s>",
        chat_template=LLAMA2_LIKE,
    )
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)


def test_what_the_template_refuses_is_said():
    ours = Tokenizer(byte_level(), {"chat_template": LLAMA2_LIKE})
    with pytest.raises(ValueError, match="roles must alternate"):
        ours.render_chat([{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize("message", [{"content": "a"}, {"role": "user"}, {}, "hi", None], ids=repr)
def test_a_message_without_role_or_content_is_named(message):
    with pytest.raises(ValueError, match="a message needs a role and a content, got"):
        TOKENIZER.render_chat([{"role": "user", "content": "a"}, message])


@pytest.mark.parametrize("content", [None, 3, ["a"]])
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(ValueError, match="the chat template failed"):
        TOKENIZER.render_chat([{"role": "user", "content": content}])


def test_a_checkpoint_without_a_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(byte_level(), {}).render_chat(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% if %}",
        "{{ 1 + 'a' }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_and_its_faults_are_said(template):
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    messages = [{"role": "user", "content": "a"}]
    try:
        assert "class" not in tokenizer.render_chat(messages)
        assert "os" not in template
    except ValueError as error:
        assert "the chat template failed" in str(error)
    assert messages == [{"role": "user", "content": "a"}]


# small tokenizers of other makes


def byte_level(bos: bool = False, special: tuple[str, ...] = ("<s>", "</s>")) -> str:
    """A byte-level BPE as of Llama 3: the text of its tokenizer.json."""
    vocab = {char: i for i, char in enumerate(byte_alphabet())} | {"he": 256, "ll": 257}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer.to_str()


def sentence_piece() -> str:
    """A BPE of SentencePiece's make, as of Llama 2: "▁" for a space, unknown bytes as <0xNN>."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"helowrd", "he", "ll", "▁w", "▁he", "▁hell", "▁hello"]:
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("▁", "w"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str()


NAMES = [None, {"bos_token": "<s>"}, {"bos_token": {"content": "<s>", "lstrip": False}}]


@pytest.mark.parametrize("bos_in_template", [True, False])
@pytest.mark.parametrize("adds_bos", [None, True, False])
@pytest.mark.parametrize("named", NAMES, ids=["unnamed", "plain", "dictionary"])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
def test_bos_stands_before_plain_text_where_the_checkpoints_own_tokenizer_puts_it(
    bos_in_template, adds_bos, named, where, tmp_path
):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {} if adds_bos is None else {"add_bos_token": adds_bos}
    write_folder(tmp_path, byte_level(bos_in_template), config)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if named and "config" in where and isinstance(named["bos_token"], dict):
        named = {"bos_token": named["bos_token"] | {"__type": "AddedToken"}}
    if named:
        (tmp_path / where).write_text(json.dumps((config if "config" in where else {}) | named))
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.prefix_ids + ours.encode("hello") == theirs("hello")["input_ids"]
    assert bool(ours.prefix_ids) == bos_in_template
    assert ours._name("bos_token") == theirs.bos_token
    assert ours.token_id("<s>") not in ours.encode("<s>hello")
    assert ours.encode("") == ours.encode("", parse_special=True) == []


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"bos_token": "</s>"}, {"bos_token": "<s>"}),
        ({"bos_token": None}, {"bos_token": "<s>"}),
        ({"added_tokens_decoder": {}}, {"bos_token": "<s>"}),
        ({"eos_token": "</s>"}, {"bos_token": "<s>", "eos_token": "<s>"}),
    ],
)
def test_two_files_that_name_special_tokens_are_weighed_as_in_transformers(config, names, tmp_path):
    write_folder(tmp_path, byte_level(), config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours._name("bos_token") == theirs.bos_token
    assert ours._name("eos_token") == theirs.eos_token


ADDED = ["<think>", "</think>", " two words "]


@pytest.mark.parametrize("parse", [True, False])
@MANY
@given(parts=st.lists(st.sampled_from([*ADDED, "<s>", "</s>", "he", "<", " ", "think>"])))
def test_added_tokens_that_are_not_special_stay_whole(parts, parse):
    text = "".join(parts)
    library = tokenizers.Tokenizer.from_str(byte_level())
    library.add_tokens(ADDED)
    ours = Tokenizer(library.to_str(), {})
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, split_special_tokens=not parse
    )
    ids = ours.encode(text, parse_special=parse)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == text
    for token in ADDED:
        assert (ours.token_id(token) in ids) == (token in text)


def test_threads_that_encode_at_once_do_not_see_each_others_setting():
    def encode(parse: bool) -> bool:
        return IM_END in TOKENIZER.encode("a<|im_end|>", parse_special=parse)

    with ThreadPoolExecutor(8) as pool:
        asked = [i % 3 == 0 for i in range(600)]
        assert list(pool.map(encode, asked)) == asked


def write_folder(folder: Path, text: str, config: dict | None) -> Path:
    (folder / "tokenizer.json").write_text(text)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_template_may_stand_in_a_jinja_file(tmp_path):
    write_folder(tmp_path, byte_level(), {"chat_template": "older"})
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(tmp_path).render_chat(CONVERSATIONS[0]) == "What is gravity?"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    write_folder(tmp_path, byte_level(), {"chat_template": named})
    assert load_tokenizer(tmp_path).render_chat(CONVERSATIONS[0]) == "What is gravity?"


def test_a_folder_without_a_tokenizer_config_will_do(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(bos=True), None))
    assert tokenizer.decode(tokenizer.encode("hello 🍕")) == "hello 🍕"
    assert tokenizer.prefix_ids == [tokenizer.token_id("<s>")]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "", "[]", '{"version": "1.0"}', byte_level()[:-99]])
def test_a_broken_tokenizer_is_named(content, tmp_path):
    write_folder(tmp_path, content, {})
    with pytest.raises(ValueError, match=rf"{tmp_path.name}.*cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"],
)
def test_a_file_that_may_not_be_read_is_named_with_the_reason(name, tmp_path):
    file = write_folder(tmp_path, byte_level(), {}) / name
    if not file.exists():
        file.write_text("{}")
    with (
        denied(file),
        pytest.raises(ValueError, match=rf"{name} cannot be read: Permission denied"),
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_tokenizer_config_is_named(content, tmp_path):
    write_folder(tmp_path, byte_level(), None)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_a_kind_of_tokenizer_that_is_not_made_of_bytes_is_refused_by_name(tmp_path):
    word_piece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    word_piece.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decoder is not supported.*WordPiece"):
        load_tokenizer(write_folder(tmp_path, word_piece.to_str(), {}))


LLAMA3_LIKE = Tokenizer(byte_level(), {})
SENTENCE_PIECE_LIBRARY = tokenizers.Tokenizer.from_str(sentence_piece())
SENTENCE_PIECE = Tokenizer(sentence_piece(), {"bos_token": "<s>"})


def test_sentence_piece_falls_back_to_bytes():
    ids = SENTENCE_PIECE.encode("hello w🍕")
    pieces = [SENTENCE_PIECE.token_bytes(i) for i in ids]
    assert pieces == [b" hello", b" w", *(bytes([byte]) for byte in "🍕".encode())]
    assert SENTENCE_PIECE.prefix_ids == [1]


@MANY
@given(st.text() | st.text(alphabet="helowrd 🍕é\n"))
def test_sentence_piece_comes_back(text):
    text = text.replace("▁", "_")  # in such a vocabulary, the same as a space
    ids = SENTENCE_PIECE.encode(text)
    assert SENTENCE_PIECE.decode(ids) == text
    assert SENTENCE_PIECE.decode(ids) == SENTENCE_PIECE_LIBRARY.decode(ids)


def test_sentence_piece_streams_its_spaces():
    """A continuation keeps the space before its first word; the start of a text drops it."""
    prompt, ids = SENTENCE_PIECE.encode("hello"), SENTENCE_PIECE.encode("world 🍕")
    assert "".join(stream(ids, [1, *prompt], SENTENCE_PIECE)) == " world 🍕"
